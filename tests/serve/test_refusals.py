"""What is refused: by name, with a status that clients know, before any work."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from scheduler.support import rows
from serve.support import Live, serving
from specrt.errors import RequestError
from specrt.serve.application import ServerOptions
from specrt.text.tokenizer import Tokenizer
from support.rows import packed
from support.toy import TableEngine, generator

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LIMITS = {RESPONSES: "max_output_tokens", **dict.fromkeys((CHAT, TEXT, MESSAGES), "max_tokens")}
HELLO = [{"role": "user", "content": "hello"}]
ANY: dict[str, Any] = {"messages": HELLO, "max_tokens": 1}
JSON = {"Content-Type": "application/json"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
TYPED = [{"name": "f", "input_schema": {"type": "object"}}]
DEEP = json.loads('{"type":"array","items":' * 500 + "{}" + "}" * 500)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": ["x"] * 40, "n": 2}, "64 completions"),
        (TEXT, {"prompt": "x", "drafter": "oracle"}, "oracle"),
        (TEXT, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "json_schema": DEEP}, "too deep"),
        (TEXT, {"prompt": "x", "structured_outputs": {"jsn": {}}}, "'json'"),
        (TEXT, {"prompt": "x", "grammar": "a", "json_schema": {}}, "2 constraints"),
        (TEXT, {"prompt": "x", "json_schema": {"a": "b" * 200_001}}, "200000 characters"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        (CHAT, {"messages": HELLO * 4097}, "messages"),
        (CHAT, {"messages": HELLO, **dict.fromkeys(map(str, range(200)))}, "expected up to 200"),
        (CHAT, {"messages": [HELLO[0] | dict.fromkeys(map(str, range(200)))]}, "it has 202 fields"),
        (CHAT, {**ANY, "logit_bias": dict.fromkeys(map(str, range(10_001)), 1)}, "logit_bias"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "logprobs"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "'xml'"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "schema"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tools"),
        (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "use tools"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0]"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "has no name"),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input[0].content is 5"),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": 5}]}, "[0].output is 5"),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": 5}]}, "no messages"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": "x", "store": True}, "store"),
        (RESPONSES, {"input": "x", "truncation": "auto"}, "truncation"),
        (RESPONSES, {"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (RESPONSES, {"input": [{"type": "function_call", "name": 3}]}, "input[0]"),
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        (MESSAGES, {**ANY, "tools": [{"input_schema": {}}]}, "has no name"),
        (MESSAGES, {**ANY, "messages": [*HELLO, {"role": "assistant", "content": "He"}]},
         "assistant"),
        (MESSAGES, {**ANY, "messages": [{"role": "user", "content": [IMAGE]}]}, "'image'"),
        (MESSAGES, {**ANY, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
        ]}]}, "tool_result"),
        (MESSAGES, {**ANY, "system": [IMAGE]}, "system"),
        (MESSAGES, {**ANY, "container": "c"}, "container"),
        (MESSAGES, {**ANY, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "web_search_20250305"),
        (MESSAGES, {**ANY, "tools": [{"name": "f"}]}, "input_schema"),
        (MESSAGES, {**ANY, "tools": TYPED, "tool_choice": {"type": "tool", "name": "tim"}},
         "'tim'"),
        (MESSAGES, {**ANY, "tools": TYPED, "tool_choice": {"type": "some"}}, "'some'"),
        (MESSAGES, {**ANY, "output_config": {"format": {"type": "xml"}}}, "xml"),
        (MESSAGES, {**ANY, "output_config": {"format": {}}}, "output_config.format.type"),
        ("/tokenize", {}, "give prompt"),
        ("/detokenize", {"tokens": [10**6]}, "1000000"),
    ],
)  # fmt: skip
def test_bad_input_is_400_and_named(toy: Live, path: str, body: dict[str, Any], named: str) -> None:
    assert named in toy.refusal(path, 400, **body)
    assert named in toy.refusal(path, 400, **body, stream=True)


ENDS: list[tuple[str, dict[str, Any], Any]] = [
    (TEXT, {"prompt": "x"}, lambda last: last["error"]["type"]),
    (CHAT, {"messages": HELLO}, lambda last: last["error"]["type"]),
    (MESSAGES, ANY, lambda last: last["error"]["type"]),
    (RESPONSES, {"input": "x"}, lambda last: last["response"]["error"]["code"]),
]


@pytest.mark.parametrize(("path", "body", "kind"), ENDS)
def test_an_answer_that_its_request_ends_is_the_clients_fault(
    toy: Live, path: str, body: dict[str, Any], kind: Any
) -> None:
    """The text may not end yet, and may not go on."""
    body = {**body, "structured_outputs": {"regex": "abc"}, "min_tokens": 5, LIMITS[path]: 9}
    reason = toy.refusal(path, 400, **body)
    streamed = toy.http.post(path, json={**body, "stream": True})
    last = streamed.text.strip().splitlines()[-1]
    assert streamed.status_code == 200
    assert reason in last
    assert kind(json.loads(last.removeprefix("data: "))).startswith("invalid_")


NULLABLE = {
    TEXT: (
        {"prompt": "x"},
        "best_of echo frequency_penalty logit_bias logprobs n presence_penalty seed stop stream "
        "stream_options suffix top_p",
    ),
    CHAT: (
        {"messages": HELLO},
        "metadata top_logprobs top_p safety_identifier prompt_cache_key prompt_cache_retention "
        "service_tier modalities verbosity reasoning_effort max_completion_tokens "
        "frequency_penalty presence_penalty audio store moderation stream stop logit_bias logprobs "
        "n prediction seed stream_options response_format tools tool_choice parallel_tool_calls",
    ),
    "/v1/responses": (
        {"input": "x"},
        "metadata top_p safety_identifier prompt_cache_key prompt_cache_retention "
        "previous_response_id background max_tool_calls prompt service_tier truncation reasoning "
        "include parallel_tool_calls store instructions moderation stream stream_options "
        "conversation context_management text tools tool_choice top_logprobs",
    ),
    "/v1/messages": (
        {"messages": HELLO},
        "container context_management mcp_servers metadata output_config service_tier "
        "stop_sequences stream system thinking tool_choice tools top_k top_p",
    ),
}
"""By path: what a request needs, and the fields that may be null in the reference of its API."""


@pytest.mark.parametrize("path", NULLABLE)
def test_null_is_as_if_left_out(toy: Live, path: str) -> None:
    needed, nullable = NULLABLE[path]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**needed, limit: 5, "temperature": 0}

    def said(**fields: Any) -> Any:
        answer = toy.post(path, **body, **fields)
        return answer.get("choices") or answer.get("content") or answer["output"][0]["content"]

    assert said(**dict.fromkeys(nullable.split())) == said()
    flags = ("include_usage", "continuous_usage_stats", "include_speculation")
    assert said(stream_options=dict.fromkeys(flags)) == said()


def test_a_text_without_a_prompt_begins_a_document(toy: Live, real: Live) -> None:
    body = {"max_tokens": 5, "temperature": 0}
    (first,) = real.service.document_start()
    assert (
        real.post(TEXT, prompt=None, **body)["choices"]
        == real.post(TEXT, prompt=[first], **body)["choices"]
    )
    assert toy.post(TEXT, prompt=None, **body)["usage"]["prompt_tokens"] == 1


def test_a_large_body_is_read_as_a_small_one_and_has_a_bound(toy: Live) -> None:
    """Brackets and colons within a text are not values of the body."""
    text = '"[{:' * 50_000
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "seed": 1}
    small = toy.post(TEXT, **body)["choices"][0]["text"]
    assert toy.post(TEXT, **body, metadata={text: text})["choices"][0]["text"] == small
    assert "temperature" in toy.refusal(TEXT, 400, **body, temperature="a", metadata={text: 1})
    for value in ([[]] * 150_001, [{}] * 150_001, [{"a": 1}] * 75_000):
        assert "150000 lists" in toy.refusal(TEXT, 413, **body, metadata={text: value})


@pytest.mark.parametrize("told", [True, False], ids=["longest token known", "unknown"])
def test_a_text_that_cannot_fit_is_not_tokenized(
    toy: Live, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    tokenizer = toy.service.generator.tokenizer
    if not told:
        monkeypatch.setattr(tokenizer, "fewest", lambda _: 0)
    over = "a" * (toy.service.context * 300)
    assert toy.post("/tokenize", prompt="a" * 200)["count"] > toy.service.context
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    conversation = [{"role": "user", "content": over}]
    for path, body in {
        "/tokenize": {"content": over},
        "/v1/messages/count_tokens": {"messages": conversation},
        TEXT: {"prompt": ["a", over]},
        "/v1/messages": {"messages": conversation, "max_tokens": 1},
    }.items():
        assert "shorten" in toy.refusal(path, 400, **body)


def test_other_models_and_paths_are_404(toy: Live) -> None:
    assert "'toy'" in toy.refusal(TEXT, 404, prompt="x", model="gpt-4")
    assert toy.http.get("/v1/models/gpt-4").json()["error"]["code"] == "model_not_found"
    assert toy.http.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert toy.http.get(TEXT).status_code == 405


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "the body"),
        (b"{", "line 1, column 2"),
        (b"[" * 100_000, "too deep"),
        (b'{"prompt": NaN}', "NaN is not a number"),
        (b"\xff\xfe{", "not a JSON object"),
        (b'"text"', "'text'; expected an object"),
    ],
)
def test_bodies_that_are_no_object(toy: Live, body: bytes, named: str) -> None:
    answer = toy.http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_a_server_without_a_template_points_to_completions(tokenizer: Tokenizer) -> None:
    with serving(generator(TableEngine(1, vocab=tokenizer.size), None, tokenizer)) as live:
        live.service.template = None
        assert "/v1/completions" in live.refusal(CHAT, 400, messages=HELLO)


def test_keys_open_everything_but_the_public_paths(tokenizer: Tokenizer) -> None:
    toys = rows(packed, 2, tokenizer)
    with serving(toys, api_keys=("right", "other"), max_body_bytes=1000) as live:
        for path in ("/health", "/ready", "/version", "/metrics", "/"):
            assert live.http.get(path).status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"},
                        {"X-Api-Key": "rig"}):  # fmt: skip
            answer = live.http.get("/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
        for headers in ({"Authorization": "Bearer right"}, {"X-Api-Key": "other"}):
            assert live.http.get("/v1/models", headers=headers).status_code == 200
        key = {"Authorization": "Bearer right", "Content-Type": "application/json"}
        long = {"prompt": "x" * 1000}
        assert live.http.post(TEXT, json=long, headers=key).status_code == 413

        def parts() -> Any:  # no length is told beforehand
            for _ in range(20):
                yield b" " * 100

        with httpx.Client(base_url=live.url) as other:
            assert other.post(TEXT, content=parts(), headers=key).status_code == 413


def test_options_out_of_range() -> None:
    with pytest.raises(RequestError, match="expected one such as"):
        ServerOptions(allow_origins=("app.example/path",))
    with pytest.raises(RequestError, match="without scheme and port"):
        ServerOptions(allow_hosts=("llm.example:80",))
    with pytest.raises(RequestError, match="max_queue"):
        ServerOptions(max_queue=-1)
    with pytest.raises(RequestError, match="empty"):
        ServerOptions(api_keys=("",))
