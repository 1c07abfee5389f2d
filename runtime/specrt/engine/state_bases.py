"""Up to where the states of recurrent layers hold the text of each row, where the host counts."""

from __future__ import annotations

import numpy as np

from specrt.errors import EngineError
from specrt.geometry import TAKEN_BACK

NOWHERE = 1 << 62
"""From where a row goes on whose states a pass has left half done."""


class StateBases:
    """What passes are told of the states of each row: where they are, and where they shall be.

    Windows hold the positions after a state. A state goes on to where a pass begins, less the
    `lag` that its engine wants, and at least to where windows still hold the rest.
    Shapes: both [batch] int64.
    """

    def __init__(self, batch: int, lag: int = TAKEN_BACK) -> None:
        self.base, self.next = np.zeros((2, batch), np.int64)
        self._lag = lag

    def least(self, row: int) -> int:
        """Return from where a row can go on; see `EngineTraits.rewind`."""
        return int(self.next[row])

    def advance(self, row: int, start: int, width: int) -> None:
        """Note a pass that is about to run.

        Raises: EngineError for one that begins before what the states hold.
        """
        held = self.least(row) if start else 0
        if start < held:
            raise EngineError(
                f"row {row} was to go on from position {start}; its layers remember enough from "
                f"position {held} on, or from 0 with its text read again"
            )
        self.base[row] = held
        self.next[row] = max(held, start - self._lag, start + width - TAKEN_BACK)

    def lose(self, row: int) -> None:
        """Note a pass that was left half done: the text of the row begins anew."""
        self.next[row] = NOWHERE

    def copy(self, source: int, to: int) -> None:
        """Note that a row now holds what another does."""
        self.next[to] = self.next[source]
