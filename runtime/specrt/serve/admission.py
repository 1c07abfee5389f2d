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


class ShutDownError(OverloadError):
    """The server was shut down before an answer was complete."""

    def __init__(self) -> None:
        super().__init__(
            "the server was shut down before the answer was complete; ask another one", _MOST_WAIT_S
        )


class Places:
    """One request's, which gives each back once the completion of it is over."""

    def __init__(self, count: int) -> None:
        self.held = count

    def give_back(self) -> None:
        """Let another completion have one."""
        self.held -= 1


class Admission:
    """Counts completions that run or wait, and bounds them. For one event loop."""

    def __init__(self, rows: int, max_queue: int) -> None:
        """`rows` run at once; `max_queue` more may wait."""
        self.rows = rows
        self.max_queue = max_queue
        self.draining = False
        """Whether the server ends: what was admitted goes on, nothing else begins."""
        self.ended = False
        """Whether nothing goes on either."""
        self.cut: set[AsyncStream] = set()
        """The streams that this ended before their time."""
        self.live: set[AsyncStream] = set()
        """The streams that were admitted and are not over."""
        self._requests: set[Places] = set()
        self._mean_s = 1.0
        """How long a completion takes, the latest counting most."""

    @property
    def running(self) -> int:
        """How many completions have a row."""
        return sum(stream.has_row for stream in self.live)

    @property
    def waiting(self) -> int:
        """How many completions wait for a row, those that are still being read as tokens too."""
        return max(0, self.admitted - self.running - self.paused)

    @property
    def paused(self) -> int:
        """How many have no row and need none: their clients do not read."""
        return sum(not (stream.has_row or stream.waits_for_row) for stream in self.live)

    @property
    def admitted(self) -> int:
        """How many completions run, wait or are paused."""
        return sum(places.held for places in self._requests)

    @contextmanager
    def admit(self, count: int) -> Iterator[Places]:
        """Hold the places of so many completions.

        Raises: OverloadError where they do not fit, and while the server ends.
        """
        if self.draining:
            raise OverloadError("the server is shutting down; ask another one", _MOST_WAIT_S)
        if self.admitted and self.admitted + count > self.rows + self.max_queue:
            raise OverloadError(
                f"{self.running} completions run and {self.waiting} wait, and the queue holds "
                f"{self.max_queue}; try again later",
                self.retry_after_s,
            )
        places = Places(count)
        self._requests.add(places)
        began = monotonic()
        try:
            yield places
        finally:
            self._requests.discard(places)
            self._mean_s += 0.2 * (monotonic() - began - self._mean_s)

    async def end(self) -> int:
        """End what runs or waits; return how many completions that were."""
        self.draining = self.ended = True
        # One that is complete, and not read to its end yet, is left to be read.
        self.cut = {one for one in self.live if one.completion.finish_reason is None}
        for stream in self.cut:
            await stream.aclose()
        return len(self.cut)

    @property
    def retry_after_s(self) -> int:
        """When a place will likely be free."""
        wait = self._mean_s * self.waiting / self.rows
        return round(min(max(wait, _LEAST_WAIT_S), _MOST_WAIT_S))
