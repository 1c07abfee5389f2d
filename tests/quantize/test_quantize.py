"""A quantized graph computes what its codes stand for, and holds everything else as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from portable.zoo import Exported, architectures
from quantize.graphs import normal, write
from specrt.errors import BuildError, CheckpointError
from specrt_export.checkpoint.codes import decode, encode, unpack
from specrt_export.portable.external_data import external_tensors, map_weights, widen
from specrt_export.portable.graph import GraphRun, read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import Quantized, quantize

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
PRECISIONS = [
    Precision.of("int8"),
    Precision.of("int4"),
    Precision.of("int4", embedding="int4", head="int4", block=64),
    Precision.of("int4", embedding="bf16", head="fp32"),
    Precision.of("fp32", head="int8", block=128),
    Precision.of("bf16"),
    Precision.of("fp16"),
]


def names(precision: Precision) -> str:
    return f"{'-'.join(precision.names)}-{precision.block}"


def stored(quantized: Quantized) -> dict[str, NDArray[np.float32]]:
    """What each tensor of a quantized graph's folder says, as fp32; scales apart."""
    model = read_graph(quantized.graph)
    found = {w.name: w for w in map_weights(model, quantized.folder)}
    made = {}
    for name, weight in found.items():
        if f"{name}.scale" in found:
            whole = weight.onnx_type == onnx.TensorProto.INT4
            codes = unpack(weight.array) if whole else weight.array
            made[name] = decode(codes, found[f"{name}.scale"].array)
        elif not name.endswith(".scale"):
            made[name] = widen(weight.array, weight.onnx_type)
    return made


def original(graph: Path, folder: Path) -> dict[str, NDArray[np.float32]]:
    """The weights of a portable graph as fp32."""
    return {w.name: widen(w.array, w.onnx_type) for w in map_weights(read_graph(graph), folder)}


def substituted(graph: Path, folder: Path, quantized: Quantized) -> onnx.ModelProto:
    """The unquantized graph with what codes stand for written in, by a way of its own.

    A weight in two roles is written twice, and each reader finds its own.
    """
    model = read_graph(graph)
    values = stored(quantized)
    roles = {(use.node, use.input): one.choice.name
             for one in quantized.stored for use in one.choice.uses}  # fmt: skip
    turned = {one.choice.name for one in quantized.stored if one.choice.turned}
    arrays = dict(original(graph, folder))
    for node in model.graph.node:
        for index in range(len(node.input)):
            name = roles.get((node.name, index))
            if name is not None:
                arrays[name] = values[name].T if name in turned else values[name]
                node.input[index] = name
    kept = [t for t in model.graph.initializer if t not in external_tensors(model)]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for node in model.graph.node:
        if node.op_type == "Cast" and node.input[0] in arrays:
            node.op_type = "Identity"
            del node.attribute[:]
    for name, array in arrays.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(array), name))
    return model


def hold_equal(graph: Path, folder: Path, quantized: Quantized) -> None:
    """Compare a quantized graph with the original whose weights are those restored."""
    tokens = np.random.default_rng(0).integers(0, 100, (1, 12))
    results = []
    for run in (
        GraphRun(quantized.graph, quantized.folder),
        GraphRun(substituted(graph, folder, quantized), folder),
        GraphRun(graph, folder),
    ):
        run.reset(batch=1, length=16)
        first, _ = run(tokens[:, :7], [0], range(7))
        second, _ = run(tokens[:, 7:], [7], range(5))
        results.append(np.concatenate([first, second], axis=1))
    found, wanted, whole = results
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 2e-5 * scale
    if quantized.precision.quantizes:
        assert np.abs(found - whole).max() > 1e-4 * scale


@pytest.mark.export
@needs_reference
@pytest.mark.parametrize("name", architectures())
@pytest.mark.parametrize("precision", PRECISIONS[:2], ids=names)
def test_every_form_of_weight_is_quantized(
    exported: Callable[[str], Exported], tmp_path: Path, name: str, precision: Precision
) -> None:
    model = exported(name)
    quantized = quantize(*model.source, tmp_path / "q", precision)
    hold_equal(*model.source, quantized)
    matrices = [t for t in external_tensors(read_graph(model.graph)) if len(t.dims) == 2]
    chosen = {one.choice.weight for one in quantized.stored}
    positions = {"transformer.wpe.weight", "model.decoder.embed_positions.weight"}
    assert {t.name for t in matrices} - chosen <= positions


@pytest.mark.parametrize("precision", PRECISIONS[2:], ids=names)
def test_codelets_quantized_graph_computes_what_its_codes_stand_for(
    draft: tuple[Path, Path], tmp_path: Path, precision: Precision
) -> None:
    quantized = quantize(*draft, tmp_path / "q", precision)
    weights, found = original(*draft), stored(quantized)
    assert quantized.stored
    for one in quantized.stored:
        choice, whole = one.choice, weights[one.choice.weight]
        if choice.block:
            expected = decode(*encode(whole, choice.precision, choice.block))
            assert (found[choice.name] == expected).all()
        lost = np.square(found[choice.name].astype(np.float64) - whole).sum()
        assert one.error == pytest.approx(lost / np.square(whole.astype(np.float64)).sum(), 1e-3)
    chosen = {one.choice.name for one in quantized.stored}
    assert all((found[name] == weights[name]).all() for name in found.keys() - chosen)
    if runs_here():
        hold_equal(*draft, quantized)


def toy(**weights: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {"table": normal(0, 256, 64), **weights}


def test_what_no_block_divides_stays_as_it_is(tmp_path: Path) -> None:
    weights = {"table": normal(0, 256, 40), "layer": normal(1, 80, 40), "last": normal(2, 40, 80)}
    graph = write(tmp_path / "toy", weights)
    quantized = quantize(graph, graph.parent, tmp_path / "q", Precision.of("int8"))
    assert {one.choice.weight: one.choice.block for one in quantized.stored} == {"last": 16}
    for name in ("table", "layer"):
        assert (stored(quantized)[name] == weights[name]).all()


def test_what_cannot_be_stored_is_named(tmp_path: Path) -> None:
    def refused(graph: Path, precision: str, message: str) -> None:
        with pytest.raises((BuildError, CheckpointError), match=message):
            quantize(graph, graph.parent, graph.parent / "q", Precision.of(precision))

    graph = write(tmp_path / "large", toy(layer=normal(1, 64, 64) * 1e5))
    refused(graph, "fp16", "layer holds .*too large for fp16; store it as bf16, int8 or fp32")
    for where, wrong in (("layer", np.nan), ("bias", np.inf)):
        weights = toy(layer=normal(1, 64, 64), bias=normal(2, 64))
        weights[where].reshape(-1)[5] = wrong
        graph = write(tmp_path / where, weights)
        refused(graph, "int8", f"{where} holds values that are not finite numbers")
    graph = write(tmp_path / "short", toy(layer=normal(1, 64, 64)), shards=2)
    shard = graph.parent / "shard-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    refused(graph, "int8", r"shard-1\.safetensors ends before layer does; fetch the checkpoint ag")
