"""Tools: told to the template, forced by a grammar, found in a text however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.support import TOOLS, Live
from specrt.serve.bodies import ChatBody
from specrt.serve.tools import ToolCall, ToolCallParser, tool_use

BODY = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "max_tokens": 100}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_is_a_call(toy: Live, choice: Any, seed: int) -> None:
    body = {**BODY, "tool_choice": choice, "seed": seed}
    choice_ = toy.post("/v1/chat/completions", **body)["choices"][0]
    assert choice_["finish_reason"] == "tool_calls"
    (call,) = choice_["message"]["tool_calls"]
    assert choice_["message"]["content"] is None
    assert call["function"]["name"] in (["time"] if choice != "required" else ["time", "weather"])
    assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    events = toy.events("/v1/chat/completions", **body)
    deltas = [event["choices"][0] for event in events]
    (streamed,) = [c for d in deltas for c in d["delta"].get("tool_calls", [])]
    assert streamed["function"] == call["function"]
    assert streamed["index"] == 0
    assert deltas[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_template_and_the_grammar_know_the_allowed_tools_alone(toy: Live, mode: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 120, "temperature": 0}
    allowed = [{"type": "function", "function": {"name": "time"}}]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    few = toy.post("/v1/chat/completions", **body, tool_choice=some)
    choice = "auto" if mode == "auto" else "required"
    alone = toy.post("/v1/chat/completions", **body | {"tools": TOOLS[1:]}, tool_choice=choice)
    assert few["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    said, same = (told["choices"][0]["message"] for told in (few, alone))
    assert said["content"] == same["content"]
    if mode == "required":
        assert [call["function"]["name"] for call in said["tool_calls"]] == ["time"]
        flat = [tool["function"] | {"type": "function"} for tool in TOOLS]
        chosen = {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": "time"}],
        }
        told = toy.post("/v1/responses", input="hello", tools=flat, tool_choice=chosen,
                        max_output_tokens=120, temperature=0)  # fmt: skip
        assert [item["name"] for item in told["output"]] == ["time"]


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"mode": "auto", "tools": []}, "allowed_tools"),
        ({"mode": "any", "tools": TOOLS}, "'auto' or 'required'"),
        ({"mode": "auto", "tools": ["time"]}, "function with a name"),
        ({"mode": "auto", "tools": [{"type": "function", "function": {"name": "tim"}}]}, "'time'"),
        (None, "allowed_tools"),
        ("time", "allowed_tools"),
    ],
)
def test_allowed_tools_of_another_form_are_refused(toy: Live, choice: Any, named: str) -> None:
    some = {"type": "allowed_tools", "allowed_tools": choice}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    assert named in toy.refusal("/v1/chat/completions", 400, **body, tool_choice=some)


@pytest.mark.parametrize("several", [None, True, False])
def test_an_answer_has_one_call_where_calls_may_not_be_parallel(
    toy: Live, several: bool | None
) -> None:
    two = {"regex": 2 * '<tool_call>\\{"name": "time"\\}</tool_call>'}
    body = {**BODY, "structured_outputs": two, "parallel_tool_calls": several}
    choice = toy.post("/v1/chat/completions", **body)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == (1 if several is False else 2)
    assert choice["finish_reason"] == "tool_calls"
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in TOOLS
    ]
    message = toy.post("/v1/messages", **body | {
        "tools": tools,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": several is False},
    })  # fmt: skip
    assert len(message["content"]) == (1 if several is False else 2)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize(
    "constraint", [{"response_format": {"type": "json_object"}}, {"grammar": 'root ::= "a"'}]
)
def test_a_forced_call_and_a_constraint_are_refused(toy: Live, constraint: dict[str, Any]) -> None:
    body = {**BODY, "tool_choice": "required", **constraint}
    assert "tool_choice" in toy.refusal("/v1/chat/completions", 400, **body)


def test_the_template_is_told_of_tools(toy: Live) -> None:
    answers = [
        toy.post("/v1/chat/completions", **BODY, tool_choice=choice, temperature=0)
        for choice in ("auto", "none")
    ]
    with_tools, without = (one["usage"]["prompt_tokens"] for one in answers)
    assert with_tools > without


@given(
    parts=st.lists(
        st.sampled_from(
            ["hello ", "<tool", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}',
             '{"name": "g", "arguments": {"x": [1, "</tool"]}}', "\n", "{}", "<"]
        ), max_size=12,
    ),
    cuts=st.lists(st.integers(1, 9), max_size=30),
)  # fmt: skip
def test_calls_are_found_however_a_text_is_cut(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    whole = ToolCallParser()
    wanted = joined([*whole.push(text), *whole.finish()])
    cut, found = ToolCallParser(), []
    for length in cuts:
        found += cut.push(text[:length])
        text = text[length:]
    found += [*cut.push(text), *cut.finish()]
    assert joined(found) == wanted


def joined(parts: list[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)).rstrip(), calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", ["f"]),
        ('so: <tool_call>{"name": "f", "arguments": {}}</tool_call>', "so: ", ["f"]),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>', "",
         ["f", "g"]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": "f", "arguments": {}}', "", ["f"]),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ("a < b", "a < b", []),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str, rest: str, calls: list[str]) -> None:
    parser = ToolCallParser()
    found_text, found = joined([*parser.push(text), *parser.finish()])
    assert (found_text, [call.name for call in found]) == (rest.rstrip(), calls)


def test_calls_of_earlier_turns_are_read_as_objects(toy: Live) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    toy.post("/v1/chat/completions", messages=messages, max_tokens=3)
    call["function"] = {"name": "f", "arguments": "{"}
    assert "'f'" in toy.refusal("/v1/chat/completions", 400, messages=messages)


def test_no_tools_is_no_tool_use() -> None:
    messages = [{"role": "user", "content": "x"}]
    for choice, tools in ((None, None), ("auto", [])):
        body = ChatBody.model_validate(
            {"messages": messages, "tools": tools, "tool_choice": choice}
        )
        assert tool_use(body).parser is None
        assert tool_use(body).described is None
