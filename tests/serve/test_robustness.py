"""Hostile clients: whatever they send or cut short, no row is lost and nothing is left."""

from __future__ import annotations

import json
import logging
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serve.support import Live, until
from shared import nightly_but

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize",
         "/detokenize", "/v1/messages/count_tokens")  # fmt: skip
HELLO = [{"role": "user", "content": "hello"}]
GOOD: dict[str, Any] = {
    "prompt": "ab", "messages": HELLO, "input": "x", "max_tokens": 4, "temperature": 0,
    "tokens": [1], "max_output_tokens": 4, "stop": ["x"], "tools": [], "gamma": 2,
}  # fmt: skip
ODD = (
    None, True, -1, 0, 10**30, -(10**400), 1.5, 1e308, "", "\ud800", "\0" * 99, "a" * 999, [], [[]],
    {}, {"type": {}}, [None], [{}], [{"role": []}], {"\ud800": "\udfff"}, [1] * 9999,
    [{"type": "function", "function": {"name": "\ud800"}}],
)  # fmt: skip


def hostile(seed: int) -> bytes:
    """Return a body that is wrong in one of many ways, or in none."""
    dice = random.Random(seed)
    body = json.dumps(GOOD | {dice.choice([*GOOD, "seed", "logit_bias", "text"]): dice.choice(ODD)})
    raw = body.encode()
    kind = seed % 6
    if kind == 0:
        return raw[: dice.randrange(len(raw))]
    if kind == 1:
        return dice.randbytes(dice.randrange(300))
    if kind == 2:
        cut = dice.randrange(len(raw))
        return raw[:cut] + dice.randbytes(3) + raw[cut + 3 :]
    if kind == 3:
        return b'{"messages":' + dice.choice([b"[", b'{"a":']) * dice.randrange(1, 40_000)
    if kind == 4:
        return body.replace("4", dice.choice(["NaN", "1e999", "9" * 5000, "Infinity"])).encode()
    return raw


def quiet(live: Live) -> bool:
    return not live.service.admission.live and live.service.admission.waiting == 0


def opened(live: Live) -> socket.socket:
    host, _, port = live.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.parametrize("count", nightly_but([150], [150, 900]))
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read as Linux has it")
def test_many_malformed_and_many_cancelled_requests(
    toy: Live, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    wanted = toy.post("/v1/completions", prompt="ab", max_tokens=40, temperature=0)

    def malformed(seed: int) -> None:
        answer = toy.http.post(PATHS[seed % len(PATHS)], content=hostile(seed))
        assert answer.status_code in (200, 400, 404), (seed, answer.text)
        assert isinstance(answer.json(), dict)

    def cancelled(number: int) -> None:
        body = json.dumps(GOOD | {"max_tokens": 90, "ignore_eos": True, "stream": number % 2 == 0})
        path = PATHS[number % 4]
        with opened(toy) as link:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            link.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            if number % 3:
                link.recv(20)

    def round_of(work: Callable[[int], None], numbers: range) -> None:
        with ThreadPoolExecutor(8) as pool:
            [*pool.map(work, numbers)]
        until(lambda: quiet(toy))

    with caplog.at_level(logging.WARNING):
        for work in (malformed, cancelled):
            round_of(work, range(100))  # what is made once is made
            before = resident_mib()
            round_of(work, range(100, 100 + count))
            assert resident_mib() - before < 24
    assert "Traceback" not in caplog.text
    again = toy.post("/v1/completions", prompt="ab", max_tokens=40, temperature=0)
    assert again["choices"] == wanted["choices"]


def test_the_document_says_what_is_answered(toy: Live) -> None:
    document = toy.http.get("/openapi.json").json()
    for path in PATHS:
        answers = document["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "429", "500"} <= set(answers)
        assert "422" not in answers
        name = "MessagesError" if "messages" in path else "Error"
        schema = answers["400"]["content"]["application/json"]["schema"]["$ref"]
        assert schema == f"#/components/schemas/{name}"
