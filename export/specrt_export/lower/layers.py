"""The attention layers of a portable graph, taken apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from specrt_export.lower.view import GraphView


@dataclass(frozen=True)
class Layer:
    """One attention layer over the KV buffers of the contract.

    ```
    k ─ TensorScatter(key.i) ───┐
    v ─ TensorScatter(value.i) ─┼─ Attention(mask)
    q ──────────────────────────┘
    ```
    """

    node: onnx.NodeProto
    key_update: onnx.NodeProto
    value_update: onnx.NodeProto
    index: int


def find_layers(view: GraphView) -> list[Layer]:
    """Return the attention layers whose keys and values lie in the buffers of the contract."""
    return [layer for node in view.nodes("Attention") if (layer := _take_apart(view, node))]


def _take_apart(view: GraphView, node: onnx.NodeProto) -> Layer | None:
    key, value = (view.maker(name, "TensorScatter") for name in node.input[1:3])
    if key is None or value is None or len(node.input) < 4:
        return None
    slot, _, index = key.input[0].partition(".")
    if slot != "key" or value.input[0] != f"value.{index}":
        return None
    return Layer(node, key, value, int(index))


def fold_query_scale(view: GraphView) -> None:
    """Move a factor of the queries into the scale of their attention.

    ```
    x ─ Mul c ─ Reshape ─ Transpose ─ Attention(scale s)  =>  x ─ ... ─ Attention(scale c · s)
    ```
    """
    for node in view.nodes("Attention"):
        transpose = view.maker(node.input[0], "Transpose")
        reshape = transpose and view.maker(transpose.input[0], "Reshape")
        product = reshape and view.maker(reshape.input[0], "Mul")
        if not product or not reshape or len(view.readers(product.output[0])) > 1:
            continue
        for x, factor in (product.input, reversed(product.input)):
            by = view.scalar(factor)
            stated = next((a for a in node.attribute if a.name == "scale"), None)
            if by is not None and by > 0 and stated is not None:
                stated.f *= by
                view.replace(product.output[0], x)
                break
    view.tidy()


def positions(view: GraphView) -> str:
    """Return the positions [B, S] of the tokens, adding them to the graph once.

    ```
    input_ids ─ Shape ─ Range ─┐
    start ────────── Unsqueeze ─ Add ─ positions
    ```
    """
    name = "specrt.positions"
    if view.maker(name) is None:
        zero, one = (view.add_constant(str(i), np.array(i, np.int64)) for i in (0, 1))
        axis = view.add_constant("axis", np.array([1], np.int64))
        width = view.add("Squeeze", [view.add("Shape", ["input_ids"], start=1, end=2)])
        steps = view.add("Range", [zero, width, one])
        view.add("Add", [view.add("Unsqueeze", ["start", axis]), steps], outputs=[name])
    return name
