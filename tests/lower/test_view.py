"""The view that rewrites go through: makers, readers, constants, and what survives the end."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper, numpy_helper

from specrt_export.lower.view import GraphView

FLOAT = onnx.TensorProto.FLOAT


def doubled_plus_one() -> onnx.ModelProto:
    """x ─ Mul 2 ─ Add 1 ─ y, and a node nobody reads."""
    constants = [
        numpy_helper.from_array(np.array([2.0], np.float32), "two"),
        numpy_helper.from_array(np.array([1.0], np.float32), "one"),
        numpy_helper.from_array(np.zeros(3, np.float32), "unused"),
    ]
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["doubled"]),
        helper.make_node("Neg", ["doubled"], ["nobody"]),
        helper.make_node("Add", ["doubled", "one"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, FLOAT, [3]) for n in ("x", "y"))
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], constants))


def test_makers_and_readers_are_found() -> None:
    view = GraphView(doubled_plus_one())
    maker = view.maker("y", "Add")
    assert maker is not None
    assert list(maker.input) == ["doubled", "one"]
    assert view.maker("y", "Mul") is None
    assert view.maker("x") is None
    assert [n.op_type for n in view.readers("doubled")] == ["Neg", "Add"]
    assert view.only_reader("doubled", "Add") is None
    assert view.only_reader("x", "Mul") is not None
    assert [n.op_type for n in view.nodes("Mul")] == ["Mul"]


def test_constants_are_read_unless_they_lie_in_a_checkpoint() -> None:
    model = doubled_plus_one()
    view = GraphView(model)
    assert view.scalar("two") == 2.0
    assert view.scalar("unused") is None
    assert view.scalar("x") is None
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    assert view.constant("two") is None


def test_dependence_goes_through_nodes() -> None:
    view = GraphView(doubled_plus_one())
    assert view.depends_on("y", ["x"])
    assert view.depends_on("x", ["x"])
    assert not view.depends_on("one", ["x"])
    assert not view.depends_on("y", ["rows"])


def test_a_rewrite_takes_a_value_over_and_the_dead_are_dropped() -> None:
    view = GraphView(doubled_plus_one())
    three = view.add_constant("three", np.array([3.0], np.float32))
    tripled = view.add("Mul", ["x", three])
    view.add("Neg", [tripled], outputs=["y"])
    model = view.tidy()
    assert [n.op_type for n in model.graph.node] == ["Mul", "Neg"]
    assert [t.name for t in model.graph.initializer] == [three]
    onnx.checker.check_model(model)


def test_nodes_are_sorted_makers_first() -> None:
    view = GraphView(doubled_plus_one())
    late = view.add("Abs", ["x"])
    mul = view.maker("doubled", "Mul")
    assert mul is not None
    mul.input[0] = late
    assert [n.op_type for n in view.tidy().graph.node] == ["Abs", "Mul", "Add"]


def test_fresh_names_do_not_repeat_and_domains_are_imported_once() -> None:
    view = GraphView(doubled_plus_one())
    assert view.fresh("a") != view.fresh("a")
    for _ in range(2):
        view.require_domain("com.microsoft", 1)
    assert [o.domain for o in view.model.opset_import].count("com.microsoft") == 1
