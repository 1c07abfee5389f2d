"""Whose turn it is to run passes, and the time that passes while somebody does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

from specrt.errors import RequestError

T = TypeVar("T")


class Turn:
    """One thread runs passes at a time, and none from within a pass."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._closed = False
        self._idle_ns = 0
        self._left_ns = perf_counter_ns()

    def run(self, work: Callable[[], T]) -> T:
        """Do what nobody else may do meanwhile.

        Raises: RequestError from within a pass, and after closing.
        """
        self.require_apart()
        with self._lock:  # of C: Ctrl-C finds it open or in a `with`, never between
            if self._closed:
                raise _closed()
            try:
                self._thread = threading.get_ident()
                self._idle_ns += perf_counter_ns() - self._left_ns
                return work()
            finally:
                self._thread = None
                self._left_ns = perf_counter_ns()

    def now_ns(self) -> int:
        """Return the time, of which none passes while nobody has a turn."""
        now = self._left_ns if self._thread is None else perf_counter_ns()
        return now - self._idle_ns

    def require_apart(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._thread == threading.get_ident() and self._lock.locked():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def require_open(self) -> None:
        """Refuse calls after closing, and from within a pass."""
        self.require_apart()
        if self._closed:
            raise _closed()

    def close(self, last: Callable[[], object]) -> None:
        """Let nobody have a turn any more, after the one that is running; do something last."""
        self.require_apart()
        with self._lock:
            if not self._closed:
                self._closed = True
                last()


def _closed() -> RequestError:
    return RequestError("this generator was closed; load the bundle again")
