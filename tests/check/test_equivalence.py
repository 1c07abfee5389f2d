"""What is wrong in a lowered graph is found against its portable graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from lower.lowering import DIFFERS, LOWERINGS, Case, lowered
from specrt.errors import BuildError
from specrt_export.lower.lazy_tensor import WEIGHTS
from specrt_export.portable.graph import runs_here

pytestmark = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
Fault = Callable[[Case, onnx.ModelProto], None]
"""Spoils a lowered graph, or the file of its weights."""


def attribute(op_type: str, name: str, value: float) -> Fault:
    """Give every node of an operator another value of an attribute."""

    def spoil(_: Case, model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for found in node.attribute:
                if (node.op_type, found.name) == (op_type, name):
                    found.CopyFrom(helper.make_attribute(name, value))

    return spoil


def not_rotated(_: Case, model: onnx.ModelProto) -> None:
    for node in (n for n in model.graph.node if n.op_type == "Attention"):
        del node.input[7:]


def read_through(op_type: str, index: int, through: str, constant: Any) -> Fault:
    """Put an operation with a constant before an input of the first node of an operator."""

    def spoil(_: Case, model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(constant), "wrong"))
        node = next(node for node in model.graph.node if node.op_type == op_type)
        read = node.input[index]
        wrong = helper.make_node(through, [read, "wrong"], ["spoiled"])
        model.graph.node.insert(list(model.graph.node).index(node), wrong)
        for one in model.graph.node:
            if one.op_type == op_type:
                one.input[index] = "spoiled" if one.input[index] == read else one.input[index]

    return spoil


def first_row_scored(_: Case, model: onnx.ModelProto) -> None:
    """Score one row wherever several are asked for."""
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "none"))
    model.graph.node.insert(0, helper.make_node("Mul", ["rows", "none"], ["first row"]))
    for node in list(model.graph.node)[1:]:
        for index, name in enumerate(node.input):
            node.input[index] = "first row" if name == "rows" else name


def unmasked(_: Case, model: onnx.ModelProto) -> None:
    for node in (n for n in model.graph.node if n.op_type == "Attention"):
        node.input[3] = ""


def weights(op_type: str, index: int, dtype: Any, change: Callable[[Any], Any]) -> Fault:
    """Change a weight where it lies: one that the first such node of an operator reads."""

    def spoil(case: Case, model: onnx.ModelProto) -> None:
        tensors = {t.name: t for t in model.graph.initializer if t.external_data}
        nodes = (n for n in model.graph.node if n.op_type == op_type and n.input[index] in tensors)
        tensor = tensors[next(nodes).input[index]]
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(place["offset"]), int(place["length"])
        whole = np.memmap(case.lowered.folder / WEIGHTS, np.uint8, "r+", offset, length)
        array = whole.view(dtype).reshape(tensor.dims[0], -1)
        array[:] = change(array.copy())
        whole.flush()

    return spoil


def replaced(op_type: str, by: str) -> Fault:
    """Make another operator of the last node of one."""

    def spoil(_: Case, model: onnx.ModelProto) -> None:
        next(n for n in reversed(model.graph.node) if n.op_type == op_type).op_type = by

    return spoil


def smallest_first(_: Case, model: onnx.ModelProto) -> None:
    node = next(n for n in reversed(model.graph.node) if n.op_type == "TopK")
    node.attribute.remove(next(a for a in node.attribute if a.name == "largest"))
    node.attribute.append(helper.make_attribute("largest", 0))


FAULTS: dict[str, tuple[str, Fault]] = {
    "no rotation": ("cpu", not_rotated),
    "in one position": ("cpu", read_through("Attention", 6, "Mul", 0)),
    "the first row": ("cpu", first_row_scored),
    "no numbers": ("cpu", weights("MatMul", 1, "<u2", lambda w: w | 0x7FC0)),
    "codes not raised": ("cpu-int8", weights("MatMul", 1, "u1", lambda w: w ^ 0x80)),
    "halves exchanged": ("cpu-int4", weights("MatMul", 1, "u1", lambda w: w << 4 | w >> 4)),
    "rows of a table": ("cpu", weights("Embedding", 1, "<u2", lambda w: w[::-1])),
    "another scale, fp16": ("cuda-fp16", attribute("GroupQueryAttention", "scale", 0.25)),
    "no mask": ("tensorrt", unmasked),
    "softmax of heads": ("tensorrt-old", attribute("Softmax", "axis", 1)),
    "argmax": ("tensorrt", replaced("ReduceMin", "ReduceMax")),
    "confidence": ("tensorrt", replaced("Softmax", "LogSoftmax")),
    "list of candidates": ("tensorrt", smallest_first),
    "no operator": ("tensorrt", replaced("Split", "Splitt")),
}
SAID = {
    **{name: f"has a wrong {name} " for name in ("argmax", "confidence", "list of candidates")},
    "no numbers": f"{DIFFERS} nan",
    "no operator": r"does not run the lowered graph .*report the arch",
}
"""Of faults that no score shows, or that all do."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_spoiled_lowering_is_found(draft: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    how, spoil = FAULTS[name]
    case = lowered(*draft, tmp_path, LOWERINGS[how])
    model = case.model
    spoil(case, model)
    case.save(model)
    told = SAID.get(name, f"{DIFFERS}|defect of the lowering")
    with pytest.raises(BuildError, match=told) as refused:
        case.error()
    assert "\n" not in str(refused.value)
