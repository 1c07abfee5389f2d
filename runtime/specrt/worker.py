"""The thread that runs passes for those who cannot wait for one themselves."""

from __future__ import annotations

import threading

from specrt.batch import Batch
from specrt.errors import RequestError
from specrt.request import Request


class Worker:
    """A thread that runs requests until they are over or pause; there is none otherwise.

    So no thread is left behind by a request that nobody reads: it pauses, or it was dropped.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._lock = threading.Lock()
        """Held while the two below are looked at, never during a pass."""
        self._requests: list[Request] = []
        self._thread: threading.Thread | None = None
        self._last: threading.Thread | None = None
        """The same, and still known while it ends, so that it can be waited for."""

    def run(self, request: Request) -> None:
        """Run a request; returns at once. What comes of it, `request.heard` hears.

        Raises: RequestError where no thread can be had, and after closing.
        """
        self._batch.turn.require_open()
        with self._lock:
            if request not in self._requests:
                self._requests.append(request)
            if self._thread is None:
                self._thread = self._last = self._started()

    def join(self) -> None:
        """Wait for the thread to end, once the batch is closed."""
        thread = self._last
        if thread not in (None, threading.current_thread()):
            thread.join()

    def _started(self) -> threading.Thread:
        # Not a daemon: those are stopped within a pass when a program ends, which crashes it.
        thread = threading.Thread(target=self._work, name="specrt", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # too many, or the program ends
            self._requests.clear()
            raise RequestError(f"no thread can be started to run passes: {error}") from None
        return thread

    def _work(self) -> None:
        while requests := self._needy():
            try:
                self._batch.advance(requests)
            except BaseException as error:  # the generator was closed, or a step was broken off
                if not any(request.over for request in requests):  # it concerns no one of them
                    for request in requests:
                        request.fail(error)

    def _needy(self) -> list[Request]:
        """Return what is to be run; the thread ends when that is nothing."""
        with self._lock:
            self._requests = [r for r in self._requests if r.needy]
            if not self._requests:
                self._thread = None
            return list(self._requests)
