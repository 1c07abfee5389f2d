"""A whole greedy round in one launch, where one device runs both models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Drafted(NamedTuple):
    """What a round drafted, and what the draft thought of each token."""

    tokens: list[int]
    """-1 where the draft had no number to choose by, and nothing good after."""
    confidences: list[float]


class WholeRounds(Protocol):
    """Engines of a pair that draft and verify without the host in between."""

    def fits(self, gamma: int, pending: int, draft_start: int, target_start: int) -> bool:
        """Tell whether a round can be run; if not, its passes can be, one by one."""

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Draft `gamma` tokens and let the target score them.

        `pending` are the tokens that the draft's cache lacks, the last committed one included;
        `last` is that one. The target's next pass over `last` and what was drafted has then run.
        Raises: EngineError where the device fails.
        """


class LaterRounds:
    """Whole rounds whose first position is a later one of the engines'."""

    def __init__(self, rounds: WholeRounds, offset: int) -> None:
        self._rounds = rounds
        self._offset = offset

    def fits(self, gamma: int, pending: int, draft_start: int, target_start: int) -> bool:
        """See `WholeRounds`."""
        by = self._offset
        return self._rounds.fits(gamma, pending, draft_start + by, target_start + by)

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """See `WholeRounds`."""
        by = self._offset
        return self._rounds.run(pending, draft_start + by, last, target_start + by, gamma)
