"""The fixed sizes of a decoder, and what each of its layers remembers of a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.records import Count, Interval, read

ATTENTION, SHARED, CONV, LENT, RECURRENT = KINDS = (
    "attention", "shared", "conv", "lent", "recurrent",
)  # fmt: skip
"""What layers remember by: keys and values; another layer's; past inputs of a convolution; in a
head, keys and values of a layer of its target; a state that each token changes."""
STATE, FACTORS = "state", "factors"
"""What a recurrent layer keeps: its state, and the factors of what later tokens add to it."""
BASE, NEXT_BASE = "base", "next_base"
"""The inputs [B] that say up to which position the states of a row hold its text, and up to which
they do after a pass."""
TAKEN_BACK = 32
"""Latest positions of a row that are not part of its states yet, at most: what a round writes."""

LAG = TAKEN_BACK // 2
"""Latest positions that are not part of a draft's states, at least: it takes back what several
passes wrote, and a target what one did."""


def is_ring(name: str) -> bool:
    """Tell whether a buffer of the portable graph is a ring: position p lies at p mod its length.

    Others hold every position of a row, or are a state.
    """
    return name.startswith((f"{CONV}.", f"{FACTORS}."))


EXACT = STATE, FACTORS
"""Buffers that are fp32, whatever an engine computes in."""


def is_exact(name: str) -> bool:
    """Tell whether a buffer is one of `EXACT`."""
    return name.partition(".")[0] in EXACT


def moves(name: str) -> bool:
    """Tell whether a buffer, next to states, is read whole and written whole without rings."""
    return is_ring(name) or is_exact(name)


GROUP = 16
"""Positions that the CPU kernels keep together: a ring has whole groups."""


def whole_groups(positions: int) -> int:
    """Return how many positions the groups have in which so many lie."""
    return -(-positions // GROUP) * GROUP


Size = Annotated[int, Interval(0, 10**9)]
"""Of something that may be missing."""


class Buffer(NamedTuple):
    """One tensor of a layer's memory, [batch, heads, positions, width]."""

    heads: int
    width: int
    seen: int
    """How many of the latest positions a token reads, its own included; 0 for all."""
    fixed: int = 0
    """Of a state: the width of its keys, in the place of positions."""
    ring: int = 0
    """How many positions a ring has, where it does not go by what is seen and the widest pass."""

    def positions(self, max_length: int, ring_width: int = 0) -> int:
        """Return how many positions it has: all, or fewer in a ring.

        Position p lies at p mod so many. `ring_width` is the widest pass, which writes before it
        reads; 0 where an engine keeps no rings. What a rejected token was written over, no token
        that comes after the rejection sees: it lies `ring_width` further back.
        """
        if self.fixed:
            return self.fixed
        if not (self.seen and ring_width):
            return max_length
        if self.ring:
            return self.ring
        return min(max_length, whole_groups(self.seen + ring_width))


@dataclass(frozen=True)
class LayerMemory:
    """One thing that a layer keeps of a row from one pass to the next.

    Sizes that a kind does not have are 0.
    """

    kind: str
    """One of `KINDS`."""
    kv_heads: Size = 0
    """Of attention: heads of keys and values; a group of query heads reads each. Of a recurrent
    layer: heads of its state."""
    key_width: Size = 0
    """Numbers of a key, and of a query; or of an input of a convolution."""
    value_width: Size = 0
    window: Size = 0
    """Of attention: how many of the latest keys a query sees, its own included; 0 for all. Of a
    convolution: its taps."""
    owner: Size = 0
    """Of a shared memory: the earlier one whose keys and values its layer reads; of lent ones, the
    target's."""
    key_heads: Size = 0
    """Of a recurrent layer: heads of keys; a group of heads of the state shares each."""

    @property
    def inputs(self) -> dict[str, Buffer]:
        """The tensors that it reads and no earlier layer does, by the first part of their names."""
        if self.kind == CONV:
            return {CONV: Buffer(1, self.key_width, self.window)}
        if self.kind == SHARED:
            return {}
        if self.kind == RECURRENT:
            added = self.kv_heads + self.key_heads * self.key_width
            added += self.kv_heads * self.value_width
            state = Buffer(self.kv_heads, self.value_width, 0, self.key_width)
            return {STATE: state, FACTORS: Buffer(1, added, TAKEN_BACK, ring=TAKEN_BACK)}
        return {
            "key": Buffer(self.kv_heads, self.key_width, self.window),
            "value": Buffer(self.kv_heads, self.value_width, self.window),
        }

    @property
    def seen(self) -> int:
        """How many of the latest keys a query sees; 0 for all.

        One that has no key of its own sees as many before the last one as `window` says.
        """
        return self.window + (self.kind == LENT) if self.window else 0


@dataclass(frozen=True)
class Geometry:
    """The fixed sizes of one decoder."""

    heads: Size
    """Query heads of a layer that attends; 0 where none does."""
    vocab_size: Count
    max_positions: Count
    """Positions the model was trained for; no engine is built longer."""
    layers: Count
    memories: tuple[LayerMemory, ...]
    """What the layers remember, in their order; one may have several memories, or none."""

    @classmethod
    def uniform(
        cls, layers: int, heads: int, kv_heads: int, head_dim: int, vocab_size: int,
        max_positions: int, windows: Sequence[int] = (),
    ) -> Geometry:  # fmt: skip
        """Return the geometry of attention layers that differ by their windows at most."""
        one = LayerMemory(ATTENTION, kv_heads, head_dim, head_dim)
        memories = tuple(replace(one, window=window) for window in windows or (0,) * layers)
        return cls(heads, vocab_size, max_positions, len(memories), memories)

    @cached_property
    def inputs(self) -> dict[str, Buffer]:
        """The tensors that passes read, in the order of the graph contract, by names as `key.0`."""
        return {
            f"{kind}.{index}": self._next_to_states(buffer) if kind == CONV else buffer
            for index, memory in enumerate(self.memories)
            for kind, buffer in memory.inputs.items()
        }

    def _next_to_states(self, conv: Buffer) -> Buffer:
        """Return past inputs of a convolution, of which a state next to it needs no whole pass.

        A row goes back by as much as its states do, and then sees what lies before.
        """
        return conv._replace(ring=whole_groups(conv.seen - 1 + TAKEN_BACK)) if self.recurs else conv

    @cached_property
    def buffers(self) -> dict[str, Buffer]:
        """The inputs that passes write, too: its own."""
        return {name: one for name, one in self.inputs.items() if name not in self.lent}

    @cached_property
    def lent(self) -> dict[str, str]:
        """The inputs that are a target's, which passes only read, and their names there."""
        return {
            f"{kind}.{index}": f"{kind}.{memory.owner}"
            for index, memory in enumerate(self.memories)
            if memory.kind == LENT
            for kind in memory.inputs
        }

    def lends(self, lent: LayerMemory) -> bool:
        """Tell whether it has the keys and values that a head reads."""
        own = self.memories[lent.owner : lent.owner + 1]
        return own == (replace(lent, kind=ATTENTION, owner=0),)

    @property
    def in_place(self) -> list[str]:
        """Its own buffers that passes write in part, where there are no rings."""
        return [name for name in self.buffers if not (self.recurs and moves(name))]

    @property
    def recurs(self) -> bool:
        """Whether a layer has a state, which holds what lies before a `base` of each row."""
        return any(one.kind == RECURRENT for one in self.memories)

    @property
    def bases(self) -> tuple[str, ...]:
        """The inputs of an engine's graph that say how far states hold a row, where there are."""
        return (BASE, NEXT_BASE) if self.recurs else ()

    def attention(self, own: LayerMemory) -> LayerMemory:
        """Return the keys and values of a memory: its own, or those it shares."""
        return self.memories[own.owner] if own.kind == SHARED else own

    @property
    def windows(self) -> set[int]:
        """The windows of its attention; 0 is none."""
        return {one.window for one in self.memories if one.kind == ATTENTION}

    def positions(self, name: str, max_length: int, ring_width: int = 0) -> int:
        """Return how many positions a buffer has; see `Buffer.positions`.

        Without rings it has all, but next to states: a window there moves on with them. It begins
        at their base, or as far before it as a convolution sees.
        """
        one = self.inputs[name]
        if self.recurs and is_ring(name) and not ring_width:
            return min(one.ring, TAKEN_BACK + one.seen - 1)
        return one.positions(max_length, ring_width)

    def shapes(self, batch: int, max_length: int) -> dict[str, tuple[int, int, int, int]]:
        """Return the shapes of its own buffers, and of those that it reads, without rings."""
        return {
            name: (batch, one.heads, self.positions(name, max_length), one.width)
            for name, one in self.inputs.items()
        }

    def kv_bytes(self, batch: int, max_length: int, item_bytes: int, ring_width: int = 0) -> int:
        """Return the bytes that the memories of all layers take; states are fp32."""
        return batch * sum(
            one.heads * one.width * self.positions(name, max_length, ring_width)
            * (4 if is_exact(name) else item_bytes)
            for name, one in self.buffers.items()
        )  # fmt: skip

    def filled(
        self, batch: int, positions: int, number: float = 0
    ) -> dict[str, NDArray[np.float32]]:
        """Return arrays of all inputs as the portable graph has them, filled with a number.

        Shapes: [batch, heads, positions, width] f32 each.
        """
        return {
            name: np.full((batch, one.heads, one.fixed or positions, one.width), number, np.float32)
            for name, one in self.inputs.items()
        }

    def problems(self) -> Iterator[str]:
        """Yield what does not fit together, beginning with the field that is wrong."""
        if not self.memories:
            yield "memories is empty; expected one for each layer"
        for index, own in enumerate(self.memories):
            name = f"memories[{index}]"
            if own.kind not in KINDS:
                yield f"{name}.kind is {own.kind!r}; expected {', '.join(KINDS)}, or a newer specrt"
            elif own.kind == SHARED and not (
                own.owner < index and self.memories[own.owner].kind in (ATTENTION, LENT)
            ):
                yield f"{name}.owner is {own.owner}; expected an earlier one that attends"
            elif own.kind in (ATTENTION, LENT) and (own.kv_heads == 0 or self.heads % own.kv_heads):
                expected = f"expected a divisor of heads, {self.heads}"
                yield f"{name}.kv_heads is {own.kv_heads}; {expected}"
            elif own.kind == RECURRENT and (
                own.key_heads == 0 or own.kv_heads == 0 or own.kv_heads % own.key_heads
            ):
                expected = f"expected a divisor of kv_heads, {own.kv_heads}"
                yield f"{name}.key_heads is {own.key_heads}; {expected}"
            elif own.kind == CONV and own.window == 0:
                yield f"{name}.window is 0; expected the taps of a convolution"
        for name, one in self.inputs.items():
            if one.width == 0:
                yield f"memories: {name} has no width; expected 1 or more"

    @staticmethod
    def current(written: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        """Return a record in the present form; see `records.read`.

        Engines of the earlier form keep every position, of whatever windows: here they have none.
        """
        if "head_dim" not in written:
            memories = written.get("memories")
            if "layers" in written or not isinstance(memories, list):
                return written
            return {**written, "layers": len(memories)}  # one each, before there were others
        old = read(_OneShape, written, name)
        if len(old.windows) != old.layers:
            raise ValueError(
                f"{name}.windows has {len(old.windows)} entries; expected one for each of "
                f"{old.layers} layers"
            )
        one = {"kind": ATTENTION, "kv_heads": old.kv_heads}
        one |= {"key_width": old.head_dim, "value_width": old.head_dim}
        return {
            "heads": old.heads,
            "vocab_size": old.vocab_size,
            "max_positions": old.max_positions,
            "layers": old.layers,
            "memories": [one] * old.layers,
        }


@dataclass(frozen=True)
class _OneShape:
    """How a geometry was written while all layers had keys and values of one shape."""

    layers: Annotated[int, Interval(1, 10**4)]
    heads: Count
    kv_heads: Count
    head_dim: Count
    vocab_size: Count
    max_positions: Count
    windows: tuple[int, ...]
