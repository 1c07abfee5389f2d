"""Attention for a batch of rows: read the filled part of the KV buffers, not all of them."""

from __future__ import annotations

import numpy as np
import onnx

from specrt.geometry import Geometry
from specrt_export.lower.layers import Layer, find_layers, positions
from specrt_export.lower.linear import MICROSOFT
from specrt_export.lower.rotary import Rotations, match_rotary
from specrt_export.lower.view import GraphView


def bound_attention(view: GraphView, geometry: Geometry, max_length: int) -> tuple[int, int]:
    """Let attention read the buffers up to the longest row; return how many layers do and rotate.

    ```
    k ─ rotate ─ TensorScatter(key.i) ─ present ─┐
                                              Attention(mask [B, 1, S, M])

      =>  k ─ RotaryEmbedding ─ TensorScatter(key.i) ─ present ─ Slice(0 .. E) ─┐
                                                            Attention(mask [B, 1, S, E])
          with E = max(start) + S
    ```
    The rotation is one node; the update stays in place over the whole buffer.
    GroupQueryAttention, which does all of this itself, refuses rows of several tokens with a past.
    """
    layers = find_layers(view)
    rotations = Rotations(view, max_length)
    rotated = sum(_rotate(view, layer, geometry, rotations) for layer in layers)
    view.tidy()
    # Found again: rotating has made new nodes of the old ones' inputs.
    layers = find_layers(view)
    if not layers or not _bound_masks(view, layers):
        return 0, rotated
    extent, begin, axis = _extent(view), _constant(view, 0), _constant(view, 2)
    for layer in layers:
        for index, name in enumerate(layer.node.input[1:3], start=1):
            layer.node.input[index] = view.add("Slice", [name, begin, extent, axis])
    view.tidy()
    return len(layers), rotated


def _rotate(view: GraphView, layer: Layer, geometry: Geometry, rotations: Rotations) -> bool:
    """Rotate queries and keys in a node each; return whether their rotation was recognised."""
    places = [(layer.node, 0, geometry.heads), (layer.key_update, 1, geometry.kv_heads)]
    found = [match_rotary(view, node.input[index]) for node, index, _ in places]
    for (node, index, heads), rotary in zip(places, found, strict=True):
        tables = rotations.tables(rotary) if rotary else None
        if rotary is None or tables is None:
            return False
        cos, sin, width = tables
        view.require_domain(MICROSOFT, 1)
        node.input[index] = view.add(
            "RotaryEmbedding",
            [rotary.x, positions(view), cos, sin],
            domain=MICROSOFT,
            num_heads=heads,
            rotary_embedding_dim=0 if width == geometry.head_dim else width,
        )
    return True


def _bound_masks(view: GraphView, layers: list[Layer]) -> bool:
    """Make the masks as long as the filled part; return False where that cannot be told.

    Their length is that of a KV buffer, and nothing else may be made from it.
    """
    masks = {layer.node.input[3] for layer in layers}
    caches = {update.input[0] for one in layers for update in (one.key_update, one.value_update)}
    lengths = [
        node
        for node in view.nodes("Shape")
        if node.input[0] in caches and view.attributes(node) == {"start": 2, "end": 3}
    ]
    if not lengths or any(not _leads_to(view, node, masks) for node in lengths):
        return False
    if any(not view.depends_on(mask, [n.output[0] for n in lengths]) for mask in masks):
        return False
    extent = _extent(view)
    for node in lengths:
        view.replace(node.output[0], extent)
    return True


def _leads_to(view: GraphView, node: onnx.NodeProto, masks: set[str]) -> bool:
    """Tell whether everything that is made from a value goes into masks."""
    stack = list(node.output)
    while stack:
        value = stack.pop()
        if value in masks:
            continue
        readers = view.readers(value)
        if not readers:
            return False
        stack.extend(output for reader in readers for output in reader.output)
    return True


def _extent(view: GraphView) -> str:
    """Return the number of positions that the longest row fills, adding it to the graph once.

    ```
    start ───── ReduceMax ─┐
    input_ids ────── Shape ─ Add ─ extent [1]
    ```
    """
    name = "specrt.extent"
    if view.maker(name) is None:
        longest = view.add("ReduceMax", ["start"], keepdims=1)
        width = view.add("Shape", ["input_ids"], start=1, end=2)
        view.add("Add", [longest, width], outputs=[name])
    return name


def _constant(view: GraphView, value: int) -> str:
    return view.add_constant("bound", np.array([value], np.int64))
