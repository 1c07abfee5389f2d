"""The checks of engines over plans in NumPy, so that they themselves are seen to work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpucheck import checks, inside
from gpucheck.bandwidth import copy_rate
from gpucheck.codelet import every
from gpucheck.passes import Ids, Scores
from gpucheck.place import ROOT
from gpucheck.step import CheckError, Facts
from gpucheck.timing import device_passes, device_rounds, host_passes, summary

TOLERANCE = 1e-5
GAMMAS = (1, 2, 3, 4, 8)
LENGTH, VOCABULARY = 128, 29


class TableReference:
    """A table of scores as what engines are held to."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._seen = np.zeros((1, 0), np.int64)

    def reset(self, batch: int, length: int) -> None:
        """Start over."""
        self._seen = np.full((batch, length), -1, np.int64)

    def __call__(
        self, tokens: Ids, start: Sequence[int], rows: Sequence[int]
    ) -> tuple[Scores, Ids]:
        """Feed tokens; return logits and argmax of the rows asked for."""
        at = start[0]
        self._seen[0, at : at + tokens.shape[1]] = tokens[0]
        found = [self._table.row(self._seen[0, : at + row + 1]) for row in rows]
        logits = np.array([found], np.float32)
        return logits, logits.argmax(-1)


class Stage:
    """One device in NumPy, and what opens engines on it."""

    def __init__(self) -> None:
        tests = str(ROOT / "tests")
        if tests not in sys.path:
            sys.path.insert(0, tests)
        from runtime import numpy_device, tensorrt_double, toy

        self._doubles = tensorrt_double
        self.table = toy.TableEngine(vocab=VOCABULARY, max_length=LENGTH)
        self.other = toy.near(self.table, 1, 0.7)
        self.device: Any = numpy_device.NumpyDevice(1 << 24)

    def target(self, capture: bool = True, **options: Any) -> Any:
        """Open a target."""
        return self._doubles.opened(self.device, self.table, capture=capture, **options)

    def draft(self, **options: Any) -> Any:
        """Open a draft."""
        profiles = self._doubles.draft_profiles(self._doubles.PREFILL)
        return self._doubles.opened(self.device, self.other, profiles, confidence=True, **options)

    def free(self) -> int:
        """Return the bytes that nobody took; staged memory goes with the device."""
        taken = [size for size, purpose in self.device.blocks.values() if purpose != "staging"]
        return -int(sum(taken))


def closing(engine: Any, check: Callable[[Any], Facts]) -> Facts:
    """Run a check and close the engine."""
    try:
        return check(engine)
    finally:
        engine.close()


def rehearse(stage: Stage | None = None) -> Facts:
    """Run every check of engines over plans in NumPy.

    Raises: CheckError where one fails, or where memory was not given back at the end.
    """
    stage = stage or Stage()
    held = TableReference(stage.table)

    def rounds() -> Facts:
        draft = stage.draft()
        return closing(
            stage.target(), lambda t: closing(draft, lambda d: inside.rounds(t, d, GAMMAS))
        )

    def forms() -> Facts:
        other = stage.target(form="decomposed")
        return closing(
            stage.target(), lambda n: closing(other, lambda d: inside.forms(n, d, TOLERANCE))
        )

    found = every(
        {
            "logits": lambda: closing(stage.target(), lambda e: checks.logits(e, held, TOLERANCE)),
            "rollback": lambda: checks.rollback(stage.target),
            "replays": lambda: checks.replays(stage.target),
            "limit": lambda: closing(stage.target(), lambda e: checks.limit(e, held, TOLERANCE)),
            "aliasing": lambda: closing(stage.target(), inside.aliasing),
            "memory": lambda: checks.memory(stage.target, stage.free, 0),
            "rounds": rounds,
            "forms": forms,
            "timing": lambda: timing(stage),
        }
    )
    if stage.device.live:
        raise CheckError(f"not given back: {stage.device.live}", found)
    return found


def timing(stage: Stage) -> Facts:
    """Run what times things; the figures themselves say nothing here."""
    from specrt.engine.tensorrt.fused_round import CapturedRounds

    target, draft = stage.target(), stage.draft()
    whole = CapturedRounds(target, draft)
    try:
        widths = [1, *(gamma + 1 for gamma in GAMMAS)]
        return {
            "host": list(summary(host_passes(target, widths, 0, 1))),
            "device": list(summary(device_passes(target, widths, 0, 1))),
            "rounds": list(summary(device_rounds(whole, GAMMAS, 0, 1))),
            "copies": copy_rate(stage.device, 1 << 12)["laps"],
        }
    finally:
        target.close()
        draft.close()
