"""Projections in standard operators, laid out as TensorRT stores and joins them best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from specrt_export.lower.lazy_tensor import doubled, held_off_zero, reshaped
from specrt_export.lower.projections import (
    PROJECTION,
    Projection,
    WeightMatrix,
    find_matrix,
    read_projection,
)
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView

_ROW_BY_ROW = (
    "Add", "Cast", "Div", "Gelu", "Identity", "LayerNormalization", "Mul", "RMSNormalization",
    "Relu", "Sigmoid", "Sub", "Tanh",
)  # fmt: skip


class PadRows:
    """Values with their first row once more behind the last: what products with partners read.

    ```
    x [B, S, K] ─┬────────── Concat ─ partnered x [B, S + 1, K]
                 └ first row ─┘
    ```
    The row is added once, to the tokens, and stays from operator to operator where each works row
    by row; only attention takes it away and needs it back.
    """

    def __init__(self, view: GraphView) -> None:
        self._view = view
        shapes = Shapes(view)  # as long as projections say how wide they are
        self._dims = {name: shapes.dims(name) for node in view.nodes() for name in node.output}
        self._made: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the value with a partner."""
        stack = [name]
        while stack:
            value = stack[-1]
            needed = [] if value in self._made else self._rows_of(value)
            missing = [i for i in needed if i not in self._made]
            stack.extend(missing)
            if not missing:
                if value not in self._made:
                    self._made[value] = self._add(value)
                stack.pop()
        return self._made[name]

    def repeated(self, name: str) -> str:
        """Return the value with a partner, added at this very place."""
        self._made[name] = self._repeated(name, self._axis(name))
        return self._made[name]

    def drop(self, partnered: str, name: str) -> None:
        """Let a value be another one without its partner."""
        bounds = [self._constant(n) for n in (0, -1, self._axis(name))]
        self._view.add("Slice", [partnered, *bounds], outputs=[name])
        self._made[name] = partnered

    def _rows_of(self, name: str) -> list[str]:
        """Return the inputs whose rows a value is made of, where it is made row by row."""
        node = self._view.maker(name)
        if node is None:
            return []
        if self._is_selection(name) or _cuts_columns(self._view.attributes(node), node.op_type):
            return [node.input[0]]
        dims = self._dims.get(name)
        if node.op_type not in _ROW_BY_ROW or dims is None:
            return []
        data = [i for i in node.input if self._is_data(i)]
        return data if all(self._dims.get(i) == dims for i in data) else []

    def _is_data(self, name: str) -> bool:
        return self._view.stored(name) is None and self._view.constant(name) is None

    def _add(self, name: str) -> str:
        view, node = self._view, self._view.maker(name)
        rows = self._rows_of(name)
        if node is not None and self._is_selection(name):
            more = self._repeated(node.input[1], axis=0)
            return view.add("Gather", [self._made[node.input[0]], more], axis=1)
        if node is not None and node.op_type == "Split":
            return self._split(node, name)
        if node is not None and rows:
            inputs = [self._made.get(i, i) if i in rows else i for i in node.input]
            return view.add(node.op_type, inputs, **view.attributes(node))
        if node is not None and node.op_type == "Gather" and node.input[1] == "input_ids":
            more = self._repeated("input_ids", axis=1)
            return view.add("Gather", [node.input[0], more], **view.attributes(node))
        return self._repeated(name, self._axis(name))

    def _split(self, node: onnx.NodeProto, name: str) -> str:
        parts = {output: self._view.fresh("part") for output in node.output}
        inputs = [self._made[node.input[0]], *node.input[1:]]
        said = self._view.attributes(node)
        self._view.add("Split", inputs, outputs=list(parts.values()), **said)
        self._made |= parts
        return parts[name]

    def _is_selection(self, name: str) -> bool:
        """Tell whether a value is some rows of another: those that are asked for."""
        node = self._view.maker(name, "Gather")
        if node is None or self._view.attributes(node).get("axis", 0) != 1:
            return False
        return self._is_data(node.input[0]) and self._view.depends_on(node.input[1], ["rows"])

    def _repeated(self, name: str, axis: int) -> str:
        first = self._view.add("Slice", [name, *(self._constant(n) for n in (0, 1, axis))])
        return self._view.add("Concat", [name, first], axis=axis)

    def _constant(self, number: int) -> str:
        return self._view.add_constant("bound", np.array([number], np.int64))

    def _axis(self, name: str) -> int:
        """Return the axis of the tokens: the last but one."""
        dims = self._dims.get(name)
        return len(dims) - 2 if dims is not None else 1


def _cuts_columns(said: dict[str, Any], op_type: str) -> bool:
    return op_type == "Split" and said.get("axis", 0) == -1


def emit_products(view: GraphView) -> tuple[int, int]:
    """Replace projections by products; return how many are quantized, and of how many.

    ```
    fp32               W [N, K] ──────────────────────────── Transpose ─┐
    int4               codes, scales ─ DequantizeLinear ──── Transpose ─┤
                                                               x ───── MatMul (─ Add bias) ─ y
    int8, fp8          codes, scales ─ DequantizeLinear ──── Transpose ─┐
                       x [.., S, K] ─┬─────────── Concat [.., S + 1, K] MatMul ─ Slice ─ y
                                     └ first row ─┘
    ```
    A weight [N, K] before its transposition is stored once in a plan; a [K, N] one twice, as soon
    as there is a profile of width 1. Weights of 8 bits are dequantized inside the kernel of the
    product where it has two rows or more, and by a kernel of their own, in every pass, where it has
    one: so they get one row more, which nobody reads. (Kernels seen in plans of TensorRT-RTX 1.7.)
    """
    projections = [read_projection(view, node) for node in view.nodes(PROJECTION)]
    partners = PadRows(view)
    paired = [p for p in projections if p.matrix.scales is not None and p.matrix.bits == 8]
    # A single product, such as the head of an int4 model, is not worth a row in all before it.
    partner = partners.of if len(paired) > 1 else partners.repeated
    for projection in projections:
        if projection not in paired:
            _emit(view, projection, projection.x, projection.output)
            continue
        made = _emit(view, projection, partner(projection.x))
        partners.drop(made, projection.output)
    view.tidy()
    quantized = sum(p.matrix.scales is not None for p in projections)
    return quantized, len(projections)


def cut_columns(view: GraphView) -> int:
    """Cut what joined products make along an axis of their own; return how many.

    ```
    x · [gate; up] ─ Split ─ a, b

      =>  x · [gate; up] ─ Reshape [.., N / u, u] ─ Split ─ Reshape ─ a, b
    ```
    TensorRT pulls a plain split of floats into the product, joins it again for some profiles, and
    keeps the weights of both. Not where a norm of heads follows: that would take one kernel more.
    """
    cut = 0
    for node in view.nodes("Split"):
        sizes = view.constant(node.input[1]) if len(node.input) > 1 else None
        if sizes is None or not _is_dense(view, node.input[0]) or _meets_norm(view, node):
            continue
        unit = int(np.gcd.reduce(sizes))
        counts = view.add_constant("counts", sizes // unit)
        apart = _reshaped(view, node.input[0], [0, 0, int(sizes.sum()) // unit, unit])
        parts = [view.fresh("part") for _ in node.output]
        outputs = list(node.output)
        view.add("Split", [apart, counts], outputs=parts, axis=2)
        for part, output, size in zip(parts, outputs, sizes, strict=True):
            shape = view.add_constant("shape", np.array([0, 0, size], np.int64))
            view.add("Reshape", [part, shape], outputs=[output])
        cut += 1
    view.tidy()
    return cut


def _is_dense(view: GraphView, name: str) -> bool:
    """Tell whether a value is a product, of three axes, with weights that share no scale."""
    node = view.maker(name)
    if node is not None and node.op_type == "Add":
        node = view.maker(node.input[0])
    if node is None or node.op_type != "MatMul":
        return False
    turned = view.maker(node.input[1], "Transpose")
    return turned is not None and view.stored(turned.input[0]) is not None


def _meets_norm(view: GraphView, node: onnx.NodeProto) -> bool:
    """Tell whether a part is normed head by head."""
    shaped = [r for output in node.output for r in view.readers(output) if r.op_type == "Reshape"]
    after = [reader for one in shaped for reader in view.readers(one.output[0])]
    return any(reader.op_type.endswith("Normalization") for reader in after)


def _reshaped(view: GraphView, name: str, shape: list[int]) -> str:
    return view.add("Reshape", [name, view.add_constant("shape", np.array(shape, np.int64))])


def emit_tables(view: GraphView) -> None:
    """Give each look-up in a quantized table a dequantization of its own.

    TensorRT then joins the two, and dequantizes what is looked up; one that a product reads as
    well is dequantized whole.
    """
    for node in view.nodes("Gather"):
        dequantize = view.maker(node.input[0], "DequantizeLinear")
        matrix = find_matrix(view, node.input[0]) if dequantize is not None else None
        if matrix is not None:
            inputs = [_weight(view, matrix), node.input[1]]
            view.add("Gather", inputs, outputs=[node.output[0]], **view.attributes(node))
    view.tidy()


def _emit(view: GraphView, projection: Projection, x: str, output: str | None = None) -> str:
    """Multiply, and return what is made; `output` may name it."""
    weight = view.add("Transpose", [_weight(view, projection.matrix)], perm=[1, 0])
    named = [output] if output is not None else None
    if projection.bias is None:
        return view.add("MatMul", [x, weight], outputs=named)
    product = view.add("MatMul", [x, weight])
    return view.add("Add", [product, view.add_stored(projection.bias)], outputs=named)


def _weight(view: GraphView, matrix: WeightMatrix) -> str:
    """Add a weight; one scale for each row is said as such, and not as a block."""
    if matrix.scales is None:
        return matrix.add_to(view)
    apart = held_off_zero(matrix.scales)
    if matrix.block == matrix.inputs and matrix.bits == 4:
        # One block a row has a kernel of its own, as 8 bits have; two of one scale have not.
        return replace(matrix, scales=doubled(apart), block=matrix.block // 2).add_to(view)
    if matrix.block != matrix.inputs:
        return replace(matrix, scales=apart).add_to(view)
    scales = reshaped(apart, f"{apart.name}/row", (matrix.outputs,))
    inputs = [view.add_stored(matrix.values), view.add_stored(scales)]
    return view.add("DequantizeLinear", inputs, axis=0)
