"""What a mask adds to scores by how far a key lies before its query, found by computing it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.lower.evaluation import evaluate
from specrt_export.lower.view import GraphView

_HIDDEN = float(np.finfo(np.float32).min) / 2
"""What is below this in a mask stands for minus infinity."""

_CHECKED = 48
"""Queries whose whole masks are held to the table; buckets of T5 are single distances up to 16."""


def bias_by_distance(
    view: GraphView, mask: str, geometry: Geometry, window: int, length: int
) -> NDArray[np.float32] | None:
    """Return what a layer's mask [B, H, S, M] adds for each distance, or None where it adds 0.

    The last column is that of all greater distances. `window` is how many latest keys are seen, 0
    for all.
    Shapes: returns [heads, R] f32.
    Raises: BuildError for a mask that hides other keys, or whose bias is not one of distances.
    """
    farthest = _mask(view, mask, geometry, length, length - 1, 1)[:, 0, ::-1]
    seen = min(window or length, length)
    table = farthest[:, :seen]
    for start in sorted({0, min(length - 1, window), length // 2}):
        width = min(_CHECKED, length - start)
        found = _mask(view, mask, geometry, length, start, width)
        query, key = start + np.arange(width)[:, None], np.arange(length)[None]
        distance = query - key
        is_seen = (distance >= 0) & (distance < seen)
        expected = table[:, np.clip(distance, 0, seen - 1)]
        if (found[:, is_seen] != expected[:, is_seen]).any() or (
            found[:, ~is_seen] > _HIDDEN
        ).any():
            raise BuildError(
                "this model adds to its attention what is not the same for all keys as far before "
                "their queries, which the CPU kernels do not know. Please report the architecture"
            )
    if not table.any():
        return None
    differs = np.flatnonzero((table[:, :-1] != table[:, -1:]).any(0))
    reach = int(differs[-1]) + 2 if differs.size else 1
    heads = np.broadcast_to(table[:, :reach], (geometry.heads, reach))
    return np.ascontiguousarray(heads, np.float32)


def _mask(
    view: GraphView, mask: str, geometry: Geometry, length: int, start: int, width: int
) -> NDArray[np.float32]:
    """Return the mask [H, S, M] of some tokens of one row."""
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.zeros((1, width), np.int64), "start": np.array([start], np.int64),
        **geometry.filled(1, length),
    }  # fmt: skip
    (found,) = evaluate(view, [mask], feeds)
    whole: NDArray[np.float32] = np.broadcast_to(found[0], (found.shape[1], width, length))
    return whole
