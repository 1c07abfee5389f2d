"""Graphs that TensorRT refuses, or takes and silently changes, are caught by the builder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from lower.builds import left, make
from lower.test_tensorrt_builder_decoder import decoder, save
from specrt.engine.tensorrt.library import Library
from specrt.errors import BuildError

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, so nothing is built")

Edit = Callable[[onnx.ModelProto], None]


def drop_mask(model: onnx.ModelProto) -> None:
    node = one(model, "Attention")
    del node.input[3:]


def counted_lengths(model: onnx.ModelProto) -> None:
    """The form that TensorRT's parser takes and forgets."""
    node = one(model, "Attention")
    del node.input[3:]
    node.input.extend(["", "", "", "start"])


def cast_before_cache(model: onnx.ModelProto) -> None:
    node = one(model, "TensorScatter")
    twice = helper.make_node("Mul", [node.input[0], "one.half"], ["scaled"], name="scaled")
    model.graph.initializer.append(numpy_helper.from_array(np.float16(1), "one.half"))
    node.input[0] = "scaled"
    model.graph.node.insert(list(model.graph.node).index(node), twice)


def no_place_to_write(model: onnx.ModelProto) -> None:
    del one(model, "TensorScatter").input[2:]


def crossed_caches(model: onnx.ModelProto) -> None:
    first, second = [n for n in model.graph.node if n.op_type == "TensorScatter"][:2]
    first.input[0], second.input[0] = second.input[0], first.input[0]


def written_elsewhere(model: onnx.ModelProto) -> None:
    """A cache that is copied instead of updated: the runtime binds one buffer to both names."""
    node = one(model, "TensorScatter")
    node.CopyFrom(helper.make_node("Identity", [node.input[0]], list(node.output), name=node.name))


def circular(model: onnx.ModelProto) -> None:
    for attribute in one(model, "TensorScatter").attribute:
        if attribute.name == "mode":
            attribute.s = b"circular"


def unknown_operator(model: onnx.ModelProto) -> None:
    one(model, "Attention").op_type = "Gobble"


def no_argmax(model: onnx.ModelProto) -> None:
    del model.graph.output[1]


def surplus_output(model: onnx.ModelProto) -> None:
    made = helper.make_tensor_value_info("mask", TensorProto.FLOAT16, None)
    model.graph.output.append(made)


def one(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == kind)


TAMPERED = [
    (drop_mask, "'0.attention' lost its mask"),
    (counted_lengths, "'0.attention' lost its mask"),
    (cast_before_cache, "reads 'scaled', which is no input"),
    (no_place_to_write, "'key.0' has no place to write at"),
    (crossed_caches, "KV update of 'value.0' gives 'present_key.0'"),
    (written_elsewhere, "'key.0' has 0 KV updates"),
    (circular, r"node 'present_key.0' \(TensorScatter\): .*linear mode"),
    (unknown_operator, r"node '0.attention' \(Gobble\): .*Plugin not found"),
    (no_argmax, "has no output 'argmax'"),
    (surplus_output, "has an output 'mask' that the runtime does not know"),
]


@pytest.mark.parametrize(("edit", "words"), TAMPERED, ids=[edit.__name__ for edit, _ in TAMPERED])
def test_tampered_graphs_are_caught(
    edit: Edit, words: str, library: Library, tmp_path: Path
) -> None:
    model = decoder(layers=1, hidden=64)
    edit(model)
    graph = save(model, tmp_path / "graph")
    with pytest.raises(BuildError, match=words):
        make(graph, library, tmp_path / "plan")
    assert left(tmp_path) == ["graph"]


def test_the_graph_must_cut_out_the_candidates_of_the_recipe(
    graph: Path, library: Library, tmp_path: Path
) -> None:
    with pytest.raises(BuildError, match="cuts out 0 candidates a row; the recipe says 64"):
        make(graph, library, tmp_path / "plan", candidates=64)


def test_files_that_are_no_graph_are_refused(library: Library, tmp_path: Path) -> None:
    (tmp_path / "junk.onnx").write_bytes(b"junk" * 99)
    with pytest.raises(BuildError, match=r"junk.onnx is not an ONNX graph"):
        make(tmp_path / "junk.onnx", library, tmp_path / "plan")
    with pytest.raises(BuildError, match=r"none.onnx is not an ONNX graph"):
        make(tmp_path / "none.onnx", library, tmp_path / "plan")


@pytest.mark.parametrize("keep", [5000, 0])
def test_weights_that_are_cut_short_are_named(keep: int, library: Library, tmp_path: Path) -> None:
    graph = save(decoder(layers=1, hidden=64), tmp_path / "graph")
    data = graph.with_name("lowered.data")
    data.write_bytes(data.read_bytes()[:keep])
    if not keep:
        data.unlink()
    with pytest.raises(BuildError, match=r"cannot parse .*lowered\.data"):
        make(graph, library, tmp_path / "plan")
    assert left(tmp_path) == ["graph"]
