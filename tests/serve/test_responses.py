"""Responses: the chat route's text in another protocol's objects, events in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from serve.support import TOOLS, Live
from specrt.serve.responses_routes import ResponsesBody

PATH = "/v1/responses"
BODY = {"input": "the thing", "max_output_tokens": 20, "temperature": 0, "ignore_eos": True}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def client(toy: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat_text(toy: Live, messages: list[dict[str, Any]], **options: Any) -> str:
    body = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "messages": messages}
    answer = toy.post("/v1/chat/completions", **(body | options))
    return str(answer["choices"][0]["message"]["content"])


def test_the_text_is_that_of_the_chat_route(toy: Live, client: openai.OpenAI) -> None:
    wanted = chat_text(
        toy, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the thing"}]
    )
    options: dict[str, Any] = {
        "model": "toy", "instructions": "be brief", "input": "the thing", "store": False,
        "max_output_tokens": 20, "temperature": 0, "reasoning": {"effort": "low"},
        "extra_body": {"ignore_eos": True, "gamma": 4},
    }  # fmt: skip
    whole = client.responses.create(**options)
    assert whole.output_text == wanted
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 20
    assert whole.store is False
    told = whole.metrics
    assert told["specrt"]["drafted"] == told["speculative_decoding"]["num_draft_tokens"] > 0
    events = [*client.responses.create(**options, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * deltas, "output_text.done", "content_part.done",
        "output_item.done", "incomplete",
    ]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == wanted
    last: Any = events[-1]
    assert last.response.output_text == wanted
    assert last.response.metrics["specrt"]["drafted"] == told["specrt"]["drafted"]


def test_functions_are_called_and_their_results_read(toy: Live, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "toy", "input": [{"role": "user", "content": "?"}], "tools": FLAT,
        "tool_choice": {"type": "function", "name": "time"}, "temperature": 0,
    }  # fmt: skip
    (call,) = client.responses.create(**options).output
    assert call.type == "function_call"
    assert call.name == "time"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    with client.responses.stream(**options) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
    deltas = kinds.count("function_call_arguments.delta")
    assert deltas > 1
    assert kinds == [
        "created", "in_progress", "output_item.added",
        *["function_call_arguments.delta"] * deltas, "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    items = [
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "?"}]},
        call.to_dict(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "noon"},
    ]
    function = {"name": "time", "arguments": call.arguments}
    wanted = chat_text(
        toy,
        [
            {"role": "user", "content": "?"},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
        ],
    )
    assert client.responses.create(
        model="toy", input=items, max_output_tokens=20, temperature=0,
        extra_body={"ignore_eos": True},
    ).output_text == wanted  # fmt: skip


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": "so"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"},
    ],
)
def test_reasoning_of_earlier_turns_reaches_the_template(item: dict[str, Any]) -> None:
    for thought in (
        {"content": [{"type": "reasoning_text", "text": "hm"}], "summary": []},
        {"summary": [{"type": "summary_text", "text": "hm"}]},
    ):
        asked = {"role": "user", "content": "?"}
        items = [asked, {"type": "reasoning", **thought}, item, asked]
        _, message, _ = ResponsesBody.model_validate({"input": items}).chat().messages
        plain = message.plain()
        assert plain["reasoning_content"] == "hm"
        assert plain["content"] == item.get("content")
        assert ("tool_calls" in plain) == ("name" in item)
