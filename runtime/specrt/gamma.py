"""How far to draft: the protocol, and the policy that always drafts equally far."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from specrt.round import Round


class Weight(Enum):
    """What a policy says of a token that was just drafted."""

    DROP = "drop"
    """Leave this token out, and stop."""
    LAST = "last"
    """Keep this token, and stop."""
    MORE = "more"
    """Keep this token, and draft another."""


class GammaPolicy(Protocol):
    """Decides how many tokens a round drafts, from what rounds before it came to."""

    def choose(self) -> int:
        """Return the most tokens to draft in the coming round; 0 is a plain step."""

    def weigh(self, drafted: int, confidence: float) -> Weight:
        """Say what becomes of the token just drafted.

        `drafted` is its place in the draft, from 1; `confidence` is its drafter's, in (0, 1],
        and 1.0 for every token where the drafter has none to give.
        """

    def observe(self, round_: Round) -> None:
        """Learn from a round: its own, or one in which nothing was drafted."""


class FixedGamma:
    """Drafts the same number of tokens every round."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self) -> int:
        """Return the fixed gamma."""
        return self._gamma

    def weigh(self, drafted: int, confidence: float) -> Weight:
        """Keep every token."""
        return Weight.MORE

    def observe(self, round_: Round) -> None:
        """Learn nothing."""
