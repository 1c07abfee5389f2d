"""Anthropic's Messages: the chat route's text, in blocks that its own client reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from serve.support import TOOLS, Live, serving
from specrt.serve.messages_routes import CountBody
from specrt.text.tokenizer import Tokenizer
from support.toy import TableEngine, generator

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
BODY = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
FLAT = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]


@pytest.fixture(scope="module")
def client(toy: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=toy.url, api_key="none", max_retries=0) as made:
        yield made


def test_the_text_is_that_of_the_chat_route(toy: Live, client: anthropic.Anthropic) -> None:
    chat = toy.post(
        "/v1/chat/completions", max_tokens=20, temperature=0, ignore_eos=True,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab"}],
    )  # fmt: skip
    wanted = chat["choices"][0]["message"]["content"]
    options: dict[str, Any] = {
        "model": "toy", "max_tokens": 20, "system": [{"type": "text", "text": "be brief"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": one} for one in "ab"]}],
        "extra_body": {"ignore_eos": True, "gamma": 4, "temperature": 0},
    }  # fmt: skip
    whole = client.messages.create(**options)
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == wanted
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 20)
    read = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert read == chat["usage"]["prompt_tokens"]
    told = whole.metrics
    assert told["specrt"]["drafted"] == told["speculative_decoding"]["num_draft_tokens"] > 0
    with client.messages.stream(**options) as stream:
        events = [event for event in stream if event.type != "text"]
        final: Any = stream.get_final_message()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.content[0].text == wanted
    assert final.usage.output_tokens == 20
    delta: Any = events[-2]
    assert delta.metrics["specrt"]["drafted"] == told["specrt"]["drafted"]
    counted = client.messages.count_tokens(
        model="toy", system=options["system"], messages=options["messages"]
    )
    assert counted.input_tokens == read


def test_what_the_operator_says_is_a_system_message(toy: Live) -> None:
    user, again = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    late = {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    for messages, system, as_chat in (
        ([late, user], None, [{"role": "system", "content": "be brief"}, user]),
        ([late, user], "hi", [{"role": "system", "content": "hi\n\nbe brief"}, user]),
        ([user, late, again], None, [user, {"role": "system", "content": "be brief"}, again]),
        ([user, late], None, [user, {"role": "system", "content": "be brief"}]),
    ):
        body = {"max_tokens": 20, "temperature": 0}
        told = toy.post(PATH, messages=messages, system=system, **body)
        chat = toy.post("/v1/chat/completions", messages=as_chat, **body)
        assert told["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    tool = [{"type": "tool_use", "name": "f", "input": {}}]
    assert "tool_use" in toy.refusal(
        PATH, 400, messages=[{"role": "system", "content": tool}], max_tokens=3
    )


def test_stop_sequences(real: Live) -> None:
    live = real.post(PATH, messages=HELLO, max_tokens=40, temperature=0)["content"][0]["text"]
    stop = live[10:14]
    told = real.post(PATH, messages=HELLO, max_tokens=40, temperature=0, stop_sequences=[stop])
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)
    assert told["content"][0]["text"] == live[: live.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time"}])
def test_tools_are_used_and_their_results_read(
    client: anthropic.Anthropic, choice: dict[str, Any]
) -> None:
    options: dict[str, Any] = {
        "model": "toy", "max_tokens": 100, "messages": HELLO, "tools": FLAT, "tool_choice": choice,
        "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = client.messages.create(**options)
    (used,) = whole.content
    assert used.type == "tool_use"
    assert whole.stop_reason == "tool_use"
    assert used.input["city"] in ("Oslo", "Rome")
    with client.messages.stream(**options) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (used.name, used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "noon", "is_error": False}
    turns: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "…", "signature": ""}, used.to_dict()
        ]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
    ]  # fmt: skip
    client.messages.create(model="toy", max_tokens=5, messages=turns, tools=options["tools"])


def test_thinking_and_calls_of_earlier_turns_reach_the_template() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
    ]  # fmt: skip
    turns = [*HELLO, {"role": "assistant", "content": blocks}, *HELLO]
    body = CountBody.model_validate({"messages": turns})
    message = body.chat().messages[1].plain()
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_errors_are_of_the_kinds_that_the_client_knows(
    toy: Live, client: anthropic.Anthropic, tokenizer: Tokenizer
) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="claude", max_tokens=5, messages=HELLO)  # type: ignore[arg-type]
    body: Any = missing.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    toys = generator(TableEngine(1, vocab=tokenizer.size), None, tokenizer)
    with serving(toys, api_keys=("right",)) as live:
        for key, kind in (("wrong", anthropic.AuthenticationError), ("right", None)):
            with anthropic.Anthropic(base_url=live.url, api_key=key, max_retries=0) as other:
                if kind:
                    with pytest.raises(kind):
                        other.messages.count_tokens(model="toy", messages=HELLO)  # type: ignore[arg-type]
                else:
                    other.messages.count_tokens(model="toy", messages=HELLO)  # type: ignore[arg-type]
        live.service.admission.draining = True
        answer = live.http.post(PATH, json=BODY, headers={"X-Api-Key": "right"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")
