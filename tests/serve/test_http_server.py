"""Limits of the HTTP server that only a connection of one's own shows."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_websocket

from scheduler.support import Gate, rows, target_of
from serve.support import TEMPLATE, until
from serve.test_admission import LONG, TEXT
from specrt.errors import RequestError
from specrt.remote.frames import PATH
from specrt.serve.application import ServerOptions, application
from specrt.serve.connection import MOST_HEAD_BYTES, ConnectionLimits
from specrt.serve.http_server import HttpServer
from specrt.serve.service import Service
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.chat_template import ChatTemplate
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

PATIENT = ConnectionLimits(read_timeout_s=600, write_timeout_s=600)
HASTY = replace(PATIENT, read_timeout_s=0.5)


class Served:
    """A server in a thread."""

    def __init__(self, server: HttpServer, service: Service, listener: socket.socket) -> None:
        self.server = server
        self.service = service
        self.address = listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, 30)

    def told(self, data: bytes) -> bytes:
        """Return all that comes until the server closes, whatever becomes of what is sent."""
        with self.connect() as link:
            with suppress(OSError):
                link.sendall(data)
            return rest(link)


def answer_of(link: socket.socket) -> bytes:
    """Return one answer that has a length; the connection stays open."""
    told = b""
    while not (found := re.search(rb"content-length: (\d+)\r\n(?s:.*?)\r\n\r\n", told)):
        told += link.recv(1 << 16)
    while len(told) < found.end() + int(found[1]):
        told += link.recv(1 << 16)
    return told


def rest(link: socket.socket) -> bytes:
    told = b""
    with suppress(ConnectionError):
        while more := link.recv(1 << 16):
            told += more
    return told


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@contextmanager
def served(
    tokenizer: Tokenizer,
    limits: ConnectionLimits = PATIENT,
    delay_s: float = 0,
    send_bytes: int = 0,
    **options: Any,
) -> Iterator[Served]:
    service = Service(rows(packed, 1, tokenizer), "toy", template=ChatTemplate(TEMPLATE, {}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if send_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        server = HttpServer(
            application(service, ServerOptions(verify=VerifyLimits(), **options)),
            drain_s=30, shutdown_delay_s=delay_s, limits=limits,
        )  # fmt: skip
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield Served(server, service, listener)
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def patient(tokenizer: Tokenizer) -> Iterator[Served]:
    with served(tokenizer) as made:
        yield made


@pytest.fixture
def errors(patient: Served) -> Iterator[list[logging.LogRecord]]:
    """What is logged as an error, tracebacks among it."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("uvicorn")  # the server set it up, and it passes nothing on
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@contextmanager
def linked(made: Served) -> Iterator[ClientConnection]:
    """Open a WebSocket as a device does, up to the server's welcome."""
    with open_websocket(f"{made.url.replace('http', 'ws')}{PATH}") as link:
        link.recv(10)
        yield link


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LAST = b"Connection: close\r\n"
CHUNKED = POST + LAST + b"Transfer-Encoding: chunked\r\n\r\n"
LINK = (
    f"GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
).encode()
BIG = b"a" * 10 * MOST_HEAD_BYTES
FEW = b"a" * 9000


@pytest.mark.parametrize(
    ("wanted", "data"),
    [
        (200, GET + LAST + b"X: " + b"a" * (MOST_HEAD_BYTES - 500) + b"\r\n\r\n"),
        (431, GET + b"X: " + BIG),
        (431, GET + BIG),
        (431, GET + b"a:\r\n" * (MOST_HEAD_BYTES // 32)),
        (431, b"\r\n" * MOST_HEAD_BYTES),
        (404, b"GET /" + FEW + b" HTTP/1.1\r\nHost: x\r\n" + LAST + b"\r\n"),
        (414, b"GET /" + BIG),
        (414, b"GET /health?" + BIG),
        (400, b"\x16\x03\x01\x02\x00\x01\x00\r\n"),
        (400, GET + b"a\x00b: c\r\n\r\n"),
        (400, GET + b"a: b\x00c\r\n\r\n"),
        (400, GET + b"a: b\r\n c\r\n\r\n"),
        (400, b"GET http://x HTTP/1.1\r\nHost: x\r\n\r\n"),
        (400, b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n"),
        (400, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"),
        (400, b"GET /health HTTP/1.1\r\n" + LAST + b"\r\n"),
        (400, GET + LAST + b"Host: y\r\n\r\n"),
        (200, b"GET /health HTTP/1.0\r\n\r\n"),
        (431, CHUNKED + b"2;" + BIG),
        (431, CHUNKED + (b"1;" + FEW + b"\r\n \r\n") * 8),
        (431, CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 5000),
        (400, CHUNKED + b"2\r\n{}\r\n0\r\nX: y\r\n\r\n"),
        (400, CHUNKED + b"1\r\n \r\n" * 9000 + b"2\r\n{}\r\n0\r\n\r\n"),
        (400, CHUNKED + b"1" + b"f" * 16 + b"\r\n"),
        (400, CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n"),
        (413, POST + LAST + b"Content-Length: 9999999999\r\n\r\n"),
        (413, POST + LAST + b"Content-Length: " + b"9" * 19 + b"\r\n\r\n"),
        (400, POST + LAST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n"),
        (200, GET + LAST + b"Content-Length: " + b"0" * 4301 + b"\r\n\r\n"),
        (400, POST + LAST + b"Content-Length: " + b"0" * 4301 + b"2\r\n\r\n{}"),
        (400, POST + b"Content-Length: +2\r\n\r\n{}"),
        (400, POST + b"Content-Length: -2\r\n\r\n{}"),
        (400, POST + b"Content-Length: 2 2\r\n\r\n{}"),
        (400, POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}"),
        (400, POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        (400, POST + b"Transfer-Encoding: gzip\r\n\r\n"),
        (429, (GET + b"\r\n") * 500),
        (400, b"\r\n" * (MOST_HEAD_BYTES // 2 + 8) + b"\x16" * 4096),
        (400, LINK + b"".join(b"X%d: y\r\n" % n for n in range(200)) + b"\r\n"),
        (400, LINK + b"X: " + FEW + b"\r\n\r\n"),
        (400, LINK + b"Content-Length: 2\r\n\r\n{}"),
        (431, LINK + b"X: " + BIG + b"\r\n\r\n"),
        (403, LINK + b"Origin: https://evil.example\r\n\r\n"),
        (404, LINK.replace(PATH.encode(), b"/nowhere") + b"\r\n"),
        (400, LINK.replace(b"Sec-WebSocket-Key", b"X-Key") + b"\r\n"),
        (400, LINK + b"Host: y\r\n\r\n"),
    ],
)
def test_requests_that_are_too_large_or_none(
    patient: Served, errors: list[logging.LogRecord], wanted: int, data: bytes
) -> None:
    answer = patient.told(data)
    assert status(answer) == wanted, answer
    head, _, body = answer.partition(b"\r\n\r\n")
    told = re.findall(rb"\r\nx-request-id: (\S+)", head)
    assert len(told) == 1
    if wanted >= 400:
        refused = json.loads(body)
        assert refused["error"]["message"]
        assert refused["request_id"].encode() == told[0]
    assert httpx.get(f"{patient.url}/health").status_code == 200
    assert errors == []


BODY = json.dumps({"prompt": "ab", "max_tokens": 4}).encode()
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)


LATE: list[tuple[list[int], list[bytes]]] = [
    ([], [b""]),
    ([408], [b"\r\n"]),
    ([408], [b"G"]),
    ([408], [GET]),
    ([408], [POST + LENGTH + BODY[:-1]]),
    ([408], [CHUNKED + b"fffffffffffffff\r\n{"]),
    ([200, 408], [GET + b"\r\n", b"GET"]),
    ([200], [GET + b"Content-Length: 2\r\n\r\n", b"{"]),
]


def test_what_does_not_come_in_time_is_not_waited_for(tokenizer: Tokenizer) -> None:
    with served(tokenizer, HASTY) as made, ExitStack() as links:
        waiting = []
        for statuses, (first, *more) in LATE:
            link = links.enter_context(made.connect())
            link.sendall(first)
            seen = answer_of(link) if more else b""
            link.sendall(b"".join(more))
            waiting.append((statuses, seen, link))
        for statuses, seen, link in waiting:
            answers = (seen + rest(link)).split(b"HTTP/1.1 ")[1:]
            assert [int(one[:3]) for one in answers] == statuses


def test_a_request_that_runs_is_not_hurried(tokenizer: Tokenizer) -> None:
    """Nor is one that waits for it on the same connection, and is not read meanwhile."""
    with served(tokenizer, HASTY) as made, made.connect() as link:
        gate = Gate(target_of(made.service.generator))
        link.sendall(POST + LENGTH + BODY + POST + LENGTH + BODY[:-1])
        assert gate.inside.wait(30)
        assert status(made.told(GET)) == 408  # longer than a request may take to come
        gate.go.set()
        assert status(answer_of(link)) == 200
        link.sendall(BODY[-1:])
        assert status(answer_of(link)) == 200


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_another_protocol_that_is_asked_for_changes_nothing(
    patient: Served, errors: list[logging.LogRecord], *, apart: bool, chunked: bool
) -> None:
    """Java's client asks for HTTP/2 so; the body belongs to the request, and is none of its own."""
    h2c = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAQAAP__\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    length = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else LENGTH
    with patient.connect() as link:
        link.settimeout(30)
        for _ in range(2):
            link.sendall(POST + h2c + length + (b"" if apart else body))
            if apart:
                until(lambda: any(not one.idle for one in patient.server.server_state.connections))
                link.sendall(body)
            answer = answer_of(link)
            assert status(answer) == 200
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 4
        link.sendall(GET + h2c + b"\r\n" + GET + LAST + b"\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+)", rest(link)) == [b"200", b"200"]
    smuggled = POST + h2c + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert status(patient.told(smuggled)) == 400
    assert errors == []


def test_a_connection_that_is_idle_makes_room(tokenizer: Tokenizer) -> None:
    with (
        served(tokenizer, replace(PATIENT, connections=2)) as made,
        made.connect() as first,
        made.connect() as second,
    ):
        for link in (first, second):
            link.sendall(GET + b"\r\n")
            assert status(answer_of(link)) == 200
        with made.connect() as third:
            assert rest(first) == b""
            for link in (second, third):
                link.sendall(POST + LENGTH + BODY[:-1])  # not idle any more
            until(lambda: not any(one.idle for one in made.server.server_state.connections))
            for _ in range(3):
                answer = made.told(GET + b"\r\n")
                assert status(answer) == 503
                assert b"retry-after" in answer
            for link in (second, third):
                link.sendall(BODY[-1:])
                assert status(answer_of(link)) == 200


def test_answers_to_http_1_0_have_no_chunks(patient: Served) -> None:
    for stream in (False, True):
        body = json.dumps({"prompt": "ab", "max_tokens": 4, "stream": stream}).encode()
        head = POST.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
        told, _, content = patient.told(head + body).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in told.lower()
        if stream:
            *events, last, _ = content.split(b"\n\n")
            assert last == b"data: [DONE]"
            assert all(json.loads(event.removeprefix(b"data: ")) for event in events)
        else:
            assert json.loads(content)["choices"]


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/metrics", "/v1/models"])
def test_head_is_get_without_the_body(patient: Served, path: str) -> None:
    got, head = httpx.get(patient.url + path), httpx.head(patient.url + path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert "content-length" in head.headers
    assert httpx.head(patient.url + TEXT).status_code == 405


def test_a_message_of_a_websocket_has_no_end_of_fragments(patient: Served) -> None:
    with linked(patient) as link:
        empty = Frame(Opcode.CONT, b"", fin=False).serialize(mask=True)
        with suppress(OSError):
            link.socket.sendall(Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True))
            for _ in range(20):
                link.socket.sendall(empty * 1000)
        with pytest.raises(ConnectionClosed):
            link.recv(30)


@pytest.mark.parametrize(
    ("code", "frames"),
    [
        (1007, [Frame(Opcode.TEXT, b"\xff")]),
        (1007, [Frame(Opcode.TEXT, b"\xf0\x9f", fin=False), Frame(Opcode.CONT, b"\x92", fin=True)]),
        (4400, [Frame(Opcode.TEXT, b"\xf0\x9f", fin=False), Frame(Opcode.CONT, b"\x98\x80")]),
        (1009, [Frame(Opcode.TEXT, b"a" * (1 << 20) + b"a")]),
        (1002, [Frame(Opcode.CONT, b"a")]),
    ],
)
def test_frames_that_are_none_close_with_a_code(
    patient: Served, errors: list[logging.LogRecord], code: int, frames: list[Frame]
) -> None:
    with linked(patient) as link:
        link.socket.sendall(b"".join(frame.serialize(mask=True) for frame in frames))
        with suppress(ConnectionClosed):
            while True:
                link.recv(30)
        assert link.protocol.close_code == code
    assert errors == []


def reader_of_nothing(made: Served) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(made.address)
    return client


def test_a_client_that_reads_nothing_is_dropped(tokenizer: Tokenizer) -> None:
    body = json.dumps({**LONG, "n": 60, "logprobs": 5, "stream": True}).encode()
    limits = replace(PATIENT, write_timeout_s=0.2)
    with served(tokenizer, limits, send_bytes=4096) as made, reader_of_nothing(made) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        admission = made.service.admission
        until(lambda: admission.live)
        until(lambda: not admission.live)
        told = rest(client)
        assert b"200 OK" in told
        assert b"[DONE]" not in told


def test_a_client_that_reads_nothing_makes_room(tokenizer: Tokenizer) -> None:
    body = json.dumps({**LONG, "n": 60, "logprobs": 5, "stream": True}).encode()
    limits = replace(PATIENT, connections=1)
    with served(tokenizer, limits, send_bytes=4096) as made, reader_of_nothing(made) as client:
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: made.service.admission.live)
        assert status(made.told(GET + LAST + b"\r\n")) == 503
        until(lambda: status(made.told(GET + LAST + b"\r\n")) == 200)
        until(lambda: not made.service.admission.live)
        assert b"[DONE]" not in rest(client)


def test_the_name_in_an_absolute_target_is_the_one_that_counts(tokenizer: Tokenizer) -> None:
    with served(tokenizer, allow_hosts=()) as made:
        for target, wanted in (
            (b"http://localhost:1/health", 200), (b"HTTP://evil.example/health", 403),
            (b"http://localhost@evil.example/health", 403), (b"http://x:y@localhost/health", 403),
            (b"/http://evil.example", 404),
        ):  # fmt: skip
            head = b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % target
            assert status(made.told(head + LAST + b"\r\n")) == wanted, target


def test_answers_to_pings_do_not_pile_up(tokenizer: Tokenizer) -> None:
    with served(tokenizer, send_bytes=4096) as made, reader_of_nothing(made) as client:
        client.sendall(LINK + b"\r\n")
        until(lambda: made.server.server_state.tasks)
        pings = Frame(Opcode.PING, b"a" * 125).serialize(mask=True) * 1000
        with suppress(ConnectionError):
            while True:
                client.sendall(pings)
        until(lambda: not made.server.server_state.connections)


def ready(made: Served) -> int:
    return httpx.get(f"{made.url}/ready").status_code


def test_a_server_that_ends_is_seen_to_while_completions_run(tokenizer: Tokenizer) -> None:
    with served(tokenizer) as made, ThreadPoolExecutor(1) as pool:
        gate = Gate(target_of(made.service.generator))
        asked = pool.submit(httpx.post, made.url + TEXT, json=LONG, timeout=60)
        assert gate.inside.wait(30)
        with linked(made) as device:
            assert ready(made) == 200
            made.server.handle_exit(signal.SIGTERM, None)
            with pytest.raises(ConnectionClosed):
                device.recv(10)
        assert ready(made) == 503
        assert httpx.post(made.url + TEXT, json=LONG).status_code == 503
        gate.go.set()
        assert asked.result().status_code == 200
        until(lambda: not made.server.servers[0].is_serving())
        with pytest.raises(OSError):
            made.connect()


def test_a_server_that_ends_goes_on_listening_for_a_while(tokenizer: Tokenizer) -> None:
    with served(tokenizer, delay_s=600) as made:
        made.server.handle_exit(signal.SIGTERM, None)
        until(lambda: ready(made) == 503)
        made.server.handle_exit(signal.SIGTERM, None)


@pytest.mark.parametrize(
    "wrong", [{"connections": 0}, {"read_timeout_s": 0}, {"write_timeout_s": float("nan")}]
)
def test_limits_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        ConnectionLimits(**wrong)
