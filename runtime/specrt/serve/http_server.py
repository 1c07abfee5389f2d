"""The HTTP server: it ends in time, and drops clients that take too long."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from socket import socket
from time import monotonic
from types import FrameType
from typing import Any, cast

import uvicorn

from specrt.errors import RequestError
from specrt.serve.connection import ConnectionLimits, HttpConnection, LinkConnection

log = logging.getLogger("specrt.serve")

_TICK_S = 0.05
_SWEEP_S = 0.25
_GRACE_S = 2.0
"""How long the last events of answers that were cut have to reach their clients."""


class HttpServer(uvicorn.Server):
    """Serves an application until SIGTERM or Ctrl-C.

    Nothing new begins from then on. What runs has `drain_s` to end, or until a second signal; then
    it is cut, and its clients are told. Until it has ended, and for `shutdown_delay_s` at least,
    the port is open, so that balancers see `/ready` fail.
    """

    def __init__(
        self,
        application: Any,
        on_ready: Callable[[], object] = lambda: None,
        *,
        drain_s: float,
        shutdown_delay_s: float = 0.0,
        limits: ConnectionLimits | None = None,
    ) -> None:
        service = application.state.service
        own = {"limits": limits or ConnectionLimits(), "on_refusal": service.metrics.refuse}
        config = uvicorn.Config(
            application,
            http=type("Http", (HttpConnection,), own),
            log_level="warning",
            access_log=False,
            ws=type("Link", (LinkConnection,), own),
            ws_max_size=1 << 20,
            ws_per_message_deflate=False,  # ids do not shrink
            server_header=False,
        )
        super().__init__(config)
        self._admission = service.admission
        self._keys = application.state.keys
        self._on_ready = on_ready
        self._drain_s = drain_s
        self._shutdown_delay_s = shutdown_delay_s
        self._signals = 0

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self._sweeping = asyncio.create_task(self._sweep())
        if self._keys.file is not None and hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._read_keys)
        self._on_ready()

    def _read_keys(self) -> None:
        """Read the keys again; where the file cannot be used they stay as they were."""
        try:
            self._keys.read()
        except RequestError as error:
            log.error("the keys stay as they were: %s", error)
        else:
            log.warning("the keys were read again: %d clients have one", len(self._keys))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end at a first signal; at a second one cut what runs."""
        self._signals += 1
        if self._signals == 1:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """Let what runs end, within limits."""
        self._admission.draining = True
        cutting = asyncio.create_task(self._cut())
        try:
            await self._drain()
            await super().shutdown(sockets)
        finally:
            cutting.cancel()
            self._sweeping.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            now, connections = monotonic(), cast("set[Any]", self.server_state.connections)
            for connection in [*connections]:
                connection.sweep(now)

    async def _drain(self) -> None:
        """Go on listening while completions run or wait; devices are told to leave at once."""
        for connection in [*self.server_state.connections]:
            if isinstance(connection, LinkConnection):
                connection.shutdown()
        end, admission = monotonic() + self._shutdown_delay_s, self._admission
        while admission.admitted or (monotonic() < end and self._signals < 2):
            await asyncio.sleep(_TICK_S)

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
