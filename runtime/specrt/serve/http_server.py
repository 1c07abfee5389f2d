"""The HTTP server: it ends in time, and drops clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from socket import socket
from time import monotonic
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from specrt.errors import RequestError

log = logging.getLogger("specrt.serve")

_TICK_S = 0.05
_GRACE_S = 2.0
"""How long the last events of answers that were cut have to reach their clients."""


class HttpServer(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C.

    It takes no requests from then on. Those that run have `drain_s` to end, or until a second
    signal; then they are cut, and their clients are told.
    """

    def __init__(
        self, application: Any, on_ready: Callable[[], object] = lambda: None, *, drain_s: float,
        write_timeout_s: float,
    ) -> None:  # fmt: skip
        config = uvicorn.Config(
            application,
            http=_bounded_writes(write_timeout_s),
            log_level="warning",
            access_log=False,
            ws="websockets-sansio",
            ws_max_size=1 << 20,
            ws_per_message_deflate=False,  # ids do not shrink
            server_header=False,
        )
        super().__init__(config)
        self._admission = application.state.service.admission
        self._keys = application.state.keys
        self._on_ready = on_ready
        self._drain_s = drain_s
        self._signals = 0

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        if self._keys.file is not None and hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_keys)
        self._on_ready()

    def _read_keys(self) -> None:
        """Read the keys again; those of before stay where the file cannot be used."""
        try:
            self._keys.read()
        except RequestError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.warning("the keys were read again: %d clients have one", len(self._keys))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at a first signal; at a second one cut what runs."""
        self._signals += 1
        self._admission.draining = True
        if self._signals == 1:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Let what runs end, within limits."""
        cutting = asyncio.create_task(self._cut())
        try:
            await super().shutdown(sockets)
        finally:
            cutting.cancel()

    async def _cut(self) -> None:
        """Once the drain is over end what still runs, and then drop who reads nothing."""
        end = monotonic() + self._drain_s
        while monotonic() < end and self._signals < 2:
            await asyncio.sleep(_TICK_S)
        if count := await self._admission.end():
            log.warning("the server ends: %d of its completions were cut", count)
        await asyncio.sleep(_GRACE_S)
        for connection in [*self.server_state.connections]:
            connection.transport.abort()


class _BoundedWrites(asyncio.Protocol):
    """Drops a connection whose client leaves too much unread for too long.

    Its requests are told that the client has gone, so their rows are free.
    """

    limit_s: float
    _timer: asyncio.TimerHandle | None = None
    _written: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self._written = transport
        super().connection_made(transport)

    def pause_writing(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._written.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _bounded_writes(limit_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's protocol with a limit on writing."""
    return type("BoundedHttp", (_BoundedWrites, AutoHTTPProtocol), {"limit_s": limit_s})
