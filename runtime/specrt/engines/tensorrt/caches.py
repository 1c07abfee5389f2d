"""The KV buffers of one model, and how a context is bound to them."""

from __future__ import annotations

from math import prod

from specrt.engines.tensorrt.contract import KV_TYPES, NATIVE, cache_names
from specrt.engines.tensorrt.layout import aligned
from specrt.engines.tensorrt.memory import Memory
from specrt.engines.tensorrt.plan import ITEM_BYTES, Context
from specrt.engines.tensorrt.record import EngineRecord
from specrt.geometry import Geometry

PURPOSE = "KV buffers"


class Caches:
    """One set of KV buffers that every context updates in place, or two that swap after a pass.

    `parity` says which set the next pass reads; where there is one set it stays 0. Both sets are
    cleared, because attention may read what it then multiplies by 0.
    """

    def __init__(
        self, memory: Memory, record: EngineRecord, geometry: Geometry, batch: int, max_length: int
    ) -> None:
        shape = (batch, geometry.kv_heads, max_length, geometry.head_dim)
        each = aligned(prod(shape) * ITEM_BYTES[KV_TYPES[record.compute]])
        names = cache_names(geometry)
        self.sets = 1 if record.form == NATIVE else 2
        self.parity = 0
        at = memory.take(self.sets * each * len(names), PURPOSE)
        self._places = [
            {name: at + (s * len(names) + i) * each for i, name in enumerate(names)}
            for s in range(self.sets)
        ]

    def bind(self, context: Context, parity: int) -> None:
        """Let a context read one set and write the other, or the same where there is one."""
        written = self._places[(parity + 1) % self.sets]
        for name, place in self._places[parity].items():
            context.set_address(name, place)
            context.set_address(f"present_{name}", written[name])

    def swap(self) -> None:
        """Note that a pass has written the other set."""
        self.parity = (self.parity + 1) % self.sets
