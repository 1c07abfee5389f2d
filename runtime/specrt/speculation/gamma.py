"""How far to draft: the protocol of gamma policies, and fixed gammas."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Protocol

from specrt.speculation.round import Round


class DraftDecision(Enum):
    """What a policy decides about the token just drafted."""

    DISCARD = "discard"
    """Leave this token out, and stop."""
    STOP = "stop"
    """Keep this token, and stop."""
    CONTINUE = "continue"
    """Keep this token, and draft another."""


class GammaPolicy(Protocol):
    """Decides how many tokens a round drafts, from what rounds before it came to."""

    def choose(self) -> int:
        """Return the most tokens to draft in the coming round; 0 is a plain step."""

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Decide about the token just drafted.

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

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Keep every token."""
        return DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        """Learn nothing."""


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

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Stop where the other policy does, if that is at a gamma that was built."""
        decision = self._policy.decide(drafted, confidence)
        kept = drafted - (decision is DraftDecision.DISCARD)
        return decision if kept in self._gammas else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        """Let the other policy learn."""
        self._policy.observe(round_)
