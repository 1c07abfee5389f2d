"""Fuse RMS norms written out in primitives."""

from __future__ import annotations

import onnx

from specrt_export.lower.view import GraphView


def fuse_rms_norm(view: GraphView) -> int:
    """Replace written-out RMS norms by one node each; return how many.

    ```
    x ─┬─ Pow 2 ─ ReduceMean -1 ─ Add ε ─ Sqrt ─ Reciprocal ─┐
       └───────────────────────────────────────────────── Mul ─ Mul ─ y
                                                           w ───┘
      =>  x, w ─ SimplifiedLayerNormalization ─ y
    ```
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    fused = 0
    for scale in view.nodes("Mul"):
        for weight, normed in (scale.input, reversed(scale.input)):
            match = _normalised(view, normed)
            if match and _is_weight(view, weight):
                x, epsilon = match
                view.add(
                    "SimplifiedLayerNormalization",
                    [x, weight],
                    outputs=[scale.output[0]],
                    axis=-1,
                    epsilon=epsilon,
                    stash_type=1,
                )
                fused += 1
                break
    return fused


def _is_weight(view: GraphView, name: str) -> bool:
    return not view.depends_on(name, ("input_ids", "start", "rows"))


def _normalised(view: GraphView, name: str) -> tuple[str, float] | None:
    """Return (x, ε) if a value is x divided by its root mean square over the last axis."""
    product = view.maker(name, "Mul")
    if product is None:
        return None
    for x, inverse in (product.input, reversed(product.input)):
        epsilon = _inverse_rms(view, inverse, x)
        if epsilon is not None:
            return x, epsilon
    return None


def _inverse_rms(view: GraphView, name: str, x: str) -> float | None:
    """Return ε if a value is 1 / sqrt(mean(x²) + ε)."""
    node = view.maker(name, "Reciprocal")
    node = node and view.maker(node.input[0], "Sqrt")
    node = node and view.maker(node.input[0], "Add")
    if not node:
        return None
    for mean, epsilon in (node.input, reversed(node.input)):
        value = view.scalar(epsilon)
        if value is not None and _is_mean_square(view, mean, x):
            return value
    return None


def _is_mean_square(view: GraphView, name: str, x: str) -> bool:
    mean = view.maker(name, "ReduceMean")
    if mean is None or not _over_last_axis(view, mean):
        return False
    square = view.maker(mean.input[0])
    if square is None or square.input[0] != x:
        return False
    if square.op_type == "Pow":
        return view.scalar(square.input[1]) == 2.0
    return square.op_type == "Mul" and square.input[1] == x


def _over_last_axis(view: GraphView, mean: onnx.NodeProto) -> bool:
    axes = view.constant(mean.input[1]) if len(mean.input) > 1 else None
    keeps = all(a.i == 1 for a in mean.attribute if a.name == "keepdims")
    return axes is not None and axes.tolist() == [-1] and keeps
