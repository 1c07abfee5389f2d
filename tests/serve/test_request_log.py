"""Ids of requests, on every answer; the line that the log has of each."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from scheduler.support import rows
from serve.support import failing, listening, serving, until
from specrt.serve.application import ServerOptions, application
from specrt.serve.request_log import JsonLines
from specrt.serve.service import Service
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

TEXT, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
BODY = {"prompt": "a secret prompt", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
HELLO = [{"role": "user", "content": "hello"}]


def test_an_error_has_the_id_wherever_it_arises(tokenizer: Tokenizer) -> None:
    toys = rows(packed, 1, tokenizer)
    with serving(toys, api_keys=("k",), max_body_bytes=500) as live:
        live.http.headers["x-request-id"] = "id"
        key, typed = {"X-Api-Key": "k"}, {"Content-Type": "application/json"}
        long = {"prompt": "x" * 600}
        for answer in (
            live.http.post(TEXT, json=BODY),
            live.http.post(MESSAGES, json={}),
            live.http.post(TEXT, json=long, headers=key),
            live.http.post(TEXT, content=(b" " * 100 for _ in range(9)), headers=key | typed),
            live.http.put(TEXT, headers=key),
        ):
            assert answer.status_code in (401, 405, 413)
            assert answer.headers.get_list("x-request-id") == ["id"]
            assert answer.json()["request_id"] == "id"
        chat = {"messages": HELLO, "max_tokens": 60, "stream": True}
        for path, body in ((TEXT, BODY | {"max_tokens": 60, "stream": True}), (MESSAGES, chat)):
            with failing(toys):
                *_, last = live.http.post(path, json=body, headers=key).text.strip().split("\n")
            assert json.loads(last.removeprefix("data: "))["request_id"] == "id"
        live.service.render = None  # type: ignore[assignment,method-assign]
        broken = live.http.post(CHAT, json={"messages": HELLO}, headers=key)
        assert (broken.status_code, broken.json()["request_id"]) == (500, "id")
        assert broken.headers["x-request-id"] == "id"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "specrt.requests")
    return lambda: [
        json.loads(JsonLines().format(one))
        for one in caplog.records
        if one.name == "specrt.requests"
    ]


def test_a_request_is_a_line(
    tokenizer: Tokenizer, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(rows(packed, 2, tokenizer), api_keys=("s3cret name=alice",)) as live:
        live.http.headers.update({"Authorization": "Bearer s3cret", "X-Request-ID": "r1"})
        told = live.post(TEXT, **BODY, n=2, gamma=3)
        live.post(TEXT, **BODY, gamma=3)
        live.http.post(TEXT, json=BODY | {"gamma": 3, "stream": True})
        until(lambda: len(lines()) == 3)  # the last event comes before the line
        forwarded = {"X-Forwarded-For": "x" * 9000}
        live.http.get("/nowhere%0Aa%20forged=line?q=s3cret", headers=forwarded)
        live.http.post(TEXT, json=BODY, headers={"Authorization": "Bearer wrong"})
        until(lambda: len(lines()) == 5)
        several, one, streamed, nowhere, stranger = lines()
    assert one.items() >= {
        "request_id": "r1", "key": "alice", "client": "127.0.0.1", "method": "POST", "path": TEXT,
        "status": 200, "completions": 1, "prompt_tokens": 15, "completion_tokens": 12,
        "finish_reasons": ["length"],
    }.items()  # fmt: skip
    assert several["completions"] == 2
    assert several["completion_tokens"] == told["usage"]["completion_tokens"]
    assert one["drafted"] >= one["evaluated"] >= one["accepted"] > 0
    assert one["duration_ms"] >= one["ttft_ms"] > 0
    same = ("rounds", "drafted", "accepted", "completion_tokens", "prompt_tokens")
    assert [streamed[name] for name in same] == [one[name] for name in same]
    assert (nowhere["status"], nowhere["path"]) == (404, "/nowhere\na forged=line")
    assert nowhere["client"] == "x" * 64
    assert stranger["status"] == 401
    assert "key" not in stranger
    shown = [one.getMessage() for one in caplog.records if one.name == "specrt.requests"]
    assert not any("secret" in line or "s3cret" in line or "\n" in line for line in shown)
    assert 'path="/nowhere\\na forged=line"' in shown[3]
    assert "key=alice" in shown[0]


def test_other_names_of_the_model_are_listed_and_taken(tokenizer: Tokenizer) -> None:
    service = Service(rows(packed, 1, tokenizer), "toy", aliases=("gpt-4o", "org/x"))
    with listening(application(service, ServerOptions())) as live:
        listed = live.http.get("/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["toy", "gpt-4o", "org/x"]
        assert {one["root"] for one in listed} == {"toy"}
        assert live.http.get("/v1/models/org/x").json()["id"] == "org/x"
        assert live.post(TEXT, **BODY, model="gpt-4o")["model"] == "toy"
        assert "'other' is not here" in live.refusal(TEXT, 404, **BODY, model="other")
