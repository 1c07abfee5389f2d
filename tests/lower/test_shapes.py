"""Shapes found by following a graph are those that its values really have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from portable.zoo import Exported, architectures
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView
from specrt_export.portable.external_data import map_weights
from specrt_export.portable.graph import geometry_of, read_graph, runs_here

NAMES = {"B": 2, "S": 5, "M": 64, "R": 3}


@pytest.mark.skipif(not runs_here(), reason="this ONNX Runtime cannot run portable graphs")
@pytest.mark.export
@pytest.mark.parametrize("name", architectures())
def test_no_shape_that_is_found_is_wrong(name: str, exported: Callable[[str], Exported]) -> None:
    one = exported(name)
    model = read_graph(one.graph.path)
    shapes = Shapes(GraphView(model, stored_weights(model, one.checkpoint.folder)))
    made = [n.output[0] for n in model.graph.node if shapes.dims(n.output[0]) is not None]
    assert len(made) > 0.6 * len(model.graph.node)
    model.graph.output.extend(onnx.ValueInfoProto(name=m) for m in made)
    found = run(model, one.checkpoint.folder)
    for value in made:
        dims = shapes.dims(value)
        assert dims is not None
        assert tuple(sized(d) for d in dims) == found[value], value


def sized(dim: int | str) -> int:
    """Return what a size is in this run: `B*S` is a product."""
    if isinstance(dim, int):
        return dim
    return int(np.prod([NAMES[part] if part in NAMES else int(part) for part in dim.split("*")]))


def run(model: onnx.ModelProto, folder: Path) -> dict[str, tuple[int, ...]]:
    """Run a portable graph and return the shapes of all its outputs."""
    geometry = geometry_of(model)
    weights = map_weights(model, folder)
    values = [
        ort.OrtValue.ortvalue_from_numpy_with_onnx_type(w.array, w.onnx_type) for w in weights
    ]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_external_initializers([w.name for w in weights], values)
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    batch, width, length, rows = NAMES.values()
    buffer = np.zeros((batch, geometry.kv_heads, length, geometry.head_dim), np.float32)
    feed = {
        "input_ids": np.ones((batch, width), np.int64),
        "start": np.zeros(batch, np.int64),
        "rows": np.arange(rows),
    }
    feed |= {i.name: buffer for i in session.get_inputs() if i.name not in feed}
    names = [o.name for o in session.get_outputs()]
    return {n: np.shape(v) for n, v in zip(names, session.run(names, feed), strict=True)}


def shape_of(nodes: list[onnx.NodeProto], **constants: object) -> object:
    """Return the shape found for `y`, from x [B, S, 12]."""
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["B", "S", 12])
    tensors = [numpy_helper.from_array(np.array(a), n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="y")], tensors)
    return Shapes(GraphView(helper.make_model(graph))).dims("y")


def test_a_reshape_is_followed_through_sizes_known_at_run_time() -> None:
    flat = helper.make_node("Reshape", ["x", "flat"], ["two"])
    back = [
        helper.make_node("Shape", ["x"], ["both"], start=0, end=2),
        helper.make_node("Concat", ["both", "three", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["two", "target"], ["y"]),
    ]
    assert shape_of([flat, *back], flat=[-1, 12], three=[3], rest=[-1]) == ("B", "S", 3, 4)
    as_y = helper.make_node("Reshape", ["x", "flat"], ["y"])
    assert shape_of([as_y], flat=[-1, 12]) == ("B*S", 12)
    assert shape_of([as_y], flat=[0, 0, -1, 6]) == ("B", "S", 2, 6)
    assert shape_of([as_y], flat=[-1, 6]) == ("B*S*2", 6)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Reshape", ["x", "odd"], ["y"]),
        helper.make_node("Concat", ["x", "x"], ["y"], axis=1),
        helper.make_node("Slice", ["x", "zero", "five"], ["y"]),
        helper.make_node("Unknown", ["x"], ["y"]),
        helper.make_node("Add", ["x", "thirteen"], ["y"]),
    ],
)
def test_what_is_not_known_is_not_guessed(node: onnx.NodeProto) -> None:
    thirteen = np.zeros(13)
    found = shape_of([node], odd=[-1, 7], zero=[0], five=[5], thirteen=thirteen)
    assert found is None
