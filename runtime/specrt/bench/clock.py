"""An engine that tells how long its passes took."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

from numpy.typing import ArrayLike

from specrt.engine import Engine, Output


class Busy(NamedTuple):
    """Time spent inside forward passes, and how many there were."""

    ns: int = 0
    passes: int = 0

    def since(self, before: Busy) -> Busy:
        """Return what came after an earlier reading."""
        return Busy(self.ns - before.ns, self.passes - before.passes)


class TimedEngine:
    """An engine that adds up the time spent inside its forward passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._forward = engine.forward
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self._ns = 0
        self._passes = 0

    @property
    def busy(self) -> Busy:
        """All passes so far."""
        return Busy(self._ns, self._passes)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        output = self._forward(tokens, start, rows)
        self._ns += perf_counter_ns() - began
        self._passes += 1
        return output

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
