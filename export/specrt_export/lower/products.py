"""Projections in standard operators, laid out as TensorRT stores and joins them best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx

from specrt_export.lower.linear import PROJECTION, Projection, read_projection
from specrt_export.lower.matrix import Matrix, find_matrix
from specrt_export.lower.partner import Partners
from specrt_export.lower.stored import doubled, held_off_zero, reshaped
from specrt_export.lower.view import GraphView


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
    partners = Partners(view)
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


def _weight(view: GraphView, matrix: Matrix) -> str:
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
