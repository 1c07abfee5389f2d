"""Whose turn it is to run passes, and the time that passes while somebody does."""

from __future__ import annotations

import threading
from time import perf_counter_ns

from specrt.errors import RequestError


class Turn:
    """One thread runs passes at a time, and none from within a pass.

    Raises: RequestError on entering from within a pass, and after closing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._closed = False
        self._idle_ns = 0
        self._left_ns = perf_counter_ns()

    def __enter__(self) -> None:
        self.require_apart()
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise _closed()
        self._thread = threading.get_ident()
        self._idle_ns += perf_counter_ns() - self._left_ns

    def __exit__(self, *_: object) -> None:
        self._left_ns = perf_counter_ns()
        self._thread = None
        self._lock.release()

    def now_ns(self) -> int:
        """Return the time, of which none passes while nobody has a turn."""
        now = perf_counter_ns()
        if self._thread is None:
            self._idle_ns += now - self._left_ns
            self._left_ns = now
        return now - self._idle_ns

    def require_apart(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._thread == threading.get_ident():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def require_open(self) -> None:
        """Refuse calls after closing, and from within a pass."""
        self.require_apart()
        if self._closed:
            raise _closed()

    def close(self) -> None:
        """Let nobody have a turn any more, after the one that is running."""
        self.require_apart()
        with self._lock:
            self._closed = True


def _closed() -> RequestError:
    return RequestError("this generator was closed; load the bundle again")
