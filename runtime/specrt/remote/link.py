"""The links of a device to a server that verifies: made, kept, and made again when they break."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from time import monotonic, perf_counter_ns, sleep
from typing import Any
from urllib.parse import SplitResult, urlsplit

from specrt.errors import LinkError, RequestError, one_line
from specrt.remote.frames import (
    MOST_DRAFTED,
    PATH,
    PROTOCOL,
    Close,
    FrameError,
    field_of,
    ids_of,
    read_message,
)

_POLL_S = 0.2
"""How soon a cancelled request is noticed."""

_ENDING = (Close.GONE, Close.TOO_BIG, Close.FAILED, Close.RESTARTS, *range(4400, 4500))
"""Close codes after which to try again is useless for this link."""


@dataclass(frozen=True)
class LinkOptions:
    """How a device reaches a server, and how long it tries."""

    api_key: str | None = None
    """Sent as a bearer token."""
    tries: int = 8
    """How often a link that broke is made again before it is given up."""
    first_wait_s: float = 0.05
    """Before the second try; each later wait is twice as long, up to `longest_wait_s`."""
    longest_wait_s: float = 5.0
    open_s: float = 10.0
    """Most time for one try."""
    answer_s: float = 120.0
    """Most time for one answer, waiting for a row on the server included."""


class BrokenError(Exception):
    """A link broke; it may be made again."""


class Link:
    """One WebSocket to a server."""

    def __init__(self, address: SplitResult, options: LinkOptions) -> None:
        """Connect.

        Raises: BrokenError, LinkError where the server refuses.
        """
        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect as open_websocket

        port = address.port or (443 if address.scheme == "wss" else 80)
        key = options.api_key
        place: Any = (address.hostname, port)
        sock: socket.socket | None = None
        self._open = ExitStack()
        try:
            sock = socket.create_connection(place, options.open_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._websocket = self._open.enter_context(
                open_websocket(
                    address.geturl(),
                    sock=sock,
                    compression=None,  # token ids do not compress, and it takes time
                    open_timeout=options.open_s,
                    close_timeout=1.0,
                    max_size=1 << 22,
                    additional_headers={"Authorization": f"Bearer {key}"} if key else None,
                )
            )
        except InvalidStatus as error:
            raise LinkError(
                f"{address.geturl()} answered with status {error.response.status_code}"
                f"{_said(error.response.body)}; expected a WebSocket: check that "
                "`specrt serve --verify` runs there, and the api_key"
            ) from None
        except (OSError, InvalidHandshake, TimeoutError, EOFError) as error:
            if sock is not None:
                sock.close()
            raise BrokenError(str(error) or type(error).__name__) from None
        self._answer_s, self._open_s = options.answer_s, options.open_s
        self.sent_bytes = self.received_bytes = 0
        """Of frames, without what WebSocket, TLS and TCP add."""

    def send(self, frame: str | bytes) -> None:
        """Send a frame.

        Raises: BrokenError, LinkError.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            self._websocket.send(frame)
        except ConnectionClosed:
            self._told()
            raise BrokenError("the connection was closed") from None
        except OSError as error:
            raise BrokenError(str(error)) from None
        self.sent_bytes += len(frame)

    def _told(self) -> None:
        """Read what the server said before it closed the link.

        Raises: LinkError, BrokenError.
        """
        for _ in range(64):
            self._receive(0.0)

    def receive(self, goes_on: Callable[[], bool]) -> str | bytes:
        """Return the next frame; `goes_on` tells now and then whether it is still wanted.

        Raises: BrokenError, LinkError where the server ended the session.
        """
        until = monotonic() + self._answer_s
        while goes_on():
            frame = self._receive(_POLL_S)
            if frame is not None:
                return frame
            if monotonic() > until:
                raise BrokenError(f"no answer came within {self._answer_s:g} s")
        raise RequestError("the completion was cancelled")

    def _receive(self, timeout_s: float) -> str | bytes | None:
        """Return a frame, None where none comes in time."""
        from websockets.exceptions import ConnectionClosed

        try:
            frame: str | bytes = self._websocket.recv(timeout_s)
        except TimeoutError:
            return None
        except ConnectionClosed as error:
            closed = error.rcvd
            if closed is not None and closed.code in _ENDING:
                reason = closed.reason or f"it closed the link with code {closed.code}"
                raise LinkError(f"the server ended the session: {reason}") from None
            raise BrokenError(str(error)) from None
        except OSError as error:
            raise BrokenError(str(error)) from None
        self.received_bytes += len(frame)
        if isinstance(frame, str):
            self._check_error(frame)
        return frame

    def ping_ns(self) -> float:
        """Return how long a ping takes there and back; 0 where it is not answered."""
        began = perf_counter_ns()
        with suppress(Exception):
            if self._websocket.ping().wait(self._open_s):
                return perf_counter_ns() - began
        return 0.0

    def message(self, kind: str, goes_on: Callable[[], bool] = lambda: True) -> dict[str, Any]:
        """Return the next text frame, which must be of a kind."""
        frame = self.receive(goes_on)
        found = read_message(frame) if isinstance(frame, str) else {"type": "binary"}
        if found["type"] != kind:
            raise FrameError(f"the server sent a `{found['type'][:40]}` frame; expected `{kind}`")
        return found

    @staticmethod
    def _check_error(frame: str) -> None:
        message = read_message(frame)
        if message["type"] == "error":
            text = f"the server ended the session: {message.get('message')}"
            raise LinkError(text) if message.get("code") in _ENDING else BrokenError(text)

    @property
    def alive(self) -> bool:
        """Whether neither side has closed it, as far as this one knows."""
        return self._websocket.protocol.state.name == "OPEN"

    def close(self) -> None:
        """End the link, and with it the session it has."""
        with suppress(Exception):
            self._open.close()


@dataclass(frozen=True)
class Welcome:
    """What a server tells of itself."""

    model: str
    tokenizer_sha256: str
    vocab_size: int
    max_length: int
    gammas: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    step_us: int
    """What a token takes there that is decoded alone, in microseconds; 0 when unknown."""

    @classmethod
    def of(cls, message: dict[str, Any]) -> Welcome:
        """Read a `welcome` frame.

        Raises: FrameError.
        """
        version = field_of(message, "protocol", int, 0)
        if version != PROTOCOL:
            raise FrameError(f"the server speaks protocol {version}; this specrt {PROTOCOL}")
        vocabulary = field_of(message, "vocab_size", int, 0)
        return cls(
            field_of(message, "model", str, ""),
            field_of(message, "tokenizer_sha256", str, ""),
            vocabulary,
            field_of(message, "max_length", int, 0),
            tuple(sorted({0, *ids_of(message, "gammas", MOST_DRAFTED + 1)})),
            tuple(ids_of(message, "eos_token_ids", vocabulary)),
            field_of(message, "bos_token_id", int),
            max(0, field_of(message, "step_us", int, 0)),
        )


class LinkPool:
    """The server of a device: makes links, and keeps those that no session has."""

    def __init__(self, url: str, options: LinkOptions) -> None:
        """Connect once, and read what the server is."""
        self.address = _address(url)
        self.options = options
        self._lock = threading.Lock()
        self._free: list[Link] = []
        self._closed = False
        self.trip_ns = 0.0
        """What the link takes of a round, there and back; 0 until that is known."""
        self.streams = True
        """Whether the server was last asked to decode alone; a text begins as others went on."""
        link, self.welcome = self._open_patiently(lambda: True)
        self.note_trip(link.ping_ns())
        self.give_back(link)

    @property
    def url(self) -> str:
        """Where it is."""
        return self.address.geturl()

    def note_trip(self, ns: float) -> None:
        """Take note of what the link took of a round."""
        ns, known = max(0.0, ns), self.trip_ns
        self.trip_ns = ns if ns < known or not known else known + (ns - known) / 16

    def _open(self) -> tuple[Link, Welcome]:
        link = Link(self.address, self.options)
        try:
            return link, Welcome.of(link.message("welcome"))
        except BaseException:
            link.close()
            raise

    def pause(self, number: int) -> None:
        """Wait before a try: not at all before the first, and longer each time."""
        if number:
            options = self.options
            wait_s = min(options.first_wait_s * 2 ** (number - 1), options.longest_wait_s)
            sleep(wait_s * random.uniform(0.5, 1.0))  # so that devices do not come at once

    def _open_patiently(self, goes_on: Callable[[], bool]) -> tuple[Link, Welcome]:
        """Open a link in as many tries as there may be.

        Raises: LinkError.
        """
        options, began, reason = self.options, monotonic(), ""
        for number in range(options.tries):
            if not goes_on():
                raise RequestError("the completion was cancelled")
            self.pause(number)
            try:
                return self._open()
            except BrokenError as broken:
                reason = str(broken)
        raise LinkError(
            f"no link to {self.url} in {options.tries} tries and {monotonic() - began:.1f} s "
            f"({reason}); check that `specrt serve --verify` runs there, and the network"
        )

    def take(self, goes_on: Callable[[], bool], *, fresh: bool = False) -> Link:
        """Return a link, one that is open already unless a `fresh` one is wanted."""
        with self._lock:
            if self._closed:
                raise RequestError("this generator was closed; connect again")
            while self._free and not fresh:
                link = self._free.pop()
                if link.alive:  # else the server has closed it: nothing came for a while
                    return link
                link.close()
        link, welcome = self._open_patiently(goes_on)
        known = self.welcome
        if replace(welcome, model=known.model, step_us=known.step_us) != known:
            link.close()
            raise LinkError(
                f"{self.url} has another model than when it was connected to; connect again"
            )
        return link

    def give_back(self, link: Link) -> None:
        """Keep a link whose session is over."""
        with self._lock:
            if not self._closed and not self._free:
                self._free.append(link)
                return
        link.close()

    def close(self) -> None:
        """Close the links that no session has; those that have one close when it is over."""
        with self._lock:
            self._closed = True
            free, self._free = self._free, []
        for link in free:
            link.close()


def _said(body: bytes | bytearray | None) -> str:
    """Return the message of an answer that refuses a WebSocket; nothing if it holds none."""
    try:
        return ", " + one_line(json.loads(body or b"")["error"]["message"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def _address(url: str) -> SplitResult:
    """Return where a server's WebSocket is.

    Raises: RequestError.
    """
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("ws", "wss") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise RequestError(
            f"the server is {url!r}; expected ws://HOST:PORT, or wss:// where it has a certificate"
        )
    return parts._replace(path=PATH) if parts.path in ("", "/") else parts
