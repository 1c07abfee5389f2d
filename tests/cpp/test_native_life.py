"""The native library over its life: threads, memory, locales, and libraries that are none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cpp.conftest import BuildLibrary, Library, onnxruntime_library, run_check, run_program


@pytest.fixture
def vectors(codelet: Path, tmp_path: Path) -> Path:
    """What checks of a whole bundle are given."""
    path = tmp_path / "vectors.json"
    given = {"bundle": str(codelet), "library": str(onnxruntime_library()), "cycles": 50}
    path.write_text(json.dumps(given))
    return path


def test_sessions_run_on_threads_of_their_own(built_library: BuildLibrary, vectors: Path) -> None:
    """Both find the costs of passes unknown; one bundle is closed while it generates."""
    run_check(built_library("native", sanitize=True), "threads", vectors)


def test_what_was_read_of_a_cancelled_prompt_counts(
    built_library: BuildLibrary, vectors: Path
) -> None:
    run_check(built_library("native", sanitize=True), "cancel", vectors)


@pytest.mark.nightly
def test_closing_gives_memory_back(built_library: BuildLibrary, vectors: Path) -> None:
    # Not sanitized: what is freed is kept for a while then.
    run_check(built_library("native"), "memory", vectors)


@pytest.fixture
def comma(tmp_path: Path) -> dict[str, str]:
    """An environment whose numbers have commas."""
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8"],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("needs the sources of locales")
    return {**os.environ, "LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8"}


def test_json_has_points_where_the_application_has_commas(
    built_library: BuildLibrary,
    vectors: Path,
    comma: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCPATH", "LC_ALL"):
        monkeypatch.setenv(name, comma[name])
    run_check(built_library("native", sanitize=True), "locale", vectors)


STAND_IN = """
#include <cstddef>
#include <cstdint>
extern "C" {
struct Base { const void* (*get)(std::uint32_t); const char* (*version)(); };
static void* table[400];
static const void* get(std::uint32_t) { return TABLE; }
static const char* version() { return VERSION; }
static const Base base = {GET, version};
__attribute__((visibility("default"))) const Base* OrtGetApiBase() { return BASE; }
}
"""
SOUND = {"TABLE": "table", "VERSION": '"1.31.1"', "GET": "get", "BASE": "&base"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"BASE": "nullptr"}, "has no OrtGetApiBase of ONNX Runtime"),
        ({"GET": "nullptr"}, "has no OrtGetApiBase of ONNX Runtime"),
        ({"VERSION": "nullptr"}, "is ONNX Runtime of unknown version; expected 1.5"),
        ({"VERSION": '"2.0.0"'}, "is ONNX Runtime 2.0.0; expected 1.5 or a newer 1.x"),
        ({"TABLE": "nullptr", "VERSION": '"1.4.0"'}, "is ONNX Runtime 1.4.0; expected 1.5"),
        ({}, "says it is ONNX Runtime 1.31.1, and has no GetErrorMessage"),
    ],
)
def test_what_is_not_onnx_runtime_is_refused(
    built_library: BuildLibrary, codelet: Path, tmp_path: Path, changed: dict[str, str], says: str
) -> None:
    library = built_library("native", sanitize=True)
    source = tmp_path / "stand_in.cpp"
    source.write_text(STAND_IN)
    made = tmp_path / "libonnxruntime.so"
    defined = [f"-D{name}={value}" for name, value in {**SOUND, **changed}.items()]
    compiler = os.environ.get("CXX", "c++")
    run_program([compiler, "-shared", "-fPIC", "-w", *defined, source, "-o", made])
    assert says in refusal(library, codelet, made)


def test_what_is_no_library_is_refused(
    built_library: BuildLibrary, codelet: Path, tmp_path: Path
) -> None:
    library = built_library("native", sanitize=True)
    text = tmp_path / "text.so"
    text.write_text("no library")
    others: list[Any] = [text, tmp_path, tmp_path / "none.so"]
    others += onnxruntime_library().parent.glob("onnxruntime_pybind11_state*.so")
    others += [library.path]
    for other in others:
        assert "ONNX Runtime cannot be loaded" in refusal(library, codelet, other), other


def refusal(library: Library, bundle: Path, onnxruntime: Path) -> str:
    """Return what opening a bundle with a library says, which must be one line."""
    cases = bundle.parent / f"{os.getpid()}.json"
    cases.write_text('{"cases": [], "prompt_cache": true}')
    done = subprocess.run(
        [library.program("replay"), bundle, cases, onnxruntime],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-3000:]
    assert done.stdout.startswith("SPECRT_ENGINE: ")
    assert done.stdout.count("\n") == 1
    return done.stdout
