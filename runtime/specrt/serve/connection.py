"""TCP connections: what one client may take of the server before its request is known.

httptools bounds neither the bytes of a head, nor those around a chunked body, nor any time.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from specrt.errors import RequestError
from specrt.serve.request_log import record_of
from specrt.serve.sending import error_response

MOST_HEAD_BYTES = 32 << 10
"""Of a request line and headers."""

_LINE_BYTES = 32
"""A line of headers counts so many more (RFC 9113, 6.5.2): it is an object here."""

_PIECE_BYTES = 4096
"""Read at once; a limit is exceeded by so many at most."""

_MOST_PIPELINED = 32

_ABSOLUTE = re.compile(rb"[a-zA-Z][a-zA-Z0-9+.-]*://([^/?#]*)")
"""The beginning of a request line's target that names its server."""

_LEAST_RATE = 500
"""Bytes a second of a body that may take longer than a head, as in Apache's mod_reqtimeout."""

_LINGER_S = 2.0
"""How long a refused client has to read why: a close at once would reset what it has not read."""

_LEAST_UNREAD_S = 1.0
"""How long a client has read nothing that makes room for another one."""

_MOST_FRAGMENTS = 1024
_MOST_UNREAD_FRAMES = 1 << 20
"""Bytes that wait for a WebSocket's client: answers to its pings have no flow control."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What the clients of a server may take of it before a key is looked at."""

    connections: int = 512
    """Open at once, WebSockets included. For a new one the one that is idle longest makes room,
    else the one that has read nothing for longest."""
    read_timeout_s: float = 20.0
    """For a whole head; a body has a second more for each 500 bytes."""
    write_timeout_s: float = 60.0
    """How long a client may leave what it is sent unread."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.connections < 1:
            raise RequestError(f"connections is {self.connections}; expected 1 or more")
        for name in ("read_timeout_s", "write_timeout_s"):
            if not getattr(self, name) > 0:
                raise RequestError(f"{name} is {getattr(self, name)}; expected more than 0")


class _Connection(asyncio.Protocol):
    """Drops a client that leaves too much unread for too long; its rows are free then."""

    limits: ConnectionLimits
    on_refusal: Callable[[int], object]
    """Called with the status of a refusal."""
    transport: asyncio.Transport
    _unread_since: float | None = None

    @property
    def unread_s(self) -> float:
        """For how long the client has left too much unread."""
        return 0.0 if self._unread_since is None else monotonic() - self._unread_since

    def pause_writing(self) -> None:
        self._unread_since = monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def sweep(self, now: float) -> None:
        """Drop the connection if a time is over."""
        if self._unread_since is None and self.transport.is_closing():
            self._unread_since = now  # the last bytes must be read too
        since = now if self._unread_since is None else self._unread_since
        if now - since > self.limits.write_timeout_s:
            self.transport.abort()


class LinkConnection(_Connection, WebSocketsSansIOProtocol):
    """The connection of a WebSocket."""

    _fragments = 0
    _path = ""
    _headers: Sequence[tuple[bytes, bytes]] = ()

    def handle_connect(self, event: Any) -> None:
        """Begin; uvicorn answers what websockets does not take without an id."""
        self._path = event.path.partition("?")[0]
        self._headers = [
            (name.lower().encode(), value.encode("latin-1", "replace"))
            for name, value in event.headers.raw_items()
        ]
        if self.conn.accept(event).status_code == 101:
            super().handle_connect(event)

    def data_received(self, data: bytes) -> None:
        """Take what came; uvicorn leaves a handshake open that websockets does not take."""
        super().data_received(data)
        wrong = self.conn.handshake_exc
        if wrong is not None and not self.handshake_initiated:
            self.on_refusal(400)
            why = f"this is not a WebSocket's handshake: {wrong}"
            known = {"client": self.client, "headers": self._headers}
            scope: Scope = {"type": "websocket", "path": self._path, **known}
            self.transport.write(_refusal(400, why, scope))
            record_of(scope).write()
            self.transport.close()

    async def send(self, message: Any) -> None:
        """Send; an answer that refuses ends the handshake, which uvicorn logs as an error else."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True

    def handle_cont(self, event: Any) -> None:
        """Take a fragment of a message."""
        self._fragments = 0 if event.fin else self._fragments + 1
        if self._fragments > _MOST_FRAGMENTS:  # empty ones have no bytes to count
            self.transport.abort()
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Pass a message on; uvicorn logs a traceback for a text that is not UTF-8."""
        try:
            if self.curr_msg_data_type == "text":
                b"".join(getattr(self, "frames", ())).decode()  # older versions have no `frames`
        except UnicodeDecodeError:
            self.conn.send_close(1007)
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    def sweep(self, now: float) -> None:
        """Drop the connection if a time is over, or too much waits."""
        super().sweep(now)
        if self.transport.get_write_buffer_size() > _MOST_UNREAD_FRAMES:
            self.transport.abort()


class HttpConnection(_Connection, HttpToolsProtocol):
    """The connection of a client that makes requests, one after the other."""

    url = b""
    _piece = b""
    """What is being read."""
    _goes_on = False
    """Whether a parser is told of a head that another one has read."""
    _in_head = True
    """Whether the head of a request is next, or is being read."""
    _overhead = 0
    """Bytes of a head, or around the data of a chunked body."""
    _received = 0
    """Bytes of the body."""
    _since = 0.0
    """When the head or the body that is being read began."""
    _refused = False
    _unanswered: deque[RequestResponseCycle]
    """Requests whose answers are not complete; the first one runs."""

    @property
    def idle(self) -> bool:
        """Whether no request waits for an answer, though a head or the rest of a body may come."""
        return self._refused or not self._unanswered

    def connection_made(self, transport: Any) -> None:
        """Begin, or refuse to where the server is full."""
        self._unanswered = deque()
        super().connection_made(transport)
        self._since, most = monotonic(), self.limits.connections
        open_ = [one for one in self.connections if not one.transport.is_closing()]
        if len(open_) <= most:
            return
        idle = [one for one in open_ if isinstance(one, HttpConnection) and one.idle]
        idle.remove(self)
        linked = [one for one in open_ if isinstance(one, _Connection)]
        unread = [one for one in linked if one.unread_s > _LEAST_UNREAD_S]
        if idle:
            min(idle, key=lambda one: one._since).transport.abort()
        elif unread:
            max(unread, key=lambda one: one.unread_s).transport.abort()
        else:
            self.on_refusal(503)
            why = f"{most} connections are open, the most here; try later"
            transport.write(_refusal(503, why, self._refused_scope()))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Read in pieces, each within the limits."""
        for at in range(0, len(data), _PIECE_BYTES):
            if self._refused or self.transport.is_closing():
                return
            if self.transport.get_protocol() is not self:
                return  # a WebSocket's client sends nothing before it is answered
            self._piece = data[at : at + _PIECE_BYTES]
            self._overhead += len(self._piece)
            super().data_received(self._piece)
            self._check()

    def _unsupported_upgrade_warning(self) -> None:
        """Read on as if nothing had been asked for (RFC 9110, 7.8), as `Upgrade: h2c` does.

        The parser takes no body after such a head: what comes would be another request.
        """
        error = sys.exc_info()[1]
        at = error.args[0] if isinstance(error, httptools.HttpParserUpgrade) else len(self._piece)
        rest = self._piece[at:]
        self.parser = httptools.HttpRequestParser(self)
        with suppress(AttributeError):  # as uvicorn has it, where httptools does
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lengths = [
            b"%b: %b\r\n" % header
            for header in self.headers
            if header[0] in (b"content-length", b"transfer-encoding")
        ]
        self._goes_on = True
        super().data_received(b"".join([b"POST / HTTP/1.1\r\n", *lengths, b"\r\n"]))
        self._goes_on = False
        if rest and not self._refused:
            self._piece = rest
            super().data_received(rest)

    def _check(self) -> None:
        if self._overhead > MOST_HEAD_BYTES:
            long = self._in_head and len(self.url) > MOST_HEAD_BYTES // 2
            self.refuse(
                414 if long else 431,
                f"{'the request line has' if long else 'headers, or the lines around chunks, have'}"
                f" more than {MOST_HEAD_BYTES} bytes; send less",
            )
        elif len(self._unanswered) > _MOST_PIPELINED:
            self.refuse(429, f"over {_MOST_PIPELINED} requests wait on one connection; send fewer")

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self._goes_on:
            return
        self._since = monotonic()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        if not self._goes_on:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or what has its form after a chunked body."""
        self._overhead += _LINE_BYTES
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request."""
        if self._goes_on:
            return
        self._in_head, self._since, self._overhead, self._received = False, monotonic(), 0, 0
        before = self.cycle
        if named := _ABSOLUTE.match(self.url):  # it counts, and not Host (RFC 9112, 3.2.2)
            host = named[1]
            self.headers[:] = [(k, host if k == b"host" else v) for k, v in self.headers]
        super().on_headers_complete()
        if self.cycle is before:
            return  # it becomes a WebSocket
        self._unanswered.append(self.cycle)
        if self.scope["http_version"] in ("0.9", "1.0"):
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._received += len(body)
        # As in Go's net/http: 16 bytes a chunk and twice its data may be around it.
        self._overhead = max(0, self._overhead - 3 * len(body) - 16)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a body."""
        if self.parser.should_upgrade():
            return  # to a WebSocket, or the body is next
        super().on_message_complete()
        self._in_head, self._since, self._overhead = True, monotonic(), 0
        self.url, self.headers = b"", []

    def on_response_complete(self) -> None:
        """Wait for the next request, or begin it."""
        self._since = monotonic()
        self._unanswered.popleft()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not take."""
        self.refuse(400, f"{msg} Expected a request of HTTP/1.1")

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless an answer has begun, and read no more."""
        if self._refused:
            return
        self.on_refusal(status)
        self._refused, self._since = True, monotonic()
        if self._unanswered and self._unanswered[0].response_started:
            self.transport.abort()
            return
        for cycle in self._unanswered:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        scope = self._refused_scope()
        self.transport.write(_refusal(status, message, scope))
        self.transport.write_eof()
        if not (self._unanswered and self._unanswered[0].scope is scope):
            record_of(scope).write()  # no application does

    def _refused_scope(self) -> Scope:
        """Return what is known of the request that is being read."""
        if not self._in_head and "path" in self.scope:
            return cast(Scope, self.scope)
        path = self.url.partition(b"?")[0].decode("latin-1")
        known = {"client": self.client, "headers": self.headers or []}
        return {"type": "http", "method": "", "path": path, **known}

    def sweep(self, now: float) -> None:
        """Drop the connection if a time is over."""
        super().sweep(now)
        waited, most = now - self._since, self.limits.read_timeout_s
        if self.transport.is_closing():
            return
        if self._refused:
            if waited > _LINGER_S:
                self.transport.abort()
        elif self._in_head:
            if self.idle and waited > most:
                self._time_out("headers", begun=self._overhead > 0)
        elif len(self._unanswered) > 1 or self.flow.read_paused:
            self._since = now  # it waits for the server
        elif not self._unanswered:
            if waited > most:  # nobody reads the rest of this body
                self.transport.abort()
        elif waited > most + self._received / _LEAST_RATE:
            self._time_out("body", begun=True)

    def _time_out(self, part: str, *, begun: bool) -> None:
        if begun:
            limit = self.limits.read_timeout_s
            self.refuse(408, f"the {part} did not come within {limit:g} s; send it at once")
        else:
            self.transport.close()


def _refusal(status: int, message: str, scope: Scope) -> bytes:
    """Return an answer that ends its connection; the record of its request has the status."""
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    record = record_of(scope)
    record.answered(status)
    headers = {**record.headers, "connection": "close"}
    if status == 503:
        headers["retry-after"] = "1"
    response = error_response(scope, status, message, kind, code=status, headers=headers)
    lines = [b"%b: %b\r\n" % header for header in response.raw_headers]
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
    return b"".join([head, *lines, b"\r\n", bytes(response.body)])


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """End an answer by closing: HTTP/1.0 has no chunks (RFC 9112, 6.1), uvicorn sends them."""
    send = cycle.send
    cycle.chunked_encoding = False

    async def send_whole(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_whole  # type: ignore[method-assign]
