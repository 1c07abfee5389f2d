"""Attention to a source: a decoder's layers that read cross keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.engine.ort.ort_engine import packed_shape
from specrt.errors import BuildError
from specrt_export.lower.attention import hand_over, pack_heads
from specrt_export.lower.canonical import CROSS_KEY, is_cross
from specrt_export.lower.evaluation import evaluate
from specrt_export.lower.projections import SPECRT
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView

CROSS_ATTENTION = "CrossAttention"
"""The kernels' operator."""

SLOTS, LENGTHS = "slots", "source_lengths"
"""Inputs: the row of the KV buffers that each token belongs to [T], and the length of the source of
each row [B]."""

_SAMPLE, _SEEN = 16, 5
"""Positions of a source that its mask is computed for, and how many of them it has."""


def fuse_cross_attention(view: GraphView) -> int:
    """Replace attention to a source by the kernels' operator; return how many layers.

    ```
    cross_key.i, cross_value.i, mask of source_length ─┐
    q ─ Reshape ─ Transpose ──────────────────── Attention ─ Transpose ─ Reshape ─ y

      =>  CrossAttention(q, cross_key.i, cross_value.i, slots, source_lengths) ─ y
    ```
    Raises: BuildError for a mask that does not hide what lies after a source.
    """
    shapes, masks = Shapes(view), set[str]()
    layers = [node for node in view.nodes("Attention") if _kind(node.input[1]) == CROSS_KEY]
    for node in layers:
        heads, size = _sizes(view, node.input[1])
        if len(node.input) > 3 and node.input[3] not in masks:
            _check_mask(view, node.input[3], heads, size)
            masks.add(node.input[3])
        attributes: dict[str, Any] = view.attributes(node)
        query = shapes.dims(node.input[0])
        own = query[1] if query is not None and isinstance(query[1], int) else heads
        joined = view.add(
            CROSS_ATTENTION,
            [pack_heads(view, shapes, node.input[0]), *node.input[1:3], SLOTS, LENGTHS],
            domain=SPECRT, num_heads=own, kv_num_heads=heads, head_size=size,
            scale=attributes.get("scale", size**-0.5), softcap=attributes.get("softcap", 0.0),
        )  # fmt: skip
        hand_over(view, shapes, own, node.output[0], joined)
    if layers:
        view.require_domain(SPECRT, 1)
        view.tidy()
    return len(layers)


def cross_shape(value: onnx.ValueInfoProto, batch: int, max_source: int) -> tuple[int, ...]:
    """Return the shape of cross keys or values as the kernels read them; empty of other values."""
    if not is_cross(value.name):
        return ()
    _, heads, _, width = (dim.dim_value for dim in value.type.tensor_type.shape.dim)
    return packed_shape(value.name, heads, width, batch, max_source)


def _kind(name: str) -> str:
    return name.partition(".")[0]


def _sizes(view: GraphView, name: str) -> tuple[int, int]:
    """Return the heads of an input's cross keys, and the size of each."""
    value = next(i for i in view.graph.input if i.name == name)
    dims = value.type.tensor_type.shape.dim
    return dims[1].dim_value, dims[3].dim_value


def _check_mask(view: GraphView, mask: str, heads: int, size: int) -> None:
    """Hold a mask to what the operator does: every token sees the whole source, and no more."""
    cross = np.zeros((1, heads, _SAMPLE, size), np.float32)
    names = [i.name for i in view.graph.input if is_cross(i.name)]
    feeds: dict[str, NDArray[Any]] = {
        "source_length": np.array([_SEEN], np.int64), "input_ids": np.zeros((1, 3), np.int64),
        "start": np.zeros(1, np.int64), **dict.fromkeys(names, cross),
    }  # fmt: skip
    (found,) = evaluate(view, [mask], feeds)
    hidden = np.broadcast_to(found, (*found.shape[:-1], _SAMPLE))
    if hidden[..., :_SEEN].any() or (hidden[..., _SEEN:] > np.finfo(np.float32).min / 2).any():
        raise BuildError(
            "this model's attention to its source is not to all of it, which the CPU kernels do "
            "not know. Please report the architecture"
        )
