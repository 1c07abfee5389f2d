"""A server in a thread, and a proxy in front of it that delays, cuts and repeats."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import FastAPI

from serve.support import running
from specrt.remote.frames import PATH
from specrt.serve.verify_sessions import VerifyEndpoint


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test loop")
        self._thread.start()

    def run(self, work: Awaitable[Any], timeout: float = 30) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@contextmanager
def served(sessions: VerifyEndpoint) -> Iterator[int]:
    """Serve sessions on a port of the loopback."""
    application = FastAPI()
    application.add_api_websocket_route(PATH, sessions.endpoint)
    usual = sys.getswitchinterval()
    with running(
        application, log_level="error", lifespan="off", timeout_graceful_shutdown=1,
        ws_max_size=1 << 20, ws_per_message_deflate=False, ws="websockets-sansio",
    ) as port:  # fmt: skip
        sys.setswitchinterval(1e-4)  # device and server are threads of one process
        try:
            yield port
        finally:
            sys.setswitchinterval(usual)


class Proxy:
    """Passes bytes on between a device and a server.

    `cuts` are the bytes after which each connection is cut, in the order they come; later ones are
    left alone. `delay_s` is each way.
    """

    def __init__(self, port: int, cuts: list[int] | None = None, delay_s: float = 0.0) -> None:
        self._to = port
        self.cuts = cuts or []
        self.delay_s = delay_s
        self.connections = 0
        self.up = self.down = 0
        """Bytes passed on."""
        self._loop = Loop()
        self._writers: set[Any] = set()
        self._server = self._loop.run(self._start())
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _start(self) -> Any:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: Any, writer: Any) -> None:
        left = [self.cuts.pop(0) if self.cuts else -1]
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, back}

        async def pump(source: Any, to: Any, name: str) -> None:
            with suppress(OSError, asyncio.IncompleteReadError):
                while data := await source.read(65536):
                    if left[0] >= 0:
                        data, left[0] = data[: left[0]], max(0, left[0] - len(data))
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    setattr(self, name, getattr(self, name) + len(data))
                    to.write(data)
                    await to.drain()
                    if left[0] == 0:
                        break
            for one in (writer, back):
                if left[0] == 0:
                    one.transport.abort()
                else:
                    one.close()

        await asyncio.gather(pump(reader, back, "up"), pump(there, writer, "down"))
        self._writers -= {writer, back}

    def cut_all(self) -> None:
        """Cut what is connected now."""

        async def cut() -> None:
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0.01)

        self._loop.run(cut())

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            for writer in list(self._writers):
                writer.transport.abort()
            await asyncio.sleep(0.01)

        self._loop.run(end())
        self._loop.close()
