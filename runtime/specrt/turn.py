"""Whose turn it is to run passes, and the time that passes while somebody does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import TypeVar

from specrt.errors import RequestError

T = TypeVar("T")


class Turn:
    """One thread runs passes at a time, and none from within a pass.

    Who had a turn and wants the next one is behind all who wait: a lock alone goes to who asks
    while nobody is awake yet, which is the thread that has just let it go, every time.

    A signal's handler may run between any two steps here, and want a turn itself or raise: so the
    locks can be taken again by the thread that has them, and know whose they are.
    """

    def __init__(self) -> None:
        self._line = threading.RLock()
        """Held by the one who has the next turn."""
        self._lock = threading.RLock()
        """Held by the one who has this turn."""
        self._thread: int | None = None
        self.closed = False
        """Whether nobody has a turn any more, nor will have one."""
        self._clock: tuple[int | None, int] = (perf_counter_ns(), 0)
        """When the last turn ended, None in a turn; and how long nobody had one until then."""

    def run(self, work: Callable[[], T], *, refuses: bool = True) -> T:
        """Do what nobody else may do meanwhile; `refuses` tells whether closing ends that.

        Raises: RequestError from within a pass, and after closing.
        """
        self.require_apart()
        try:
            with self._line:
                self._lock.acquire()
            try:
                self._thread = threading.get_ident()
                if refuses and self.closed:
                    raise _closed()
                left, idle = self._clock
                if left is not None:
                    self._clock = None, idle + perf_counter_ns() - left
                return work()
            finally:
                self._thread = None
                self._clock = perf_counter_ns(), self._clock[1]
        finally:
            try:  # noqa: SIM105 - a call here could be interrupted, and leave it locked
                self._lock.release()
            except RuntimeError:  # not his: he was interrupted while he waited
                pass

    def now_ns(self) -> int:
        """Return the time, of which none passes while nobody has a turn."""
        left, idle = self._clock
        return (perf_counter_ns() if left is None else left) - idle

    def require_apart(self) -> None:
        """Refuse calls from within a pass, which would wait for themselves."""
        if self._thread == threading.get_ident():
            raise RequestError("a logits processor cannot use the generator that runs it")

    def require_open(self) -> None:
        """Refuse calls after closing, and from within a pass."""
        self.require_apart()
        if self.closed:
            raise _closed()

    def close(self, last: Callable[[], object]) -> None:
        """Let nobody have a turn any more, after the one that is running; do something last."""

        def end() -> None:
            if not self.closed:
                self.closed = True
                last()

        self.run(end, refuses=False)


def _closed() -> RequestError:
    return RequestError("this generator was closed; open the bundle again")
