"""Join projections that read the same value: one product with a taller weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specrt_export.lower.linear import PROJECTION, Projection, add_projection, read_projection
from specrt_export.lower.matrix import join_matrices
from specrt_export.lower.stored import joined
from specrt_export.lower.view import GraphView


def join_projections(view: GraphView, parts: Sequence[Projection]) -> str | None:
    """Return a value that holds the outputs of projections side by side, or None.

    ```
    x ─┬─ Projection W ─ a
       └─ Projection V ─ b      =>      x ─ Projection [W; V] ─ a and b, along the last axis
    ```
    They must read one value, have all a bias or none, and weights of one precision and block.
    """
    first = parts[0]
    if any(p.x != first.x or not p.matrix.fits(first.matrix) for p in parts):
        return None
    biases = [p.bias for p in parts if p.bias is not None]
    if len(biases) not in (0, len(parts)):
        return None
    matrix = join_matrices([p.matrix for p in parts])
    return add_projection(view, first.x, matrix, joined(biases) if biases else None)


def join_siblings(view: GraphView) -> None:
    """Join all projections that read one value, and split what they make.

    ```
    x ─┬─ Projection gate ─ a
       └─ Projection up ── b    =>      x ─ Projection [gate; up] ─ Split ─ a, b
    ```
    """
    siblings: dict[str, list[Projection]] = defaultdict(list)
    for node in view.nodes(PROJECTION):
        siblings[node.input[0]].append(read_projection(view, node))
    for group in siblings.values():
        made = join_projections(view, group) if len(group) > 1 else None
        if made is not None:
            sizes = np.array([p.matrix.outputs for p in group], np.int64)
            inputs = [made, view.add_constant("sizes", sizes)]
            view.add("Split", inputs, outputs=[p.output for p in group], axis=-1)
    view.tidy()


def gated(view: GraphView) -> list[tuple[str, str]]:
    """Return the outputs (gate, up) of every gated feed-forward layer.

    ```
    gate ─ activation ─┐
    up ────────────── Mul
    ```
    """
    pairs = []
    for product in view.nodes("Mul"):
        for act, up in (product.input, reversed(product.input)):
            gate = _activated(view, act)
            if gate and gate != up and all(view.maker(name, PROJECTION) for name in (gate, up)):
                pairs.append((gate, str(up)))
                break
    return pairs


def _activated(view: GraphView, name: str) -> str | None:
    """Return x if a value is some function of x alone, such as `x · sigmoid(x)`."""
    node = view.maker(name)
    if node is None:
        return None
    if node.op_type in ("Gelu", "Relu", "Sigmoid", "Tanh"):
        return str(node.input[0])
    if node.op_type == "Mul":
        for x, inner in (node.input, reversed(node.input)):
            if _activated(view, inner) == x:
                return str(x)
    return None
