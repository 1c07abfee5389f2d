"""The C++ library, built once for each way that the tests ask for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import pytest

from conftest import REPOSITORY, locked, shared_folder

SOURCES = REPOSITORY / "runtime" / "cpp"
COMPILERS = ("c++", "g++", "clang++")

Sanitize = bool | Literal["thread"]
"""True: AddressSanitizer and UBSan; "thread": ThreadSanitizer."""


@dataclass(frozen=True)
class Library:
    """A build of libspecrt, installed, and the programs that check it."""

    implementation: str
    prefix: Path
    """Where it was installed."""
    path: Path
    """The shared library there."""
    build: Path

    def program(self, name: str) -> Path:
        """Return a program of tests/cpp."""
        return self.build / "tests" / name


class BuildLibrary(Protocol):
    """Builds an implementation (hosted, native, or fake), or finds it built."""

    def __call__(self, implementation: str, sanitize: Sanitize = False) -> Library: ...


@pytest.fixture(scope="session")
def built_library(tmp_path_factory: pytest.TempPathFactory) -> BuildLibrary:
    """Build the library the first time any worker asks for it; skip where nothing can build it."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    if "CXX" not in os.environ and not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"needs a C++ compiler: {', '.join(COMPILERS)}, or CXX")
    root = shared_folder(tmp_path_factory)

    def build(implementation: str, sanitize: Sanitize = False) -> Library:
        name = f"cpp-{implementation}-{_sanitizer(sanitize)}".lower()
        folder = root / name
        outcome = root / f"{name}.outcome"
        with locked(root / f"{name}.lock"):
            if not outcome.exists():
                outcome.write_text(_build(folder, implementation, sanitize), "utf-8")
        failed = outcome.read_text("utf-8")
        if failed:
            pytest.fail(f"libspecrt ({name}) cannot be built:\n{failed}", pytrace=False)
        (library,) = (folder / "installed").rglob("libspecrt.so")
        return Library(implementation, folder / "installed", library, folder)

    return build


def run_program(command: list[str | Path], timeout: float = 300) -> str:
    """Run a program that must succeed; return what it printed, both ways together."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False
    )
    said = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{said[-6000:]}"
    return said


def run_check(library: Library, name: str, vectors: Path) -> None:
    """Hold a part of the native implementation to vectors; fails with what differs."""
    run_program([library.program("native_check"), name, vectors])


def _sanitizer(sanitize: Sanitize) -> str:
    return sanitize if isinstance(sanitize, str) else ("ON" if sanitize else "OFF")


def _build(folder: Path, implementation: str, sanitize: Sanitize) -> str:
    """Configure, build and install; return what went wrong, or nothing."""
    options = {
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": "-O1 -g1",
        "CMAKE_INSTALL_PREFIX": str(folder / "installed"),
        "SPECRT_IMPLEMENTATION": implementation,
        "SPECRT_SANITIZE": _sanitizer(sanitize),
        "SPECRT_TESTS": "ON",
        "SPECRT_WERROR": "ON",
    }
    if implementation == "hosted":
        options["SPECRT_PYTHON"] = sys.executable
    if implementation == "native":
        options["SPECRT_ONNXRUNTIME_LIBRARY"] = str(onnxruntime_library())
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    jobs = max(1, (os.cpu_count() or 1) // workers)
    defined = [f"-D{name}={value}" for name, value in options.items()]
    for command in (
        ["cmake", "-S", str(SOURCES), "-B", str(folder), *defined],
        ["cmake", "--build", str(folder), "--parallel", str(jobs), "--target", "install"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return (done.stdout + done.stderr)[-6000:]
    return ""


def onnxruntime_library() -> Path:
    """Return the library that ONNX Runtime's wheel brings."""
    import onnxruntime

    folder = Path(onnxruntime.__file__).parent / "capi"
    found = sorted(folder.glob("libonnxruntime.so*"))
    if not found:
        pytest.skip(f"needs libonnxruntime.so in {folder}")
    return found[-1]
