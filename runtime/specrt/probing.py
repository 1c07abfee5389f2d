"""When to draft although it does not pay: to see whether it would again."""

from __future__ import annotations

PROBING = 0.015
"""Share of the time that probes may cost while drafting does not pay."""
PATIENCE = 1.05
"""How much longer to wait after each probe that fails."""
LONGEST = 4.0
"""How many times as long at most."""
DEAREST = 8.0
"""The most one probe counts, in tokens lost: a pass held up for other reasons is not its fault."""
DULL = 3
"""Drafts in a row whose first token was left out, before there is a rest."""


class Probes:
    """Spaces probes by what they lose, so that all of them cost a small share of the time."""

    def __init__(self) -> None:
        self.idle = 0
        """Rounds since anything was drafted."""
        self._wait: float | None = None
        self._hits = self._misses = 0

    def depth(self, loss: float) -> int:
        """Return how many tokens to probe with now; none while it is too early.

        `loss` is what a probe is expected to lose, in tokens, where none was made yet.
        """
        if self._wait is None:
            self._wait = loss / PROBING
        return 1 + self._hits if self.idle >= self._wait else 0

    def charge(self, drafted: int, accepted: int, lost: float) -> None:
        """Wait as long as a probe's loss asks for; let the next go further if all was kept."""
        self._hits = self._hits + 1 if accepted == drafted else 0
        self._misses = 0 if accepted else self._misses + 1
        patience = min(LONGEST, PATIENCE ** min(self._misses, 100))
        self._wait = min(DEAREST, lost) / PROBING * patience

    def reset(self) -> None:
        """Forget the probes: drafting pays."""
        self._wait = None
        self._hits = self._misses = 0


class Rests:
    """Stops asking a drafter that was unsure of its first token again and again.

    Such drafts cost a draft step and tell nothing. Rests double until these steps cost as little
    as probes may.
    """

    def __init__(self) -> None:
        self.dull = 0
        """Drafts in a row whose first token was left out."""
        self.left = 0.0
        """Rounds to rest for."""

    def bore(self, loss: float) -> None:
        """Take note of a draft whose first token was left out, and what it lost, in tokens."""
        self.dull += 1
        if self.dull > DULL:
            self.left = min(loss / PROBING, 2.0 ** min(self.dull - DULL - 1, 30))
