"""Where each old index of an axis stays when the axis grows.

hidden    0 .. old          inert columns behind
units     0 .. old          intermediate units behind
heads     old query heads keep their kv head; where groups became smaller, a kv head is copied

    old, 3 queries per kv head    q0 q1 q2 | q3 q4 q5
                                  kv0        kv1
    new, 2 queries per kv head    q0 q1 | q2 ..  | q3 q4 | q5 ..  | .. .. |
                                  kv0     kv0      kv1     kv1      ..

rotary    dimension i of the old head turns by theta^(-2i/d); in a head m times as wide the
          same angle is that of dimension m*i, its partner half a head further
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from growth.shape import Shape, kv_copies

Indices = NDArray[np.int64]
NOWHERE: Indices = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Axis:
    """A grown axis: `size` entries, of which `place[i]` holds the old entry `source[i]`."""

    size: int
    place: Indices = field(default_factory=lambda: NOWHERE)
    source: Indices = field(default_factory=lambda: NOWHERE)
    blank: Indices = field(default_factory=lambda: NOWHERE)
    """New entries that have to be zero."""

    @property
    def old(self) -> int:
        """How long the axis was."""
        return int(self.source.max(initial=-1)) + 1

    def emptied(self) -> Axis:
        """Return the axis of a layer that the old model did not have."""
        return Axis(self.size)


def grown_axes(old: Shape, new: Shape, sizes: Mapping[str, int]) -> Mapping[str, Axis]:
    """Return each axis of the weights by name; `sizes` are those that stay as they are."""
    queries, keys = old_query_heads(old, new), old_kv_heads(old, new)
    turning, plain = rotary_places(old, new), np.arange(old.head_dim)
    return {
        **{name: _front(size, size) for name, size in sizes.items()},
        "hidden": _front(old.hidden_size, new.hidden_size),
        "units": _front(old.intermediate_size, new.intermediate_size),
        "queries": _heads(queries, new.heads, turning, new.head_dim, silent=True),
        "keys": _heads(keys, new.kv_heads, turning, new.head_dim),
        "values": _heads(keys, new.kv_heads, plain, new.head_dim),
        "attended": _heads(queries, new.heads, plain, new.head_dim),
        "biases": _heads(queries, new.heads, np.arange(1), 1),
    }


def old_query_heads(old: Shape, new: Shape) -> list[tuple[int, int]]:
    """Return (new head, old head) for every old query head."""
    copies, group = kv_copies(old, new), new.group
    pairs = []
    for head in range(old.heads):
        kv, rank = divmod(head, old.group)
        pairs.append(((kv * copies + rank // group) * group + rank % group, head))
    return pairs


def old_kv_heads(old: Shape, new: Shape) -> list[tuple[int, int]]:
    """Return (new kv head, old kv head) for every copy of every old kv head."""
    copies = kv_copies(old, new)
    return [(kv * copies + n, kv) for kv in range(old.kv_heads) for n in range(copies)]


def rotary_places(old: Shape, new: Shape) -> Indices:
    """Return where in a wider head each dimension finds the angle it turned by."""
    times, half = new.head_dim // old.head_dim, np.arange(old.head_dim // 2)
    return np.concatenate([half * times, half * times + new.head_dim // 2])


def _front(old: int, new: int) -> Axis:
    kept = np.arange(old)
    return Axis(new, kept, kept)


def _heads(
    pairs: list[tuple[int, int]], heads: int, inside: Indices, width: int, silent: bool = False
) -> Axis:
    """Spread heads over a joined axis.

    A silent axis is zero in the dimensions that an old head did not have, so that they add
    nothing to its scores whatever the keys hold there.
    """
    new, old = np.array(pairs).T[:, :, None]
    dims = np.arange(len(inside))
    place = (new * width + inside).ravel()
    blank = np.setdiff1d((new * width + np.arange(width)).ravel(), place) if silent else NOWHERE
    return Axis(heads * width, place, (old * len(dims) + dims).ravel(), blank)
