"""One truth: what the Python runtime generates, the library generates, hosted and native."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpp import vectors
from cpp.conftest import BuildLibrary, Library, onnxruntime_library, run_program
from specrt import Generator
from specrt.prompts import read_prompts


@pytest.fixture(scope="module")
def prompts(code_prompts: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(code_prompts)][:6]


def replay(library: Library, bundle: Path, cases: Path, *options: Path) -> str:
    return run_program([library.program("replay"), bundle, cases, *options])


@pytest.mark.parametrize("implementation", ["hosted", "native"])
def test_what_python_generates_is_generated(
    built_library: BuildLibrary,
    implementation: str,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if implementation == "hosted":
        # The interpreter inside keeps what it once allocated; that is no leak of ours.
        monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    made = vectors.cases(generator, prompts, texts=implementation == "hosted")
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({"cases": made}))
    said = replay(built_library(implementation, sanitize=True), codelet, cases)
    assert f"{implementation}" in said
    assert f"{len(made)} cases, 0 differ" in said


def test_a_wrong_token_is_told(
    built_library: BuildLibrary,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    """The replay can fail."""
    (first, *_) = vectors.cases(generator, prompts, texts=False)
    first["ids"] = [*first["ids"][:-1], first["ids"][-1] ^ 1]
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({"cases": [first]}))
    with pytest.raises(AssertionError, match="1 differ"):
        replay(built_library("native", sanitize=True), codelet, cases)


def test_prompts_may_be_text_where_a_library_reads_tokenizers(
    built_library: BuildLibrary,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    made = vectors.cases(
        generator, [*prompts, "x = '日本'  \n\té 😀", "a\r\n"], texts=True, every=3
    )
    cases = tmp_path / "cases.json"
    cases.write_text(json.dumps({"cases": made}))
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    # Not sanitized: the other library's memory is its own.
    said = replay(built_library("native"), codelet, cases, onnxruntime_library(), library)
    assert "0 differ" in said
