"""Fuse RMS norms written out in primitives, and norms with the residual sums before them."""

from __future__ import annotations

import numpy as np
import onnx

from specrt_export.lower.projections import MICROSOFT, add_projection, find_projection
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView

SKIP = {
    "SimplifiedLayerNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
"""Norms, and what each is with a residual."""


def fuse_rms_norm(view: GraphView) -> tuple[int, int]:
    """Replace written-out RMS norms by one node each; return how many, and of how many.

    ```
    x ─┬─ Pow 2 ─ ReduceMean -1 ─ Add ε ─ Sqrt ─ Reciprocal ─┐
       └───────────────────────────────────────────────── Mul ─ Mul ─ y
                                                           w ───┘
      =>  x, w ─ SimplifiedLayerNormalization ─ y
    ```
    Also with `Pow -0.5` for the last two, and without w, which are ones then.
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
    view.tidy()
    fused += _fuse_unscaled(view)
    written = len(view.nodes("Reciprocal")) + len(_inverse_roots(view))
    return fused, fused + written


def _fuse_unscaled(view: GraphView) -> int:
    """Replace norms that have no weight; return how many."""
    fused, shapes = 0, Shapes(view)
    for product in view.nodes("Mul"):
        match, dims = _normalised(view, product.output[0]), shapes.dims(product.output[0])
        if match and dims and isinstance(dims[-1], int):
            ones = view.add_constant("ones", np.ones(dims[-1], np.float32))
            x, epsilon = match
            view.add(
                "SimplifiedLayerNormalization", [x, ones], outputs=[product.output[0]], axis=-1,
                epsilon=epsilon, stash_type=1,
            )  # fmt: skip
            fused += 1
    view.tidy()
    return fused


def _inverse_roots(view: GraphView) -> list[onnx.NodeProto]:
    return [node for node in view.nodes("Pow") if view.scalar(node.input[1]) == -0.5]


def write_out_norms(view: GraphView) -> set[str]:
    """Write RMS norms out again, for a library that has none; return what must stay in fp32.

    ```
    x, w ─ SimplifiedLayerNormalization ─ y

      =>  x ─┬─ Mul x ─ ReduceMean -1 ─ Add ε ─ Sqrt ─┐
             └────────────────────────────────────── Div ─ Mul w ─ y
    ```
    """
    exact = set[str]()
    axis = view.add_constant("axis", np.array([-1], np.int64))
    for node in view.nodes("SimplifiedLayerNormalization"):
        x, weight = node.input[:2]
        least = float(view.attributes(node).get("epsilon", 1e-5))
        epsilon = view.add_constant("epsilon", np.array(least, np.float32))
        square = view.add("Mul", [x, x])
        mean = view.add("ReduceMean", [square, axis], keepdims=1)
        padded = view.add("Add", [mean, epsilon])
        root = view.add("Sqrt", [padded])
        normed = view.add("Div", [x, root])
        view.add("Mul", [normed, weight], outputs=[node.output[0]])
        exact |= {square, padded, normed}
    view.tidy()
    return exact


def lift_transposes(view: GraphView) -> None:
    """Let a norm of heads come before they are transposed, where a fused attention undoes it.

    ```
    x [B, S, H, D] ─ Transpose ─ norm ─ y      =>      x ─ norm ─ Transpose ─ y
    ```
    """
    for node in view.nodes("SimplifiedLayerNormalization"):
        transpose = view.maker(node.input[0], "Transpose")
        if transpose is None or view.attributes(transpose).get("perm") != [0, 2, 1, 3]:
            continue
        inputs = [transpose.input[0], *node.input[1:]]
        normed = view.add(node.op_type, inputs, **view.attributes(node))
        view.add("Transpose", [normed], outputs=[node.output[0]], perm=[0, 2, 1, 3])
    view.tidy()


def fuse_skip_norm(view: GraphView, biases: bool = True) -> tuple[int, int]:
    """Join residual sums with the norms that read them; return how many, and of how many.

    With `biases`, those of dense projections among what is summed are the norm's to add.

    ```
    a ─ Add ─┬─ norm ─ y           a ─ SkipSimplifiedLayerNormalization ─ y
    b ───┘   └─ sum          =>    b ──┘        (SkipLayerNormalization) ─ sum
    ```
    """
    shapes = Shapes(view)
    fused = total = 0
    for norm in view.nodes(*SKIP):
        add = view.maker(norm.input[0], "Add")
        dims = add and shapes.dims(add.output[0])
        if not add or not dims or any(shapes.dims(name) != dims for name in add.input):
            continue
        total += 1
        scales = [view.stored(name) for name in norm.input[1:]]
        whole = all(s is not None and s.shape == (dims[-1],) for s in scales)
        if len(dims) == 3 and whole and view.attributes(norm).get("axis", -1) in (-1, 2):
            _fuse_skip(view, norm, add, biases)
            fused += 1
    view.tidy()
    return fused, total


def _fuse_skip(view: GraphView, norm: onnx.NodeProto, add: onnx.NodeProto, biases: bool) -> None:
    first, second, bias = _without_bias(view, add) if biases else (*add.input, [])
    inputs = [first, second, *norm.input[1:]]
    if bias and norm.op_type == "LayerNormalization" and len(norm.input) < 3:
        inputs.append("")
    sum_is_read = len(view.readers(add.output[0])) > 1
    outputs = [norm.output[0], *(["", "", add.output[0]] if sum_is_read else [])]
    view.require_domain(MICROSOFT, 1)
    view.add(
        SKIP[norm.op_type],
        [*inputs, *bias],
        outputs=outputs,
        domain=MICROSOFT,
        epsilon=view.attributes(norm).get("epsilon", 1e-5),
    )


def _without_bias(view: GraphView, add: onnx.NodeProto) -> tuple[str, str, list[str]]:
    """Return what is added, with the bias of a dense projection apart: the kernel adds it too."""
    for one, other in (add.input, reversed(add.input)):
        projection = find_projection(view, one)
        alone = len(view.readers(one)) == 1
        if projection and projection.bias and alone and projection.matrix.scales is None:
            bare = add_projection(view, projection.x, projection.matrix, None)
            return str(other), bare, [projection.bias.name]
    return add.input[0], add.input[1], []


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
    inverse = view.maker(name, "Reciprocal")
    root = inverse and view.maker(inverse.input[0], "Sqrt")
    power = view.maker(name, "Pow")
    if power is not None and view.scalar(power.input[1]) == -0.5:
        root = power
    node = root and view.maker(root.input[0], "Add")
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
