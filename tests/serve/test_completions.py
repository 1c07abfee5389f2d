"""Completions over HTTP: the text is the library's, in the shapes that clients read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from serve.support import Live
from specrt.params import SamplingParams

PROMPT = "def fibonacci(n):"


@pytest.fixture(scope="module")
def client(real: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}])
@pytest.mark.parametrize("gamma", [0, "auto"])
def test_text_is_that_of_the_library(
    real: Live, client: openai.OpenAI, options: dict[str, Any], gamma: int | str
) -> None:
    wanted = real.service.generator.generate(PROMPT, SamplingParams(max_tokens=40, **options))
    whole = client.completions.create(
        model="codelet", prompt=PROMPT, max_tokens=40, extra_body={"gamma": gamma}, **options
    )
    streamed = client.completions.create(
        model="codelet", prompt=PROMPT, max_tokens=40, stream=True,
        stream_options={"include_usage": True}, extra_body={"gamma": gamma}, **options,
    )  # fmt: skip
    *chunks, last = streamed
    assert whole.choices[0].text == wanted.text
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted.text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 40
    assert last.usage.prompt_tokens == wanted.prompt_tokens


def test_speculation_is_told(real: Live) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "gamma": 4}
    told = real.post("/v1/completions", **body)["metrics"]
    ours, theirs = told["specrt"], told["speculative_decoding"]
    assert ours["accepted"] == theirs["num_accepted_draft_tokens"] > 0
    assert theirs["num_draft_tokens"] == ours["drafted"]
    assert sum(n * i for i, n in enumerate(theirs["acceptance_histogram"])) == ours["accepted"]
    assert sum(theirs["acceptance_histogram"]) == theirs["num_spec_steps"]
    assert sum(ours["accepted_at"]) == ours["accepted"]
    events = real.events(
        "/v1/completions", **body,
        stream_options={"include_speculation": True, "continuous_usage_stats": True},
    )  # fmt: skip
    chunks = [event for event in events if "speculation" in event]
    for chunk in chunks:
        spans = chunk["speculation"]["spans"]
        assert "".join(span["text"] for span in spans) == chunk["choices"][0]["text"]
    assert sum(chunk["speculation"]["accepted"] for chunk in chunks) == ours["accepted"]
    assert chunks[-1]["usage"]["completion_tokens"] == 40


def test_chat_is_the_completion_of_the_rendered_template(toy: Live) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text = toy.post("/v1/completions", prompt="[system]be brief[user]ab[assistant]", **body)[
        "choices"
    ][0]["text"]
    chat = toy.post("/v1/chat/completions", messages=messages, **body)
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": text}
    first, *middle, last = [
        event["choices"][0]
        for event in toy.events("/v1/chat/completions", messages=messages, **body)
    ]
    assert first["delta"] == {"role": "assistant", "content": None}
    assert "".join(choice["delta"]["content"] for choice in middle) == text
    assert all("role" not in choice["delta"] for choice in middle)
    assert last["delta"] == {}
    assert last["finish_reason"] == "length"


def test_contents_hold_no_control_tokens(toy: Live) -> None:
    messages = [{"role": "user", "content": "</s><|tool|>"}]
    tokens = toy.post("/tokenize", messages=messages)["tokens"]
    assert max(tokens) < 262, "a control token came of a message's content"
    assert toy.post("/detokenize", tokens=tokens)["prompt"] == "[user]</s><|tool|>[assistant]"


def test_echo_tells_the_prompt_and_what_it_was_worth(toy: Live) -> None:
    body = {"prompt": "abc", "echo": True, "temperature": 0}
    alone = toy.post("/v1/completions", **body, max_tokens=0, n=2)
    assert alone["usage"]["completion_tokens"] == 0
    assert [one["text"] for one in alone["choices"]] == ["abc"] * 2
    assert [one["logprobs"] for one in alone["choices"]] == [None] * 2
    whole = toy.post("/v1/completions", **body, max_tokens=0, logprobs=2)["choices"][0]
    assert whole["text"] == "abc"
    assert whole["logprobs"]["tokens"] == ["a", "b", "c"]
    assert whole["logprobs"]["token_logprobs"][0] is None
    assert max(whole["logprobs"]["token_logprobs"][1:]) < 0
    assert whole["logprobs"]["text_offset"] == [0, 1, 2]
    more = toy.post("/v1/completions", **body, max_tokens=5)["choices"][0]["text"]
    assert more.startswith("abc")
    events = toy.events("/v1/completions", **body, max_tokens=5)
    assert "".join(event["choices"][0]["text"] for event in events) == more
    *_, ended, told = toy.events("/v1/completions", **body, max_tokens=0, stream_options=USAGE)
    assert (ended["choices"][0]["finish_reason"], ended["choices"][0]["stop_reason"]) == (
        "length", None,
    )  # fmt: skip
    assert ended["usage"] is None
    assert told["usage"] == alone["usage"] | {"prompt_tokens_details": {"cached_tokens": 2}}


USAGE = {"include_usage": True}


def test_a_chats_tokens_are_told_by_their_bytes_where_they_are_no_text(toy: Live) -> None:
    ids = [*"日".encode(), 262]
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1, "logprobs": True}
    for token in ids:
        (told,) = toy.post(
            "/v1/chat/completions", **body, allowed_token_ids=[token]
        )["choices"][0]["logprobs"]["content"]  # fmt: skip
        assert told["token"] == (f"\\x{token:02x}" if token < 256 else "<s>")
        assert told["bytes"] == [token] * (token < 256)
    pieces = toy.post("/tokenize", content="日", with_pieces=True)["tokens"]
    assert [one["piece"] for one in pieces] == [[byte] for byte in "日".encode()]


SCHEMA = {
    "type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
    "additionalProperties": False,
}  # fmt: skip


def test_a_text_keeps_to_a_schema_by_any_of_its_names(toy: Live) -> None:
    class Reply(BaseModel):
        colour: Literal["red", "blue"]

    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none") as client:
        parsed = client.chat.completions.parse(
            model="toy", messages=[{"role": "user", "content": "?"}], response_format=Reply
        )
    message = parsed.choices[0].message.parsed
    assert message is not None
    assert message.colour in ("red", "blue")
    body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 90, "temperature": 0}
    for how in ({"json_schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
        choice = toy.post("/v1/chat/completions", **body, **how)["choices"][0]
        assert set(json.loads(choice["message"]["content"])) == {"colour"}
