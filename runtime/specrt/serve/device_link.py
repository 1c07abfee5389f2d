"""The WebSocket of a device that drafts, on the server's side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from specrt.remote.frames import Close, FrameError, ProposalFrame, close_reason, pack_message
from specrt.serve.request_log import RequestRecord

_QUEUED = 8
"""Frames of a device that are read before the first of them is answered."""


class LinkEndedError(Exception):
    """A WebSocket that has come to its end, with its code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class DeviceLink:
    """One WebSocket, which is read all the time: so a device that is gone is noticed at once."""

    def __init__(
        self, websocket: WebSocket, record: RequestRecord, *, idle_s: float, text_bytes: int
    ) -> None:
        """Frames must come within `idle_s`, text ones of up to `text_bytes`."""
        self.record = record
        self._websocket = websocket
        self._idle_s = idle_s
        self._text_bytes = text_bytes
        self._loop = asyncio.get_running_loop()
        self._messages: deque[MutableMapping[str, Any]] = deque()
        self._room = asyncio.Event()
        self._waits: asyncio.Future[None] | None = None
        """Of the task that waits for a message."""
        self._ended: int | None = None
        self.on_end: Callable[[], object] = lambda: None
        """Called when the link has come to its end."""
        self._reader = asyncio.create_task(self._read())

    @property
    def open(self) -> bool:
        """Whether it has not come to its end."""
        return self._ended is None

    async def _read(self) -> None:
        with suppress(RuntimeError):  # it was closed by this server
            while True:
                message = await self._websocket.receive()
                if message["type"] == "websocket.disconnect":
                    self._ended = message.get("code") or 1006
                    break
                while len(self._messages) >= _QUEUED:
                    self._room.clear()
                    await self._room.wait()
                self._messages.append(message)
                self._notify()
        if self._ended is None:
            self._ended = Close.TAKEN_OVER
        self._notify()
        self.on_end()

    def _notify(self, error: Exception | None = None) -> None:
        waits = self._waits
        if waits is not None and not waits.done():
            if error is None:
                waits.set_result(None)
            else:
                waits.set_exception(error)

    async def receive(self) -> str | bytes:
        """Return the next frame.

        Raises: FrameError for one that is too large or does not come, LinkEndedError.
        """
        if not self._messages and self.open:
            self._waits = self._loop.create_future()
            timer = self._loop.call_later(self._idle_s, self._notify, _idle(self._idle_s))
            try:
                await self._waits
            finally:
                timer.cancel()
        if not self._messages:
            self.require_open()
        message = self._messages.popleft()
        self._room.set()
        text, data = message.get("text"), message.get("bytes")
        frame: str | bytes = text if text is not None else data or b""
        size, most = len(frame), ProposalFrame.MOST_BYTES if text is None else self._text_bytes
        if size > most:
            kind = "binary" if text is None else "text"
            raise FrameError(
                f"a {kind} frame has {size} bytes; expected up to {most}", Close.TOO_BIG
            )
        return frame

    def require_open(self) -> None:
        """Refuse to go on with a device that is gone.

        Raises: LinkEndedError.
        """
        if self._ended is not None:
            raise LinkEndedError(self._ended)

    async def send(self, frame: str | bytes) -> None:
        """Send a frame.

        Raises: LinkEndedError.
        """
        try:
            if isinstance(frame, str):
                await self._websocket.send_text(frame)
            else:
                await self._websocket.send_bytes(frame)
        except (WebSocketDisconnect, RuntimeError):
            self._messages.clear()
            self._room.set()
            await asyncio.wait([self._reader], timeout=1.0)  # a device that leaves tells a code
            raise LinkEndedError(self._ended or 1006) from None

    def forget(self) -> None:
        """Read no more."""
        self._reader.cancel()

    async def close(self, code: int, message: str) -> None:
        """Close with a code and a reason in words; all of it goes before as an `error` frame."""
        with suppress(LinkEndedError, RuntimeError, OSError):
            await self.send(pack_message("error", code=int(code), message=message))
            await self._websocket.close(code, close_reason(message))


def _idle(seconds: float) -> FrameError:
    return FrameError(
        f"nothing came for {seconds:g} s, which is the limit here; begin again", Close.IDLE
    )
