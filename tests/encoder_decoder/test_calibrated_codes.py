"""Codes and bits of encoder-decoders that a text is asked for: of sources first, then of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import specrt
from encoder_decoder.recipes import QUALITY, save_speech, save_texts, write_recipe
from portable.zoo import exported
from shared import nightly_but
from specrt.bundle import Bundle
from specrt.errors import BuildError
from specrt.params import SamplingParams
from specrt_export.portable.external_data import map_weights, widen
from specrt_export.portable.graph import (
    GraphRun,
    parts_beside,
    read_graph,
    runs_here,
    source_of,
    whole_graph,
)
from specrt_export.portable.segments import SegmentedRun, weight_name
from specrt_export.precision import Precision
from specrt_export.quantize.calibration import stages
from specrt_export.quantize.weight_choice import Choice, choose
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

pytestmark = [
    pytest.mark.export,
    pytest.mark.skipif(not runs_here(), reason="this ONNX Runtime runs no portable graphs"),
]

INT4 = Precision.of("int4", embedding="fp32", head="fp32")


def texts_of(count: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Return texts of different lengths."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 100, int(rng.integers(5, 30))) for _ in range(count)]


def sources_of(graph: Path, count: int, seed: int = 1) -> list[NDArray[Any]]:
    """Return sources of different lengths, or features, or hidden states for a draft."""
    sizes = source_of(read_graph(graph))
    assert sizes is not None
    rng = np.random.default_rng(seed)
    if "encoder" not in parts_beside(graph):
        shape = sizes.max_source, sizes.width
        return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]
    if sizes.features:
        shape = sizes.features, sizes.frames
        return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]
    return [rng.integers(3, 100, int(rng.integers(2, 60))) for _ in range(count)]


@pytest.mark.parametrize(
    "name",
    nightly_but(
        ["t5", "whisper", "whisper_draft"],
        ["t5", "bart", "whisper", "whisper_draft", "umt5", "mbart", "marian_apart", "t5_untied"],
    ),
)
def test_segments_compute_what_the_three_graphs_do(name: str) -> None:
    graph, folder = exported(name).source
    model = whole_graph(graph)
    choices = choose(model, INT4)
    of_product = {product: choice for choice in choices for product in choice.products}
    tensors = [*stages(model, choices), "logits"]
    stored = {w.name: widen(w.array, w.onnx_type) for w in map_weights(model, folder)}
    texts, sources = texts_of(3), sources_of(graph, 3)
    run = SegmentedRun(model, folder, of_product, texts, sources)
    run.plan(tensors)
    given = list[str]()
    for tensor in tensors:
        products = run.products(tensor)
        given += products
        found = run.advance(tensor, {weight_name(p): weight_of(of_product[p], stored)
                                     for p in products})  # fmt: skip
    assert sorted(given) == sorted(of_product), "each product is computed, once"
    whole, wanted = GraphRun(graph, folder), []
    for text, source in zip(texts, sources, strict=True):
        whole.condition([source])
        whole.reset(batch=1, length=len(text))
        wanted.append(whole(text[None], [0], range(len(text)))[0][0])
    expected = np.concatenate(wanted)
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


def weight_of(choice: Choice, stored: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    weight = stored[choice.weight]
    return np.ascontiguousarray(weight if choice.turned else weight.T)


def built(tmp_path: Path, names: list[str], lines: list[str], count: int) -> Path:
    recipe = write_recipe(tmp_path / "recipe", names, "int4", *lines, max_length=64)
    save_texts(recipe.folder / "texts.jsonl", count)
    if "whisper" in names[0]:
        save_speech(recipe.folder / "texts.jsonl", 6, 40, count)
    build(read_recipe(recipe.path), tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.parametrize(
    "names", [["bart"], pytest.param(["whisper", "whisper_draft"], marks=pytest.mark.nightly)]
)
def test_calibrated_codes_lose_less_than_searched_ones(names: list[str], tmp_path: Path) -> None:
    losses = {}
    for quantizer in ("search", "gptq"):
        lines = [f'quantizer = "{quantizer}"', QUALITY]
        bundle = built(tmp_path / quantizer, names, lines, 160)
        manifest = Bundle.open(bundle).manifest
        losses[quantizer] = [model.quality.kl for model in manifest.models if model.quality]
    assert len(losses["gptq"]) == len(names)
    assert all(a < b for a, b in zip(losses["gptq"], losses["search"], strict=True)), losses


def test_bits_are_chosen_within_a_bound(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe", ["t5"], "fp32", QUALITY, max_length=64)
    text = recipe.path.read_text("utf-8")
    (tmp_path / "all").mkdir()
    text = text.replace('precision = "fp32"\n', "")
    chosen = text.replace(
        'graph = "target.onnx"', 'graph = "target.onnx"\nbits = "auto"\nmax_kl = {}'
    )
    bundles = []
    for number, most in enumerate((0.02, 0.002)):
        recipe.path.write_text(chosen.format(most), encoding="utf-8")
        build(read_recipe(recipe.path), tmp_path / str(number))
        bundles.append(Bundle.open(tmp_path / str(number)).manifest.target)
        quality, bits = bundles[-1].quality, bundles[-1].bits
        assert quality is not None
        assert quality.kl <= most
        assert bits is not None
        assert any(name.startswith("encoder layer") for name in bits)
        assert "cross projections" in bits
    assert bundles[0].weight_bytes < bundles[1].weight_bytes
    params = SamplingParams(max_tokens=30, no_repeat_ngram_size=2)
    with specrt.load(tmp_path / "1", threads=1) as generator:
        plain = generator.generate("abc def", params, gamma=0).token_ids
        assert generator.generate("abc def", params, gamma=3, drafter="ngram").token_ids == plain


def test_few_texts_are_too_few_to_calibrate_on(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"leaves \d+ besides those that are scored.*gptq"):
        built(tmp_path, ["bart"], ['quantizer = "gptq"', QUALITY], 12)
