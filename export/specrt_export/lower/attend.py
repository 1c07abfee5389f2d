"""Attention and cache updates written out, for what TensorRT has no layer for."""

from __future__ import annotations

import numpy as np

from specrt.geometry import Geometry
from specrt_export.lower.layers import Layer, find_layers, positions
from specrt_export.lower.view import GraphView


def write_out(view: GraphView, geometry: Geometry, *, everything: bool) -> set[str]:
    """Write attention out in products and a softmax; return a value a layer, to be kept in fp32.

    ```
    q [B, H, S, D] · scale ─ Reshape [B, Hkv, G · S, D] ─┐
    keys ─ Transpose ─────────────────────────────────── MatMul ─ (cap · tanh(· / cap)) ─┐
    mask [B, 1, S, M] ───────────────────────────────────────── Add [B, H, S, M] ────────┘
                                                                 └─ Softmax ─ MatMul values ─ y
    ```
    Queries of one group are rows of one product, so that keys and values are not repeated.
    All layers where TensorRT is too old for attention; else only those with a soft cap, which its
    attention layer refuses. The masked scores are what is kept: in half precision they would be
    rounded a second time.
    """
    layers = find_layers(view)
    chosen = [at for at in layers if everything or view.attributes(at.node).get("softcap", 0.0)]
    masked = {_write_layer(view, layer, geometry) for layer in chosen}
    view.tidy()
    return masked


def _write_layer(view: GraphView, layer: Layer, geometry: Geometry) -> str:
    """Write one layer out; return its masked scores."""
    said = view.attributes(layer.node)
    scale = said.get("scale", geometry.head_dim**-0.5)
    query, keys, values, mask = layer.node.input[:4]
    # Scaled before the product, which then stays far from the ends of half precision.
    factor = view.add_constant("scale", np.array(scale, np.float32))
    rows = _reshaped(view, view.add("Mul", [query, factor]), geometry.kv_heads, geometry.head_dim)
    turned = view.add("Transpose", [keys], perm=[0, 1, 3, 2])
    length = _length(view, layer)
    scores = view.add("MatMul", [rows, turned])
    scores = _capped(view, scores, said.get("softcap", 0.0))
    masked = view.add("Add", [_reshaped(view, scores, geometry.heads, length), mask])
    shares = view.add("Softmax", [masked], axis=-1)
    grouped = _reshaped(view, shares, geometry.kv_heads, length)
    found = view.add("MatMul", [grouped, values])
    shape = view.add_constant("heads", _shape(geometry.heads, geometry.head_dim))
    view.add("Reshape", [found, shape], outputs=[layer.node.output[0]])
    return masked


def _capped(view: GraphView, scores: str, cap: float) -> str:
    if not cap:
        return scores
    most = view.add_constant("cap", np.array(cap, np.float32))
    return view.add("Mul", [view.add("Tanh", [view.add("Div", [scores, most])]), most])


def _reshaped(view: GraphView, name: str, heads: int, last: int) -> str:
    return view.add("Reshape", [name, view.add_constant("heads", _shape(heads, last))])


def _shape(heads: int, last: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return [B, heads, -1, last], B being whatever it was."""
    return np.array([0, heads, -1, last], np.int64)


def _length(view: GraphView, layer: Layer) -> int:
    """Return M, which lowering has fixed."""
    cache = next(i for i in view.graph.input if i.name == layer.key_update.input[0])
    return int(cache.type.tensor_type.shape.dim[2].dim_value)


def scatter_elements(view: GraphView) -> int:
    """Write new keys and values by their positions; return how many buffers.

    ```
    key.i, k, start ─ TensorScatter ─ present_key.i

      =>  positions ─ Unsqueeze [B, 1, S, 1] ─ Expand like k ─┐
          key.i, k ───────────────────────────────── ScatterElements ─ present_key.i
    ```
    The result is a new buffer: TensorRT before 10.15 updates none in place.
    """
    updates = view.nodes("TensorScatter")
    axes = view.add_constant("axes", np.array([1, 3], np.int64))
    place = view.add("Unsqueeze", [positions(view), axes]) if updates else ""
    for node in updates:
        cache, new = node.input[:2]
        at = view.add("Expand", [place, view.add("Shape", [new])])
        view.add("ScatterElements", [cache, at, new], outputs=[node.output[0]], axis=2)
    view.tidy()
    return len(updates)
