"""Streams for asyncio: a worker thread runs the passes, so that no event loop waits for one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from specrt.completion import Chunk, Completion
from specrt.errors import RequestError
from specrt.scheduler.request import Request
from specrt.scheduler.scheduler import Scheduler
from specrt.text.detokenizer import TextEnd

LINGER_S = 0.05
"""How long the thread waits for requests that make rounds as they are told to: such a round comes
soon after the one before, and to start a thread takes longer than to wake one."""


class Worker:
    """A thread that runs requests until they are over or pause; soon after there is none.

    So no thread waits for a request that is not read: it pauses, or it was dropped.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = threading.Condition(threading.Lock())
        """Guards the next two, never during a pass; it tells the thread of requests."""
        self._requests: list[Request] = []
        self._thread: threading.Thread | None = None
        self._last: threading.Thread | None = None
        """The same, and still known while it ends, so that `join` can wait for it."""

    def run(self, request: Request) -> None:
        """Run a request, and return at once; `request.on_update` is called at its chunks.

        Raises: RequestError where no thread can be started, and after closing.
        """
        self._scheduler.lock.require_open()
        with self._lock:
            if request not in self._requests:
                self._requests.append(request)
            if self._thread is None:
                self._thread = self._last = self._started()
            else:
                self._lock.notify()

    def join(self) -> None:
        """Wait for the thread to end, once the scheduler is closed."""
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
        lingers = False
        while requests := self._runnable(lingers):
            lingers = any(request.until is not None for request in requests)
            try:
                self._scheduler.advance(requests)
            except BaseException as error:  # the generator was closed, or a step was broken off
                if not any(request.over for request in requests):  # it concerns no one of them
                    for request in requests:
                        request.fail(error)

    def _runnable(self, lingers: bool) -> list[Request]:
        """Return what is to be run; the thread ends when that is nothing."""
        with self._lock:
            self._requests = [r for r in self._requests if r.runnable]
            if lingers and not self._requests and not self._scheduler.lock.closed:
                self._lock.wait(LINGER_S)
                self._requests = [r for r in self._requests if r.runnable]
            if not self._requests:
                self._thread = None
            return list(self._requests)


class AsyncStream(AsyncIterator[Chunk]):
    """An asynchronous iterator of chunks; `completion` is as `Stream.completion` is.

    A thread runs the passes while a task waits, and a few rounds ahead of it. Its row is free at
    once when the task that waits for a chunk is cancelled or times out, on `aclose`, and when
    nothing refers to the stream any more, as after a loop over one without a name. One that has a
    name is best read within `async with`, which closes it however the block ends.
    """

    def __init__(self, request: Request, worker: Worker) -> None:
        self.completion = request.completion
        self._request = request
        self._worker = worker
        self._reading = threading.Lock()
        """Held by the task that reads; no task waits for it."""

    async def __anext__(self) -> Chunk:
        """Return the next chunk.

        Raises: RequestError, EngineError: what ended it before its time, once.
        """
        if not self._reading.acquire(blocking=False):
            raise RequestError("another task reads this stream; a stream has one reader at a time")
        try:
            chunk = await self._next()
        except asyncio.CancelledError:
            self._request.cancel()
            raise
        except BaseException:
            self._request.drop()
            raise
        finally:
            self._reading.release()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    @property
    def has_row(self) -> bool:
        """Whether it holds a row now: one that is not read may have given it away."""
        return self._request.has_slot

    @property
    def waits_for_row(self) -> bool:
        """Whether it needs a row, and has none; one that is not read needs none."""
        return self._request.runnable and not self._request.has_slot

    def end_with(self, end: TextEnd) -> None:
        """End the text as something else than its stop strings says; before the first chunk."""
        self._request.output.end_with(end)

    def cancel(self) -> None:
        """Stop, from any thread or task; see `Stream.cancel`."""
        self._request.cancel()

    async def aclose(self) -> None:
        """Discard what is not read yet; see `Stream.close`. A task that waits gets the end."""
        self._request.drop()
        self._request.notify()

    async def finish(self) -> Completion:
        """Run to the end and return the completion."""
        async for _ in self:
            pass
        return self.completion

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._request.drop()

    async def _next(self) -> Chunk | None:
        request, waited = self._request, False
        while not request.cancelled:
            over = request.over  # read first: it may be delivered and ended meanwhile
            if request.chunks:
                if waited:
                    return request.chunks.popleft()
                await asyncio.sleep(0)  # chunks that are there already must not keep others out
            elif request.error is not None:
                raise request.error
            elif over:
                return None
            else:
                await self._wait_for(request)
            waited = True
        return None

    async def _wait_for(self, request: Request) -> None:
        """Wait until a request has a chunk, an error or an end."""
        loop = asyncio.get_running_loop()
        updated: asyncio.Future[None] = loop.create_future()

        def on_update() -> None:
            try:
                loop.call_soon_threadsafe(_resolve, updated)
            except RuntimeError:  # the loop was closed, and no task reads any more
                request.drop()

        request.on_update = on_update
        try:
            if not request.chunks and not request.over:  # read again now that updates arrive
                self._worker.run(request)
                await updated
        finally:
            request.on_update = None


class PacedStream:
    """A request that makes rounds as it is told to; any number of tasks of one loop may wait.

    It has no chunks: what it came to so far is read by `since`.
    """

    def __init__(self, request: Request, worker: Worker) -> None:
        self.completion = request.completion
        self.prompt = tuple(request.tokens)
        self._request = request
        self._worker = worker
        self._waiting: set[asyncio.Future[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Of the tasks that wait."""
        request.collected, request.until = True, len(self.prompt)
        request.on_update = self._on_update

    @property
    def has_row(self) -> bool:
        """Whether it holds a row now: one that pauses may have given it away."""
        return self._request.has_slot

    @property
    def waits_for_row(self) -> bool:
        """Whether it was told to go on, and has no row."""
        return self._request.runnable and not self._request.has_slot

    @property
    def limit(self) -> int:
        """Tokens of prompt and text at which it ends."""
        return self._request.limit

    def since(self, length: int) -> tuple[list[int], bool]:
        """Return the tokens after the first `length` of prompt and text; whether the text ended.

        Tokens after an end or a stop string are not part of it.
        """
        with self._request.lock:
            return self.completion.token_ids[length - len(self.prompt) :], self._request.over

    async def reach(
        self, length: int, ahead: int = 0, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until prompt and text have so many tokens, or the text ends.

        It goes on by itself until it has so many tokens more. `wanted` is asked again at `wake`.
        Raises: RequestError, EngineError: what ended it before its time.
        """
        request = self._request
        self._loop = loop = asyncio.get_running_loop()
        request.until = max(request.until or 0, length + ahead)
        while True:
            waits = loop.create_future()
            self._waiting.add(waits)  # before anything is looked at: no update is missed
            try:
                if request.error is not None:
                    raise request.error
                if (
                    not wanted()
                    or request.over
                    or len(self.prompt) + len(self.completion.token_ids) >= length
                ):
                    return
                self._worker.run(request)
                await waits
            finally:
                self._waiting.discard(waits)

    def drop(self) -> None:
        """End it; its row is free at once."""
        self._request.drop()
        self.wake()

    def _on_update(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop was closed, and no task waits any more
                self._loop.call_soon_threadsafe(self.wake)

    def wake(self) -> None:
        """Let those that wait look whether they still have to."""
        for future in list(self._waiting):
            _resolve(future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
