"""An engine that tells how long its passes took."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

from numpy.typing import ArrayLike

from specrt.engine import Engine, Feed, Output, PackedEngine
from specrt.whole import Drafted, WholeRounds


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
        self.add(perf_counter_ns() - began, 1)
        return output

    def add(self, ns: int, passes: int) -> None:
        """Count what ran elsewhere on this engine's behalf."""
        self._ns += ns
        self._passes += passes

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class TimedPacked(TimedEngine):
    """The same of an engine that packs rows."""

    def __init__(self, engine: PackedEngine) -> None:
        super().__init__(engine)
        self._forward_rows = engine.forward_rows
        self.copy_row = engine.copy_row

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        outputs = self._forward_rows(feeds)
        self.add(perf_counter_ns() - began, 1)
        return outputs


def timed(engine: Engine) -> TimedEngine:
    """Return an engine that tells how long its passes took."""
    return TimedPacked(engine) if isinstance(engine, PackedEngine) else TimedEngine(engine)


class TimedRounds:
    """Whole rounds whose time is the target's: nobody can tell the two models' apart."""

    def __init__(self, rounds: WholeRounds, target: TimedEngine) -> None:
        self._rounds = rounds
        self._target = target
        self.fits = rounds.fits

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Run one round and count its time; its pass is counted when its scores are asked for."""
        began = perf_counter_ns()
        drafted = self._rounds.run(pending, draft_start, last, target_start, gamma)
        self._target.add(perf_counter_ns() - began, 0)
        return drafted
