"""The kernels of every instruction set against the reference, without ONNX Runtime.

`instruction_sets.cpp` is linked with kernels that are compiled as the library is, with sanitizers,
and for aarch64.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from cpp.conftest import BuildLibrary, compiler
from shared import REPOSITORY, locked
from support.kernels import instruction_sets

HEADERS = REPOSITORY / "runtime" / "cpp" / "src"
CHECKS = REPOSITORY / "tests" / "kernels"
ENTRIES = {HEADERS / "kernels" / name for name in ("operators.cpp", "measure.cpp")}
"""What ONNX Runtime and Python call."""
KERNELS = sorted({*HEADERS.glob("kernels/*.cpp")} - ENTRIES)

CACHE = REPOSITORY / "build" / "tests-kernels"
"""Ignored by git. A folder for each program that was built."""

# Multiply and add in one only where it is written, as the kernels' own flags say.
FLAGS = ["-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
SANITIZED = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
AARCH64 = {"max": ["i8mm", "dotprod", "scalar"], "neoverse-n1": ["dotprod", "scalar"],
           "cortex-a72": ["scalar"]}  # fmt: skip
"""Processors that qemu emulates, and the kernels of each."""


def program(*command: str) -> Path:
    """Build the program, unless its sources, compiler and flags are those of the last build."""
    checks = sorted(CHECKS.glob("*.cpp"))
    sources = [*KERNELS, *checks]
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True)
    command = (*command, *FLAGS, f"-I{HEADERS}")
    read = [*sources, *sorted(HEADERS.glob("kernels/*.hpp"))]
    contents = _hash(version.stdout, *(file.read_bytes() for file in read))
    folder = CACHE / _hash(str(command).encode(), *(source.name.encode() for source in sources))
    folder.mkdir(parents=True, exist_ok=True)
    built, record = folder / "instruction_sets", folder / "sources"
    with locked(folder / "lock"):
        if not record.exists() or record.read_text("utf-8") != contents:
            record.unlink(missing_ok=True)
            objects = [folder / f"{source.stem}.o" for source in sources]
            # What is not shipped, or not run here, is compiled faster.
            idle = [] if "amx" in instruction_sets() else [HEADERS / "kernels" / "amx.cpp"]
            for source, compiled in zip(sources, objects, strict=True):
                less = ["-O1"] if source in (*checks, *idle) else []
                _compile(*command, *less, "-c", source, "-o", compiled)
            _compile(*command, *objects, "-o", built)
            record.write_text(contents, "utf-8")
    return built


def _compile(*command: str | Path) -> None:
    made = subprocess.run(command, capture_output=True, check=False)
    assert made.returncode == 0, made.stderr.decode()[-6000:]


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def printed(*command: str | Path) -> str:
    """Run a program that must succeed; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def digests(*command: str | Path) -> list[list[str]]:
    """Return the name of each instruction set that was tried, and the digest of its results.

    The reference is tried with rows one at a time, and has a digest of its own.
    """
    return [line.split() for line in printed(*command).splitlines()]


def check_names(found: list[list[str]]) -> None:
    names = [name for name, _ in found]
    # Tiles of AMX are emulated where there is AVX-512.
    emulated = ["amx"] if "avx512-vnni" in names else []
    assert names == instruction_sets() + emulated


def test_every_instruction_set_here_has_the_bits_of_the_reference(
    built_library: BuildLibrary,
) -> None:
    check_names(digests(built_library("native").program("instruction_sets")))


@pytest.mark.nightly
def test_every_instruction_set_here_has_the_bits_of_the_reference_under_sanitizers() -> None:
    check_names(digests(program(*compiler(), *SANITIZED)))


def clang() -> str:
    found = shutil.which("clang++")
    return found or pytest.skip("clang++ is not installed")


def test_clang_reads_every_kernel_without_a_warning() -> None:
    printed(clang(), *FLAGS, f"-I{HEADERS}", "-fsyntax-only", *KERNELS)


@pytest.mark.nightly
def test_every_instruction_set_here_has_the_bits_of_the_reference_by_clang() -> None:
    check_names(digests(program(clang(), "-O3")))


def test_kernels_are_optimized_whatever_the_build_type(tmp_path: Path) -> None:
    command = ["cmake", "-S", HEADERS.parent, "-B", tmp_path, "-DSPECRT_IMPLEMENTATION=native"]
    command += ["-DCMAKE_BUILD_TYPE=MinSizeRel", "-DCMAKE_CXX_FLAGS=-ffast-math"]
    printed(*command, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON")
    units = json.loads((tmp_path / "compile_commands.json").read_text("utf-8"))
    ran = {Path(unit["file"]): unit["command"].split() for unit in units}
    for source in HEADERS.glob("kernels/*.cpp"):
        flags = ran[source]
        assert [flag for flag in flags if flag.startswith("-O")][-1] == "-O3", source
        assert flags.index("-fno-fast-math") > flags.index("-ffast-math"), source


@pytest.mark.nightly
@pytest.mark.parametrize("processor", AARCH64)
def test_every_instruction_set_of_aarch64_has_the_bits_of_the_ones_here(
    processor: str, built_library: BuildLibrary
) -> None:
    cross = shutil.which("aarch64-linux-gnu-g++")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if cross is None or emulator is None or platform.machine() == "aarch64":
        pytest.skip("g++-aarch64-linux-gnu and qemu-user are not both installed, or not needed")
    here = dict(digests(built_library("native").program("instruction_sets")))
    bits = [here["scalar" if name == "scalar" else instruction_sets()[0]]
            for name in AARCH64[processor]]  # fmt: skip
    built = program(cross, "-O3", "-static")
    found = digests(emulator, "-cpu", processor, built)
    assert found == [[*pair] for pair in zip(AARCH64[processor], bits, strict=True)]
