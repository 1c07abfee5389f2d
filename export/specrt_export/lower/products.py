"""Projections in standard operators, laid out as TensorRT stores and joins them best."""

from __future__ import annotations

from dataclasses import replace

from specrt_export.lower.linear import PROJECTION, Projection, read_projection
from specrt_export.lower.matrix import Matrix, find_matrix
from specrt_export.lower.partner import Partners
from specrt_export.lower.stored import held_off_zero, reshaped
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
    for projection in projections:
        matrix = projection.matrix
        if matrix.scales is None or matrix.bits != 8:
            _emit(view, projection, projection.x, projection.output)
            continue
        made = _emit(view, projection, partners.of(projection.x))
        partners.drop(made, projection.output)
    view.tidy()
    quantized = sum(p.matrix.scales is not None for p in projections)
    return quantized, len(projections)


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
    if matrix.block != matrix.inputs:
        return replace(matrix, scales=apart).add_to(view)
    scales = reshaped(apart, f"{apart.name}/row", (matrix.outputs,))
    inputs = [view.add_stored(matrix.values), view.add_stored(scales)]
    return view.add("DequantizeLinear", inputs, axis=0)
