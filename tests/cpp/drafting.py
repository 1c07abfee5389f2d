"""Calls of a policy among the gammas that were built, with what the Python runtime's does."""

from __future__ import annotations

import random
from collections.abc import Iterator

from cpp.native_calls import Case
from specrt.speculation.gamma import BuiltGamma, DraftDecision
from specrt.speculation.round import Round

DECISIONS = [DraftDecision.DISCARD, DraftDecision.STOP, DraftDecision.CONTINUE]


class _Cautious:
    """Drafts so far, and leaves out what follows too little."""

    def __init__(self, most: int, drop: float, last: float) -> None:
        self._most, self._drop, self._last = most, drop, last

    def choose(self) -> int:
        return self._most

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        if confidence < self._drop:
            return DraftDecision.DISCARD
        return DraftDecision.STOP if confidence < self._last else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None: ...


def built() -> Iterator[Case]:
    """Yield what becomes of a policy's wishes where few gammas were built."""
    draw = random.Random(5)
    for _ in range(400):
        gammas = [0, *sorted(draw.sample(range(1, 9), draw.randint(1, 4)))]
        wishes = {"most": draw.randint(0, 9), "drop": draw.choice((0.0, 0.1)), "last": 0.2}
        confidences = [draw.random() for _ in range(8)]
        policy = BuiltGamma(_Cautious(**wishes), gammas)  # type: ignore[arg-type]
        decisions = [policy.decide(place, sure) for place, sure in enumerate(confidences, 1)]
        call = {"call": "built", "gammas": gammas, "confidences": confidences, **wishes}
        yield call, [policy.choose(), *map(DECISIONS.index, decisions)]
