"""Which tokens a text holds, and how often, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Seen:
    """Which tokens there were, and how often; the different ones as an array that grows."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._times = np.empty(64, np.float32)
        self._places: dict[int, int] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._times = np.concatenate([self._times, self._times])
            self._ids[place] = token
            self.counts[token] = self.counts.get(token, 0) + 1
            self._times[place] = self.counts[token]

    @property
    def ids(self) -> NDArray[np.int64]:
        """The different tokens, in the order they came."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> NDArray[np.float32]:
        """How often each of them came."""
        return self._times[: len(self._places)]
