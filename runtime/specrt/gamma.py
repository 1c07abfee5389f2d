"""How far to draft: the protocol, and the policy that always drafts equally far."""

from __future__ import annotations

from collections.abc import Collection
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


class BuiltGamma:
    """Keeps another policy to the gammas that verify passes were built for.

    Where it would stop between two of them the draft goes on to the next one.
    """

    def __init__(self, policy: GammaPolicy, gammas: Collection[int]) -> None:
        self._policy = policy
        self._gammas = gammas

    def choose(self) -> int:
        """Return the smallest gamma that was built and reaches as far."""
        most = self._policy.choose()
        return min((g for g in self._gammas if g >= most), default=max(self._gammas))

    def weigh(self, drafted: int, confidence: float) -> Weight:
        """Stop where the other policy does, if that is at a gamma that was built."""
        weight = self._policy.weigh(drafted, confidence)
        kept = drafted - (weight is Weight.DROP)
        return weight if kept in self._gammas else Weight.MORE

    def observe(self, round_: Round) -> None:
        """Let the other policy learn."""
        self._policy.observe(round_)


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
