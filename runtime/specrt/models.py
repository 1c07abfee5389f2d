"""The engines of a bundle, and what the runtime has to know about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from specrt.speculation.costs import Costs
from specrt.engine import Engine
from specrt.whole import WholeRounds

DRAFTERS = ("model", "ngram", "cascade", "none")
AUTO: Literal["auto"] = "auto"
Gamma = int | Literal["auto"]
"""Tokens to draft each round, or `auto`: as many as pay, chosen round by round."""


@dataclass(frozen=True)
class Models:
    """The engines of a bundle, its defaults, and what a pass costs here."""

    target: Engine
    draft: Engine | None
    gammas: tuple[int, ...]
    """Every gamma a verify pass was built for, 0 included."""
    gamma: Gamma = AUTO
    """Used when none is asked for."""
    drafter: str = ""
    """Used when none is asked for; the draft model, or lookup without one, when empty."""
    measure: Callable[[Models], Costs] | None = None
    """Gives the costs on this machine; called once, when gamma is first left to be chosen."""
    absent: str | None = None
    """Why a draft that the bundle has was not opened."""
    rounds: WholeRounds | None = None
    """Runs greedy rounds in one launch, where one device has both engines."""

    def timed(self, target: Engine, draft: Engine | None, rounds: WholeRounds | None) -> Models:
        """Return the same with other engines in place, as a benchmark wraps them."""
        return replace(self, target=target, draft=draft, rounds=rounds)
