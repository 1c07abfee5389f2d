"""Shapes and types of values, with names for the sizes that are known only at run time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import onnx

from specrt_export.lower.view import GraphView

Dim = int | str

Dims = tuple[Dim, ...]

_LIKE_FIRST = """
    Abs Cast Cos DequantizeLinear Erf Exp Gelu Identity IsNaN LayerNormalization Log Neg Not
    RMSNormalization Reciprocal Relu RotaryEmbedding ScatterElements Sigmoid
    SimplifiedLayerNormalization Sin SkipLayerNormalization SkipSimplifiedLayerNormalization Softmax
    Softplus Sqrt Tanh TensorScatter
"""

_LIKE_ALL = "Add And Div Greater GreaterOrEqual LessOrEqual Max Min Mul Or Pow Sub Where"

_DECIDE = {
    **dict.fromkeys(("GroupQueryAttention", "Reshape", *_LIKE_FIRST.split()), 1),
    "Attention": 3,
    "Conv": 2,
    "CrossAttention": 1,
    "Expand": 1,
    "MultiHeadAttention": 3,
    "Range": 0,
}
"""How many inputs a rule reads the shapes of, where it is not all."""


class Shapes:
    """Finds shapes by following a graph from its inputs; None where an operator is not known."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._known: dict[str, Dims | None] = {
            value.name: tuple(d.dim_value or d.dim_param for d in value.type.tensor_type.shape.dim)
            for value in view.graph.input
        }
        self._rules: dict[str, Callable[[onnx.NodeProto, Sequence[Dims]], Dims | None]] = {
            **{kind: lambda node, inputs: inputs[0] for kind in _LIKE_FIRST.split()},
            **{kind: lambda node, inputs: _broadcast(inputs) for kind in _LIKE_ALL.split()},
            "Attention": lambda node, inputs: (*inputs[0][:-1], inputs[2][-1]),
            "Concat": self._concatenated,
            "Conv": self._convolved,
            "CrossAttention": lambda node, inputs: inputs[0],
            "Expand": self._expanded,
            "Gather": self._gathered,
            "Gemm": lambda node, inputs: self._multiplied(node, *inputs[:2]),
            "GroupQueryAttention": self._attended,
            "MatMul": lambda node, inputs: _product_of(*inputs),
            "MultiHeadAttention": lambda node, inputs: (*inputs[0][:-1], inputs[2][-1]),
            "Projection": self._projected,
            "Range": self._counted,
            "ReduceMean": self._reduced,
            "Reshape": self._reshaped,
            "Transpose": lambda node, inputs: tuple(
                inputs[0][a] for a in self._attributes(node)["perm"]
            ),
            "Squeeze": self._squeezed,
            "Unsqueeze": self._unsqueezed,
        }

    def dims(self, name: str) -> Dims | None:
        """Return the shape of a value, or None."""
        stack = [name]
        while stack:
            value = stack[-1]
            node = self._view.maker(value)
            needed = [] if value in self._known or node is None else list(node.input)
            missing = [i for i in needed if i and i not in self._known]
            stack.extend(missing)
            if not missing:
                if value not in self._known:
                    leaf = node is None
                    self._known[value] = self._leaf(value) if leaf else self._output(node, value)
                stack.pop()
        return self._known[name]

    def items(self, name: str) -> Dims | None:
        """Return what a vector of sizes holds, such as `("B", "S", 64)`; None if it is not a such.

        input_ids ─ Shape[1:2] ─ Squeeze ─ Reshape(-1) ─┐
                                                   64 ─ Concat ─ value
        """
        constant, node = self._view.constant(name), self._view.maker(name)
        if constant is not None:
            return tuple(int(i) for i in constant.reshape(-1))
        if node is None:
            return None
        if node.op_type in ("Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity"):
            return self.items(node.input[0])
        if node.op_type == "Concat":
            parts = [self.items(i) for i in node.input]
            return None if None in parts else tuple(d for part in parts if part for d in part)
        if node.op_type == "Shape":
            dims, attributes = self.dims(node.input[0]), self._attributes(node)
            return (
                None if dims is None else dims[attributes.get("start", 0) : attributes.get("end")]
            )
        return None

    def part(self, node: onnx.NodeProto, output: str) -> tuple[int, int, int] | None:
        """Return (axis, begin, end) of what a Slice or a Split takes, if that is fixed."""
        whole = self.dims(node.input[0])
        if whole is None or node.op_type not in ("Slice", "Split"):
            return None
        return (self._sliced if node.op_type == "Slice" else self._split)(node, whole, output)

    def _attributes(self, node: onnx.NodeProto) -> dict[str, Any]:
        return self._view.attributes(node)

    def _leaf(self, name: str) -> Dims | None:
        constant, stored = self._view.constant(name), self._view.stored(name)
        if stored is not None:
            return stored.shape
        return None if constant is None else tuple(constant.shape)

    def _output(self, node: onnx.NodeProto | None, output: str) -> Dims | None:
        assert node is not None
        inputs = [self._known.get(i) for i in node.input if i]
        rule = self._rules.get(node.op_type)
        if rule is not None:
            decide = inputs[: _DECIDE.get(node.op_type)]
            known = [dims for dims in decide if dims is not None]
            return rule(node, known) if len(known) == len(decide) else None
        bounds, whole = self.part(node, output), inputs[0] if inputs else None
        if whole is None or node.op_type not in ("Slice", "Split"):
            return None
        if bounds is None:
            return self._cut(node, whole, output)
        axis, begin, end = bounds
        return (*whole[:axis], end - begin, *whole[axis + 1 :])

    def _projected(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims:
        stated = self._attributes(node)
        return (*inputs[0][:-1], stated.get("gates", stated["N"]))

    def _cut(self, node: onnx.NodeProto, whole: Dims, output: str) -> Dims | None:
        """Name the size that a Slice leaves, if it is told along which axis.

        Of `2+S` it is S, where two are left out; of a number, what steps leave of it.
        """
        axes = self._view.constant(node.input[3]) if len(node.input) > 3 else None
        if node.op_type != "Slice" or axes is None or axes.size != 1:
            return None
        axis = int(axes.reshape(-1)[0]) % len(whole)
        bounds = [self._view.scalar(i) for i in (*node.input[1:3], *node.input[4:])]
        known = [int(bound) for bound in bounds if bound is not None]
        left = _left(whole[axis], *known) if len(known) == len(bounds) else None
        return (*whole[:axis], left or f"size of {output}", *whole[axis + 1 :])

    def _multiplied(self, node: onnx.NodeProto, left: Dims, right: Dims) -> Dims | None:
        attributes = self._attributes(node)
        if attributes.get("transA"):
            return None
        return left[0], right[0 if attributes.get("transB") else 1]

    def _reduced(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        axes = self._view.constant(node.input[1]) if len(node.input) > 1 else None
        if axes is None or not self._attributes(node).get("keepdims", 1):
            return None
        gone = {int(a) % len(inputs[0]) for a in axes}
        return tuple(1 if axis in gone else size for axis, size in enumerate(inputs[0]))

    def _gathered(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        table, index = inputs
        axis = self._attributes(node).get("axis", 0) % len(table)
        return (*table[:axis], *index, *table[axis + 1 :])

    def _attended(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        size = self.dims(node.input[3])
        heads = self._attributes(node)["num_heads"]
        if size is None or not isinstance(size[-1], int):
            return None
        return (*inputs[0][:2], heads * size[-1])

    def _counted(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        """Return the length of a Range from 0 in steps of 1."""
        begin, step = self._view.scalar(node.input[0]), self._view.scalar(node.input[2])
        return self.items(node.input[1]) if (begin, step) == (0, 1) else None

    def _convolved(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        """Return the shape of what a convolution along one axis of a known length makes."""
        (batch, *_, length), weight = inputs[0], inputs[1]
        stated = self._attributes(node)
        if len(weight) != 3 or not isinstance(length, int) or not isinstance(weight[2], int):
            return None
        if stated.get("auto_pad", b"NOTSET") != b"NOTSET":
            return None
        reach = stated.get("dilations", [1])[0] * (weight[2] - 1) + 1
        left = length + sum(stated.get("pads", [0, 0])) - reach
        return batch, weight[0], left // stated.get("strides", [1])[0] + 1

    def _expanded(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        stated = self.items(node.input[1])
        return None if stated is None else _broadcast([inputs[0], stated])

    def _concatenated(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        """Return the shape of the whole; of 2 and S along its axis it is `2+S`."""
        if len({len(dims) for dims in inputs}) > 1:
            return None
        axis, dims = self._attributes(node)["axis"], list(inputs[0])
        names = [size for one in inputs if isinstance(size := one[axis], str)]
        number = sum(size for one in inputs if isinstance(size := one[axis], int))
        dims[axis] = "+".join([str(number), *names]) if names else number
        return tuple(dims)

    def _squeezed(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        axes = self._view.constant(node.input[1]) if len(node.input) > 1 else None
        if axes is None:
            return None
        gone = {int(a) % len(inputs[0]) for a in axes.reshape(-1)}
        return tuple(size for axis, size in enumerate(inputs[0]) if axis not in gone)

    def _unsqueezed(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        axes = self._view.constant(node.input[1])
        if axes is None:
            return None
        dims = list(inputs[0])
        rank = len(dims) + axes.size
        for axis in sorted(int(a) % rank for a in axes.reshape(-1)):
            dims.insert(axis, 1)
        return tuple(dims)

    def _reshaped(self, node: onnx.NodeProto, inputs: Sequence[Dims]) -> Dims | None:
        before, stated = inputs[0], self.items(node.input[1])
        if stated is None or 0 in stated[len(before) :]:
            return None
        target = tuple(before[i] if d == 0 else d for i, d in enumerate(stated))
        rest = _quotient(before, [d for d in target if d != -1])
        return None if rest is None else tuple(rest if d == -1 else d for d in target)

    def _sliced(self, node: onnx.NodeProto, whole: Dims, _: str) -> tuple[int, int, int] | None:
        bounds = [self._view.scalar(i) for i in node.input[1:5]]
        if len(bounds) < 3 or None in bounds or bounds[3:] not in ([], [1]):
            return None
        begin, end, axis = (int(i) for i in bounds[:3] if i is not None)
        size = whole[axis]
        if not isinstance(size, int) or begin < 0 or end < 0:
            return None
        return axis % len(whole), min(begin, size), min(end, size)

    def _split(self, node: onnx.NodeProto, whole: Dims, output: str) -> tuple[int, int, int] | None:
        axis = self._attributes(node).get("axis", 0) % len(whole)
        size, count = whole[axis], len(node.output)
        sizes = self._view.constant(node.input[1]) if len(node.input) > 1 else None
        if not isinstance(size, int) or (sizes is None and (len(node.input) > 1 or size % count)):
            return None
        parts = [size // count] * count if sizes is None else [int(i) for i in sizes]
        place = list(node.output).index(output)
        return axis, sum(parts[:place]), sum(parts[: place + 1])


def _left(size: Dim, begin: int, end: int, step: int = 1) -> Dim | None:
    """Return what a slice leaves of a size, if that is known."""
    if isinstance(size, int):
        return len(range(size)[begin:end:step])
    number, _, rest = size.partition("+")
    is_rest = rest and step == 1 and (end < 0 or end >= 2**31 - 1)
    return rest if is_rest and begin + max(0, -end) == int(number) else None


def _product_of(left: Dims, right: Dims) -> Dims | None:
    return (*left[:-1], right[-1]) if len(right) == 2 else None


def _broadcast(inputs: Sequence[Dims]) -> Dims | None:
    rank = max(len(dims) for dims in inputs)
    padded = [(1,) * (rank - len(dims)) + dims for dims in inputs]
    dims: list[Dim] = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        dims.append(wide.pop() if wide else 1)
    return tuple(dims)


def _quotient(whole: Dims, by: Sequence[Dim]) -> Dim | None:
    """Divide one product of sizes by another; None where that is not known.

    What is left of sizes known only at run time is written down as it is, `B*S`.
    """
    number, names = _factors(whole)
    divisor, divided = _factors(by)
    for name in divided:
        if name not in names:
            return None
        names.remove(name)
    if not divisor or number % divisor:
        return None
    number //= divisor
    if not names:
        return number
    return "*".join([*sorted(names), *([str(number)] if number != 1 else [])])


def _factors(sizes: Sequence[Dim]) -> tuple[int, list[str]]:
    """Return the product of the numbers in some sizes, and the names in them."""
    parts = [part for size in sizes for part in str(size).split("*")]
    return prod(int(p) for p in parts if p.isdigit()), [p for p in parts if not p.isdigit()]


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
    attributes = view.attributes(node)
    if node.op_type in _FIXED:
        return _FIXED[node.op_type]
    if node.op_type == "Cast":
        return int(attributes["to"])
    if node.op_type == "Constant":
        return int(attributes["value"].data_type) if "value" in attributes else 0
    if node.op_type == "ConstantOfShape":
        return (
            int(attributes["value"].data_type) if "value" in attributes else onnx.TensorProto.FLOAT
        )
    if node.op_type == "TopK" and index == 1:
        return _INT64
    if node.op_type == "GroupQueryAttention" and index:
        return types.get(node.input[2 + index], 0)
    like = _LIKE.get(node.op_type, 0)
    return types.get(node.input[like], 0) if len(node.input) > like else 0
