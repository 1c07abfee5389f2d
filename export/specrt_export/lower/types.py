"""What type each value of a graph has, from the rules of the operators that lowering emits."""

from __future__ import annotations

import onnx

from specrt_export.lower.view import GraphView

_INT64, _BOOL = onnx.TensorProto.INT64, onnx.TensorProto.BOOL
_FIXED = {
    **dict.fromkeys(("Shape", "Size", "ArgMax", "ArgMin", "NonZero"), _INT64),
    **dict.fromkeys(
        ("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual",
         "Not", "Or", "Xor"),
        _BOOL,
    ),
}  # fmt: skip
_LIKE = {"Where": 1, "DequantizeLinear": 1, "GatherBlockQuantized": 2, "OneHot": 2}
"""Operators whose output has the type of another input than the first."""


def value_types(view: GraphView) -> dict[str, int]:
    """Return the element type of every value, by name; 0 for one that is not known."""
    types = {i.name: i.type.tensor_type.elem_type for i in view.graph.input}
    types |= {t.name: t.data_type for t in view.graph.initializer}
    for node in view.nodes():
        for index, name in enumerate(node.output):
            types[name] = _output_type(view, node, index, types)
    return types


def _output_type(view: GraphView, node: onnx.NodeProto, index: int, types: dict[str, int]) -> int:
    said = view.attributes(node)
    if node.op_type in _FIXED:
        return _FIXED[node.op_type]
    if node.op_type == "Cast":
        return int(said["to"])
    if node.op_type == "Constant":
        return int(said["value"].data_type) if "value" in said else 0
    if node.op_type == "ConstantOfShape":
        return int(said["value"].data_type) if "value" in said else onnx.TensorProto.FLOAT
    if node.op_type == "TopK" and index == 1:
        return _INT64
    if node.op_type == "GroupQueryAttention" and index:
        return types.get(node.input[2 + index], 0)
    like = _LIKE.get(node.op_type, 0)
    return types.get(node.input[like], 0) if len(node.input) > like else 0
