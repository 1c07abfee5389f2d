"""Error feedback: it loses less of what comes out, and nothing where inputs tell nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from portable.zoo import Exported, architectures
from specrt.errors import BuildError
from specrt_export.checkpoint.codes import Codes, decode, encode, int4_grid
from specrt_export.portable.external_data import map_weights, widen
from specrt_export.portable.graph import GraphRun, read_graph, runs_here
from specrt_export.portable.segments import SegmentedRun, weight_name
from specrt_export.precision import Precision
from specrt_export.quantize.calibration import CalibrationText
from specrt_export.quantize.gptq import FindGrid, Products, factor, feed_back, second_moments
from specrt_export.quantize.quantizer import GRAPH, WEIGHTS, quantize
from specrt_export.quantize.weight_choice import Choice, choose

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
Floats = NDArray[np.float32]
PRODUCTS = Products(shared=True)
SEARCH = partial(int4_grid, zeros=False)
APART = partial(int4_grid, zeros=True)


def random(*shape: int) -> Floats:
    return np.random.default_rng(sum(shape)).standard_t(6, shape).astype(np.float32)


def correlated(tokens: int, size: int) -> Floats:
    """Inputs a few directions of which hold most of the squares, as a model's do."""
    return random(tokens, size // 4) @ random(size // 4, size) + random(tokens, size) / 2


def rounded(
    weights: Floats, upper: Floats, block: int, grid: FindGrid = SEARCH
) -> tuple[Floats, Floats]:
    """What a weight [N, K] becomes, and its scales."""
    codes, scales, zeros, restored = feed_back(weights.T, upper, block, grid, PRODUCTS)
    assert (zeros is not None) == (grid is APART)
    assert codes.min() >= -8
    assert codes.max() <= 7
    apart = None if zeros is None else zeros.T
    stored = Codes("int4", np.ascontiguousarray(codes.T), scales.T, apart)
    assert (stored.floats() == restored.T).all()
    return restored.T, scales.T


@pytest.mark.parametrize("block", [32, 128])
def test_feedback_loses_less_of_what_comes_out(block: int) -> None:
    """Than rounding with the same scales, and than the search, on inputs that were not seen."""
    weights, inputs = random(64, 384), correlated(4096, 384)
    upper = factor(second_moments(inputs[:2048], PRODUCTS), PRODUCTS)
    restored, scales = rounded(weights, upper, block)
    each = np.repeat(scales, block, axis=1)
    nearest = np.clip(np.rint(weights / each), -8, 7) * each
    searched = decode(*encode(weights, "int4", block))

    def lost(other: Floats) -> float:
        return float(np.square(inputs[2048:] @ (other - weights).T).sum())

    assert lost(restored) < 0.6 * min(lost(nearest), lost(searched))
    assert lost(rounded(weights, upper, block, APART)[0]) < lost(restored)
    wrong = factor(second_moments(np.ascontiguousarray(inputs[:, ::-1]), PRODUCTS), PRODUCTS)
    assert lost(rounded(weights, wrong, block)[0]) > lost(searched)


def products_of(graph: Path) -> tuple[list[str], dict[str, Choice]]:
    """The tensors that layers are multiplied with, in their order, and the choice of a product."""
    model = read_graph(graph)
    inputs = {node.name: node.input[0] for node in model.graph.node if node.input}
    choices = choose(model, Precision.of("int4", embedding="fp32", head="fp32"))
    by_product = {product: choice for choice in choices for product in choice.products}
    order = [node.name for node in model.graph.node if node.name in by_product]
    return list(dict.fromkeys(inputs[name] for name in order)), by_product


@pytest.mark.export
@needs_reference
@pytest.mark.parametrize("name", [*architectures(), "qwen3_5"])
def test_segments_compute_what_the_whole_graph_does(
    exported: Callable[[str], Exported], name: str
) -> None:
    graph, folder = exported(name).source
    tensors, by_product = products_of(graph)
    pieces = np.random.default_rng(0).integers(3, 100, (3, 12))
    weights_of = map_weights(read_graph(graph), folder)
    stored = {w.name: widen(w.array, w.onnx_type) for w in weights_of}
    run = SegmentedRun(read_graph(graph), folder, by_product, pieces)
    run.plan([*tensors, "logits"])
    given = set[str]()
    for tensor in [*tensors, "logits"]:
        weights = {}
        for product in run.products(tensor):
            choice = by_product[product]
            weight = stored[choice.weight]
            turned = weight if choice.turned else weight.T
            weights[weight_name(product)] = np.ascontiguousarray(turned)
            given.add(product)
        found = run.advance(tensor, weights)
    assert given == set(by_product), "each product is computed, once"
    whole = GraphRun(graph, folder)
    whole.reset(batch=3, length=12)
    wanted, _ = whole(pieces, [0, 0, 0], range(12))
    assert np.abs(found.reshape(wanted.shape) - wanted).max() < 2e-4 * np.abs(wanted).max()


PIECES = [np.random.default_rng(n).integers(0, 8192, 128) for n in range(4)]
CALIBRATED = Precision.of("int4", calibrated=True)


class StoppedError(Exception):
    """What stands for a kill."""


@needs_reference
def test_a_stopped_calibration_goes_on_with_the_same_bytes(
    draft: tuple[Path, Path], tmp_path: Path
) -> None:
    parts: list[str] = []

    def stop(part: str, done: float) -> None:
        if part == "layer 1" and done > 0.6:
            raise StoppedError

    def count(part: str, done: float) -> None:
        parts.append(part)

    text = CalibrationText(PIECES, tmp_path / "kept")
    with pytest.raises(StoppedError):
        quantize(*draft, tmp_path / "stopped", CALIBRATED, stop, text)
    resumed = quantize(*draft, tmp_path / "resumed", CALIBRATED, count, text)
    assert set(parts) == {"layer 1"}, "layer 0 was done"
    fresh = CalibrationText(PIECES, tmp_path / "fresh")
    whole = quantize(*draft, tmp_path / "whole", CALIBRATED, count, fresh)
    for name in (GRAPH, WEIGHTS):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    parts.clear()
    other = CalibrationText(PIECES[1:], tmp_path / "kept")
    moved = quantize(*draft, tmp_path / "other", CALIBRATED, count, other)
    assert "layer 0" in parts, "nothing of another text is taken over"
    assert (moved.folder / WEIGHTS).read_bytes() != (whole.folder / WEIGHTS).read_bytes()


@needs_reference
def test_inputs_that_are_no_numbers_are_named(draft: tuple[Path, Path], tmp_path: Path) -> None:
    model = read_graph(draft[0])
    norm = next(n for n in model.graph.node if "input_layernorm" in n.name and n.op_type == "Add")
    for tensor in model.graph.initializer:
        if tensor.name == norm.input[1]:
            tensor.CopyFrom(type(tensor)(name=tensor.name, data_type=1, float_data=[np.nan]))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(model.SerializeToString())
    text = CalibrationText(PIECES, tmp_path / "kept")
    with pytest.raises(
        BuildError, match=r"q_proj\.weight is multiplied with is not a finite.*search"
    ):
        quantize(broken, draft[1], tmp_path / "q", CALIBRATED, text=text)
