"""The C++ library and its programs, built once for all workers and for the runs that follow."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest

from cpp.native_calls import Case, Document, near, plain
from shared import REPOSITORY, locked

SOURCES = REPOSITORY / "runtime" / "cpp"
CHECKS = REPOSITORY / "tests" / "cpp"
KERNELS = REPOSITORY / "tests" / "kernels"
CACHE = REPOSITORY / "build" / "tests-cpp"
"""Ignored by git. A folder for each way to build, with the hashes of what it was built from."""
TOOLS = {
    "cmake": ("cmake",),
    "g++": ("c++", "g++", "clang++"),
    "make": ("make", "ninja"),
    "pkg-config": ("pkg-config",),
}
"""Debian packages, and the programs of which one is enough."""
TARGETS = {
    ("native", "ON"): ("all",),
    ("native", "thread"): ("abi_check",),
    ("native", "OFF"): ("application", "instruction_sets"),
    ("hosted", "ON"): ("application",),
    ("hosted", "OFF"): ("install", "application"),
}
"""What is built of an implementation under a sanitizer."""

Sanitize = bool | Literal["thread"]
"""True: AddressSanitizer and UBSan; "thread": ThreadSanitizer."""


@dataclass(frozen=True)
class Library:
    """A build of libspecrt, and the programs of tests/cpp that use it."""

    implementation: str
    build: Path

    @property
    def prefix(self) -> Path:
        """Where it was installed."""
        return self.build / "installed"

    @property
    def path(self) -> Path:
        """The shared library."""
        return self.build / "libspecrt.so"

    def program(self, name: str) -> Path:
        """Return a program of tests/cpp."""
        return self.build / "tests" / name

    def run(
        self, case: str, status: int = 0, environment: Mapping[str, str] | None = None, **given: Any
    ) -> list[str]:
        """Run a case of application/main.cpp; return its lines.

        CPython keeps memory at its end, which is not a leak of the library.
        """
        leaks = {"ASAN_OPTIONS": "detect_leaks=0"} if self.implementation == "hosted" else {}
        command = [self.program("application"), case, *(f"{k}={v}" for k, v in given.items())]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, **leaks, **(environment or {})},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (status, ""), (done.stdout[-500:], done.stderr)
        return done.stdout.splitlines()


class BuildLibrary(Protocol):
    """Builds an implementation (hosted or native), or finds it built."""

    def __call__(self, implementation: str, sanitize: Sanitize = False) -> Library: ...


@pytest.fixture(scope="session")
def built_library() -> BuildLibrary:
    """Build the library, unless its sources and flags are those of the last build."""
    missing = [name for name, programs in TOOLS.items() if not any(map(shutil.which, programs))]
    if missing and not (missing == ["g++"] and "CXX" in os.environ):
        pytest.fail(f"the C and C++ tests need the Debian packages {', '.join(TOOLS)}; "
                    f"missing here: {', '.join(missing)}", pytrace=False)  # fmt: skip

    @functools.cache  # a run tests one state of the sources, and tries once to build it
    def attempt(implementation: str, sanitize: Sanitize) -> tuple[Path, str]:
        sanitizer = sanitize if isinstance(sanitize, str) else ("ON" if sanitize else "OFF")
        targets = TARGETS[implementation, sanitizer]
        options = {
            "CMAKE_BUILD_TYPE": "None",
            "CMAKE_CXX_FLAGS": f"{'-O0' if sanitize else '-O1'} -g1",
            "SPECRT_IMPLEMENTATION": implementation,
            "SPECRT_SANITIZE": sanitizer,
            "SPECRT_TESTS": "ON",
            "SPECRT_WERROR": "ON",
        }
        if implementation == "hosted":
            options["SPECRT_PYTHON"] = sys.executable
        else:
            options["SPECRT_ONNXRUNTIME_LIBRARY"] = str(onnxruntime_library())
        version = run_program([*compiler(), "--version"])
        flags = [os.environ.get(name, "") for name in ("CXXFLAGS", "CFLAGS", "LDFLAGS")]
        built_from = [str(SOURCES), version, platform.machine(), flags, options, targets]
        key = hashlib.sha256(json.dumps(built_from).encode()).hexdigest()[:12]
        folder = CACHE / f"{implementation}-{sanitizer.lower()}-{key}"
        folder.mkdir(parents=True, exist_ok=True)
        options["CMAKE_INSTALL_PREFIX"] = str(folder / "installed")
        with locked(folder / "lock"):
            return folder, _build(folder, options, targets)

    def build(implementation: str, sanitize: Sanitize = False) -> Library:
        folder, failure = attempt(implementation, sanitize)
        if failure:
            pytest.fail(f"libspecrt ({folder.name}) cannot be built:\n{failure}", pytrace=False)
        return Library(implementation, folder)

    return build


@pytest.fixture(scope="session")
def native(built_library: BuildLibrary) -> Library:
    """The native library, with AddressSanitizer and UBSan."""
    return built_library("native", sanitize=True)


@pytest.fixture(scope="session")
def hosted(built_library: BuildLibrary) -> Library:
    """The hosted library."""
    return built_library("hosted")


class NativeCalls:
    """Calls functions of the native implementation; see native/answers.hpp."""

    def __init__(self, native: Library, file: Path) -> None:
        self._native, self._file = native, file

    def __call__(self, calls: Iterable[Document]) -> list[Any]:
        """Return the answer of each call."""
        self._file.write_text(json.dumps(plain([*calls]), allow_nan=False), "utf-8")
        printed = run_program([self._native.program("native_calls"), self._file])
        return [json.loads(line) for line in printed.split("\n")[:-1]]

    def check(self, cases: Iterable[Case], within: float = 0.0) -> None:
        """Fail with the first call of which another answer came."""
        calls, expected = zip(*cases, strict=True)
        found = self(calls)
        pairs = zip(calls, found, plain(expected), strict=True)
        wrong = [each for each in pairs if not near(each[1], each[2], within)]
        assert not wrong, f"{len(wrong)} of {len(found)} differ: {str(wrong[0])[:4000]}"


@pytest.fixture
def native_calls(native: Library, tmp_path: Path) -> NativeCalls:
    """The functions of the native implementation, sanitized."""
    return NativeCalls(native, tmp_path / "calls.json")


def run_program(
    command: list[str | Path], timeout: float = 300, environment: Mapping[str, str] | None = None
) -> str:
    """Run a program that must succeed; return what it printed, both ways together."""
    process = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    output = process.stdout.decode("utf-8", "replace")
    assert process.returncode == 0, f"{command} ended with {process.returncode}:\n{output[-6000:]}"
    return output


def onnxruntime_library() -> Path:
    """Return the library that ONNX Runtime's wheel brings."""
    import onnxruntime

    *_, library = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    return library


def compiler() -> list[str]:
    """Return the command of the C++ compiler."""
    return (os.environ.get("CXX") or next(filter(None, map(shutil.which, TOOLS["g++"])))).split()


def _hashes() -> dict[str, str]:
    """Return the hash of every file that a build reads."""
    files = [SOURCES / "CMakeLists.txt", CHECKS / "CMakeLists.txt"]
    folders = (SOURCES / "cmake", SOURCES / "include", SOURCES / "src", CHECKS, KERNELS)
    for folder in folders:
        files += [path for path in folder.rglob("*.*") if path.suffix not in (".py", ".pyc")]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


def _build(folder: Path, options: Mapping[str, str], targets: tuple[str, ...]) -> str:
    """Bring a build up to date with its sources; return what went wrong, or nothing."""
    record, hashes = folder / "sources.json", _hashes()
    before = json.loads(record.read_text("utf-8")) if record.exists() else {}
    if before == hashes:
        return ""
    # A file may be another one and yet look older than what was built of it.
    for name, value in hashes.items():
        if before and before.get(name) != value:
            Path(name).touch()
    record.unlink(missing_ok=True)
    defined = [f"-D{name}={value}" for name, value in options.items()]
    jobs = str(os.cpu_count() or 1)
    for command in (
        ["cmake", "-S", str(SOURCES), "-B", str(folder), *defined],
        ["cmake", "--build", str(folder), "--parallel", jobs, "--target", *targets],
    ):
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode != 0:
            return (process.stdout + process.stderr)[-6000:]
    record.write_text(json.dumps(hashes), "utf-8")
    return ""
