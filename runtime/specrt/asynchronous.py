"""Streams for asyncio: chunks are awaited, and no event loop waits for a pass."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from specrt.completion import Chunk, Completion
from specrt.errors import RequestError
from specrt.request import Request
from specrt.worker import Worker


class AsyncStream(AsyncIterator[Chunk]):
    """An asynchronous iterator of chunks; `completion` is as `Stream.completion` is.

    A thread runs the passes while somebody waits, and a few rounds ahead of who reads. Its row is
    free at once when the task that waits for a chunk is cancelled or times out, on `aclose`, and
    when nothing refers to the stream any more, as where a loop over one without a name is left.
    One that has a name is best read within `async with`, which closes it however it is left.
    """

    def __init__(self, request: Request, worker: Worker) -> None:
        self.completion = request.completion
        self._request = request
        self._worker = worker
        self._reading = threading.Lock()
        """Held by who reads; nobody waits for it."""

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

    def cancel(self) -> None:
        """Stop, from any thread or task; see `Stream.cancel`."""
        self._request.cancel()

    async def aclose(self) -> None:
        """Give up what is not read yet; see `Stream.close`. A task that waits is at the end."""
        self._request.drop()
        self._request.tell()

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
            over = request.over  # asked first: it may be delivered and ended meanwhile
            if request.chunks:
                if waited:
                    return request.chunks.popleft()
                await asyncio.sleep(0)  # chunks that are there already must not keep others out
            elif request.error is not None:
                raise request.error
            elif over:
                return None
            else:
                await self._something(request)
            waited = True
        return None

    async def _something(self, request: Request) -> None:
        """Wait until something came of a request, and let it come."""
        loop = asyncio.get_running_loop()
        come: asyncio.Future[None] = loop.create_future()

        def heard() -> None:
            try:
                loop.call_soon_threadsafe(_settle, come)
            except RuntimeError:  # the loop was closed, and nobody reads any more
                request.drop()

        request.heard = heard
        try:
            if not request.chunks and not request.over:  # looked at after there is who hears
                self._worker.run(request)
                await come
        finally:
            request.heard = None


def _settle(come: asyncio.Future[None]) -> None:
    if not come.done():
        come.set_result(None)
