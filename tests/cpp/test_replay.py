"""One truth: what the Python runtime generates, the library generates, hosted and native."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specrt
from cpp.conftest import Library, onnxruntime_library
from cpp.generation import case, cases, edges, refusals
from specrt.generator import Generator
from specrt.speculation.drafters import DRAFTERS
from specrt.text import read_prompts
from specrt_export.builder import build
from specrt_export.recipe import read_recipe

Requests = list[dict[str, Any]]

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


@pytest.fixture(scope="module")
def prompts(code_prompts: Path) -> list[str]:
    return [prompt.text for prompt in read_prompts(code_prompts)][:6]


@pytest.fixture
def small(request: pytest.FixtureRequest, engines: Path, tmp_path: Path) -> Path:
    """A small bundle of codelet's draft, as both models."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(SMALL.format(codelet=engines / "codelet", **request.param))
    build(read_recipe(recipe), tmp_path / "small")
    return tmp_path / "small"


def replay(
    library: Library, bundle: Path, made: Requests, folder: Path, caches: bool = True, **given: Any
) -> list[Any]:
    """Replay requests in one session that held nothing; return what came of each."""
    vectors = folder / "requests.json"
    sent = [{k: v for k, v in one.items() if k != "expected"} for one in made]
    vectors.write_text(json.dumps({"requests": sent, "prompt_cache": caches}))
    first, *lines = library.run("replay", bundle=bundle, vectors=vectors, **given)
    found = [json.loads(line) for line in lines]
    again = json.loads(first)  # of a generator that was opened before
    assert again.get("ids") == found[0].get("ids")
    return found


def check(found: list[Any], made: Requests) -> None:
    """Fail with the first request of which something else came."""
    assert len(found) == len(made)
    for outcome, one in zip(found, made, strict=True):
        assert outcome == one["expected"], one["params"]


@pytest.mark.parametrize(
    ("implementation", "every"),
    [
        ("hosted", 5),
        ("native", 5),
        pytest.param("hosted", 1, marks=pytest.mark.nightly),
        pytest.param("native", 1, marks=pytest.mark.nightly),
    ],
)
def test_what_python_generates_is_generated(
    request: pytest.FixtureRequest,
    implementation: str,
    every: int,
    codelet: Path,
    generator: Generator,
    prompts: list[str],
    tmp_path: Path,
) -> None:
    made = cases(generator, prompts, texts=implementation == "hosted", every=every)
    ids = generator.tokenizer.encode(prompts[0])
    if implementation == "native":
        made += edges(generator, ids)
    made += refusals(generator, ids)
    found = replay(request.getfixturevalue(implementation), codelet, made, tmp_path)
    check(found, made)
    found[0]["ids"][-1] ^= 1
    with pytest.raises(AssertionError):  # the comparison can fail
        check(found, made)


@pytest.mark.parametrize(
    "small",
    [
        {"target": "int8", "draft": "fp16", "batch": 1, "length": 96},
        {"target": "int4", "draft": "int8", "batch": 4, "length": 96},
    ],
    indirect=True,
    ids=["int8", "int4, 4 rows"],
)
def test_quantized_bundles_and_bundles_of_several_rows_are_replayed(
    native: Library, small: Path, prompts: list[str], tmp_path: Path
) -> None:
    batch = json.loads((small / "manifest.json").read_text("utf-8"))["batch"]
    caches = batch == 1  # the rows of a generator, and sessions, keep texts in ways of their own
    with specrt.open(small, threads=1, prompt_cache=caches) as opened:
        short = [opened.tokenizer.decode(opened.tokenizer.encode(one)[:25]) for one in prompts]
        made = cases(opened, short, texts=False, every=3)
        made += edges(opened, opened.tokenizer.encode(short[0]))
    check(replay(native, small, made, tmp_path, caches=caches), made)


@pytest.mark.parametrize(
    "small", [{"target": "int8", "draft": "int8", "batch": 1, "length": 5}], indirect=True
)
def test_costs_are_measured_where_there_is_hardly_room(
    native: Library, small: Path, tmp_path: Path
) -> None:
    """Four positions, one of five kept free for partners, and a gamma of four."""
    with specrt.open(small, threads=1) as opened:
        made = [case(opened, [5, 6], {"gamma": "auto", "drafter": each}) for each in DRAFTERS]
    check(replay(native, small, made, tmp_path), made)


def test_prompts_may_be_text_where_a_library_reads_tokenizers(
    native: Library, codelet: Path, generator: Generator, prompts: list[str], tmp_path: Path
) -> None:
    genai = pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai")
    texts = [*prompts, "x = '日本'  \n\té 😀", "a\r\n"]
    made = cases(generator, texts, texts=True, every=17)
    library = Path(genai.__file__).parent / "libonnxruntime-genai.so"
    found = replay(
        native, codelet, made, tmp_path, onnxruntime=onnxruntime_library(), tokenizer=library
    )
    check(found, made)
