"""One truth: what the Python runtime generates, the library generates, hosted and native."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

import specrt
from cpp import vectors
from cpp.conftest import BuildLibrary, Library, onnxruntime_library, run_program
from specrt.generator import Generator
from specrt.speculation.drafters import DRAFTERS
from specrt.text import read_prompts
from specrt_export.builder import build
from specrt_export.recipe import read_recipe

Made = list[dict[str, Any]]


@pytest.fixture(scope="module")
def prompts(code_prompts: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(code_prompts)][:6]


SMALL = """
name = "small"

[target]
checkpoint = "{codelet}/checkpoint/draft"
graph = "{codelet}/portable/draft.onnx"

[draft]
checkpoint = "{codelet}/checkpoint/draft"
graph = "{codelet}/portable/draft.onnx"
precision = "{draft}"

[engine]
max_length = {length}
prefill = 5
gammas = [1, 2, 4]
precision = "{target}"
batch = {batch}

[quality]
calibration = "{codelet}/calibration.jsonl"
"""


def replay(library: Library, bundle: Path, made: Made, *options: Path, caches: bool = True) -> str:
    """Replay cases in one session that held nothing; returns what was said."""
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "cases.json"
        cases.write_text(json.dumps({"cases": made, "prompt_cache": caches}))
        return run_program([library.program("replay"), bundle, cases, *options])


@pytest.mark.parametrize("implementation", ["hosted", "native"])
def test_what_python_generates_is_generated(
    built_library: BuildLibrary,
    implementation: str,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
) -> None:
    made = vectors.cases(generator, prompts, texts=implementation == "hosted")
    if implementation == "native":
        made += vectors.edges(generator, generator.tokenizer.encode(prompts[0]))
    said = replay(built_library(implementation, implementation == "native"), codelet, made)
    assert f"{implementation}" in said
    assert f"{len(made)} cases, 0 differ" in said


def built(folder: Path, engines: Path, **options: Any) -> Path:
    """Build a small bundle of codelet's draft, as both models."""
    recipe = folder / "recipe.toml"
    recipe.write_text(SMALL.format(codelet=engines / "codelet", **options))
    build(read_recipe(recipe), folder / "small")
    return folder / "small"


@pytest.mark.parametrize(("target", "draft", "batch"), [("int8", "fp16", 1), ("int4", "int8", 4)])
def test_quantized_bundles_and_bundles_of_several_rows_are_replayed(
    built_library: BuildLibrary,
    engines: Path,
    prompts: list[str],
    tmp_path: Path,
    target: str,
    draft: str,
    batch: int,
) -> None:
    small = built(tmp_path, engines, target=target, draft=draft, batch=batch, length=96)
    caches = batch == 1  # the rows of a generator, and sessions, keep texts in ways of their own
    with specrt.open(small, threads=1, prompt_cache=caches) as opened:
        short = [opened.tokenizer.decode(opened.tokenizer.encode(one)[:25]) for one in prompts]
        made = vectors.cases(opened, short, texts=False, every=3)
        made += vectors.edges(opened, opened.tokenizer.encode(short[0]))
    said = replay(built_library("native", sanitize=True), small, made, caches=caches)
    assert "0 differ" in said


def test_costs_are_measured_where_there_is_hardly_room(
    built_library: BuildLibrary, engines: Path, tmp_path: Path
) -> None:
    """Four positions, one of five kept free for partners, and a gamma of four."""
    small = built(tmp_path, engines, target="int8", draft="int8", batch=1, length=5)
    with specrt.open(small, threads=1) as opened:
        made = [vectors.case(opened, [5, 6], {"gamma": "auto", "drafter": d}) for d in DRAFTERS]
    assert "0 differ" in replay(built_library("native", sanitize=True), small, made)


def test_a_wrong_token_is_told(
    built_library: BuildLibrary,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
) -> None:
    """The replay can fail."""
    (first,) = vectors.cases(generator, prompts, texts=False, every=1000)
    first["ids"] = [*first["ids"][:-1], first["ids"][-1] ^ 1]
    first["told"]["token_ids"] = first["ids"]
    with pytest.raises(AssertionError, match="2 differ"):
        replay(built_library("native", sanitize=True), codelet, [first])


def test_prompts_may_be_text_where_a_library_reads_tokenizers(
    built_library: BuildLibrary,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    made = vectors.cases(
        generator, [*prompts, "x = '日本'  \n\té 😀", "a\r\n"], texts=True, every=3
    )
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    said = replay(
        built_library("native", sanitize=True), codelet, made, onnxruntime_library(), library
    )
    assert "0 differ" in said
