"""Web pages elsewhere cannot use a server through the browser of somebody who reaches it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from scheduler.support import rows
from serve.support import Live, serving
from specrt.remote.frames import PATH
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

TEXT = "/v1/completions"
BODY = {"prompt": "ab", "max_tokens": 1}
EVIL = "https://evil.example"


def made(tokenizer: Tokenizer, **options: object) -> Iterator[Live]:
    with serving(rows(packed, 1, tokenizer), verify=VerifyLimits(), **options) as live:
        yield live


@pytest.fixture(scope="module")
def local(tokenizer: Tokenizer) -> Iterator[Live]:
    """As `specrt serve` makes it on loopback without a key."""
    yield from made(tokenizer, allow_hosts=())


@pytest.fixture(scope="module")
def named(tokenizer: Tokenizer) -> Iterator[Live]:
    yield from made(tokenizer, allow_hosts=("LLM.example",), allow_origins=("https://app.example",))


def linked(live: Live, **headers: str) -> int:
    """Return the status with which a WebSocket's handshake is answered."""
    lines = {
        "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", **headers,
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    address = (live.http.base_url.host, live.http.base_url.port)
    with socket.create_connection(address, 30) as link:
        link.sendall(f"GET {PATH} HTTP/1.1\r\n{head}\r\n".encode())
        return int(link.recv(1 << 16).split(b" ", 2)[1])


def statuses(live: Live, **headers: str) -> set[int]:
    """Return the statuses of all that a page may try: to read, to run, to link."""
    run = live.http.post(TEXT, json=BODY, headers=headers)
    read = live.http.get("/v1/models", headers=headers)
    return {run.status_code, read.status_code, 200 if linked(live, **headers) == 101 else 403}


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.", "app.localhost:8080", "127.0.0.1", "127.0.0.1:1",
     "0.0.0.0:8080", "[::1]", "[::1]:8080", "192.168.1.7", "testserver", "gpu_box-1"],
)  # fmt: skip
def test_a_server_has_the_names_of_its_machine(local: Live, host: str) -> None:
    assert statuses(local, Host=host) == {200}


def test_a_preflight_is_refused_with_the_reason(local: Live) -> None:
    """A browser sends it before a request of JSON, and shows the developer nothing else."""
    asked = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = local.http.options(TEXT, headers=asked)
    assert (answer.status_code, "--allow-origin" in answer.text) == (403, True)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "evil.example.", "localhost.evil.example",
     "127.0.0.1.nip.io", "localhost:80@evil.example", "[::1].evil.example", "evil.local", "127.1",
     "", ":8080", "localhost evil.example", "xn--bcher-kva.example"],
)  # fmt: skip
def test_a_name_that_a_page_may_have_made_is_refused(local: Live, named: Live, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        answer = local.http.get(path, headers={"Host": host, "X-Forwarded-Host": "localhost"})
        assert answer.status_code == 403
        assert "--allow-host" in answer.json()["error"]["message"]
    assert statuses(local, Host=host) == statuses(named, Host=host) == {403}


def test_names_may_be_allowed(named: Live, tokenizer: Tokenizer) -> None:
    for host in ("llm.example", "LLM.EXAMPLE.:443", "localhost"):
        assert statuses(named, Host=host) == {200}
    for options in ({}, {"allow_hosts": ("*",)}):
        for live in made(tokenizer, **options):
            assert statuses(live, Host="evil.example") == {200}


def may_run(live: Live, host: str = "localhost:8080", **headers: str) -> bool:
    """Tell whether a page may run something, by any kind of request."""
    asked = {"Host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
    answers = {
        live.http.post(TEXT, json=BODY, headers=asked).status_code == 200,
        linked(live, **asked) == 101,
    }
    assert live.http.get("/v1/models", headers=asked).status_code == 200  # CORS: unread elsewhere
    assert len(answers) == 1
    return answers.pop()


def test_a_page_of_another_origin_runs_nothing(local: Live, named: Live) -> None:
    for live in (local, named):
        assert may_run(live)
        assert may_run(live, Origin="http://localhost:8080")
        assert may_run(live, Origin="HTTP://LocalHost:8080", Sec_Fetch_Site="same-origin")
        assert may_run(live, "[::1]:8080", Origin="http://[::1]:8080")
        assert may_run(live, "localhost", Origin="https://localhost:8443")  # a proxy's Host
        assert may_run(live, Sec_Fetch_Site="none")
        for origin in (EVIL, "null", "", "http://localhost", "http://localhost:8081",
                       "http://127.0.0.1:8080", "http://evil.example/localhost:8080"):  # fmt: skip
            assert not may_run(live, Origin=origin)
        for site in ("cross-site", "same-site", "anything"):
            assert not may_run(live, Sec_Fetch_Site=site)
            assert not may_run(live, Origin="http://localhost:8080", Sec_Fetch_Site=site)
    app = {"Origin": "https://app.example", "Sec_Fetch_Site": "cross-site"}
    assert may_run(named, **app)
    assert not may_run(local, **app)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_browser_sends_without_asking_runs_nothing(local: Live, kind: str) -> None:
    """Not even an old one's, which names no origin."""
    before = local.service.metrics.exposition()
    for path in (TEXT, "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"):
        headers = {"Content-Type": kind} if kind else {}
        answer = local.http.post(path, content='{"prompt": "ab"}', headers=headers)
        assert answer.status_code == 400
        assert "expected application/json" in answer.json()["error"]["message"]
    count = "specrt_generation_tokens_total{"
    tokens = [
        [line for line in text.decode().splitlines() if line.startswith(count)]
        for text in (before, local.service.metrics.exposition())
    ]
    assert tokens[0] == tokens[1]
