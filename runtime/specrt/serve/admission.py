"""Admission: which requests run or wait, and which are turned away before any work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from specrt.aio import AsyncStream
from specrt.errors import SpecrtError

_LEAST_WAIT_S, _MOST_WAIT_S = 1, 60


class OverloadError(SpecrtError):
    """The queue is full, or the server ends; the client may try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Admission:
    """Counts completions that run or wait, and bounds them. For one event loop."""

    def __init__(self, rows: int, max_queue: int) -> None:
        """`rows` run at once; `max_queue` more may wait."""
        self.rows = rows
        self.max_queue = max_queue
        self.draining = False
        """Whether the server ends: what was admitted goes on, nothing else begins."""
        self.live: set[AsyncStream] = set()
        """The streams that were admitted and are not over."""
        self.preparing = 0
        """How many admitted completions have no stream yet: their prompts are read as tokens."""
        self._admitted = 0
        self._mean_s = 1.0
        """How long a completion takes, the latest counting most."""

    @property
    def running(self) -> int:
        """How many completions have a row."""
        return sum(stream.completion.timings.taken_ns is not None for stream in self.live)

    @property
    def waiting(self) -> int:
        """How many completions wait for a row."""
        in_line = sum(stream.completion.timings.taken_ns is None for stream in self.live)
        return in_line + self.preparing

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Hold the places of so many completions.

        Raises: OverloadError where they do not fit, and while the server ends.
        """
        if self.draining:
            raise OverloadError("the server is shutting down; ask another one", _MOST_WAIT_S)
        if self._admitted and self._admitted + count > self.rows + self.max_queue:
            raise OverloadError(
                f"{self.running} completions run and {self.waiting} wait, and the queue holds "
                f"{self.max_queue}; try again later",
                self.retry_after_s,
            )
        self._admitted += count
        began = monotonic()
        try:
            yield
        finally:
            self._admitted -= count
            self._mean_s += 0.2 * (monotonic() - began - self._mean_s)

    @property
    def retry_after_s(self) -> int:
        """When a place will likely be free."""
        wait = self._mean_s * self.waiting / self.rows
        return round(min(max(wait, _LEAST_WAIT_S), _MOST_WAIT_S))
