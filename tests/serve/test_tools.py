"""Tools: told to the template, forced by a grammar, found in a text however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.support import TOOLS, Live
from specrt.serve.tool_calls import CallStream, ToolCall, ToolCallParser

BODY = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "max_tokens": 100}


def streamed_calls(events: list[Any]) -> list[Any]:
    return [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]


@pytest.mark.parametrize("less", [0, 9, 14, 1000])
def test_a_forced_call_that_is_cut_is_a_call(toy: Live, less: int) -> None:
    """With as much of its arguments as there was room for, on every route."""
    body = {**BODY, "tool_choice": "required", "seed": 1}
    whole = toy.post("/v1/chat/completions", **body)
    function = whole["choices"][0]["message"]["tool_calls"][0]["function"]
    most = max(1, whole["usage"]["completion_tokens"] - less)
    choice = toy.post("/v1/chat/completions", **body | {"max_tokens": most})["choices"][0]
    assert choice["finish_reason"] == ("length" if less else "tool_calls")
    assert not choice["message"]["content"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert [call["name"] for call in calls] == ([function["name"]] if less < 1000 else [])
    arguments = "".join(call["arguments"] for call in calls)
    assert function["arguments"].startswith(arguments)
    assert (arguments == function["arguments"]) == (less == 0)
    events = toy.events("/v1/chat/completions", **body | {"max_tokens": most})
    streamed = streamed_calls(events)
    assert "".join(call["function"]["arguments"] for call in streamed) == arguments
    assert not any(event["choices"][0]["delta"].get("content") for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = toy.post("/v1/responses", input="?", tools=flat, tool_choice="required", seed=1,
                        max_output_tokens=most)  # fmt: skip
    items = [item for item in response["output"] if item["type"] == "function_call"]
    status = "incomplete" if less else "completed"
    assert [(i["arguments"], i["status"]) for i in items] == [(arguments, status)] * len(calls)
    assert response["status"] == status
    used = [{"name": t["name"], "input_schema": t["parameters"]} for t in flat]
    message = toy.post("/v1/messages", messages=BODY["messages"], tools=used, seed=1,
                       tool_choice={"type": "any"}, max_tokens=most)  # fmt: skip
    assert [b["name"] for b in message["content"] if b["type"] == "tool_use"] == [
        call["name"] for call in calls
    ]
    assert message["stop_reason"] == ("max_tokens" if less else "tool_use")


CITY = {"enum": ["Oslo", "Rome"]}
NESTED: list[dict[str, Any]] = [
    {"properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": CITY}},
    {"properties": {"city": {"$ref": "#/definitions/a~1b%25"}}, "definitions": {"a/b%": CITY}},
    {"properties": {"name": CITY, "city": {"$ref": "#/properties/name"}}},
    {"properties": {"city": {"$ref": "c"}}, "$defs": {"a": {"$id": "c", **CITY}}, "$id": "tool"},
    {"properties": {"city": {"$ref": "#c"}}, "$defs": {"a": {"$anchor": "c", **CITY}}},
]


@pytest.mark.parametrize("schema", NESTED, ids=lambda schema: str(schema)[:60])
def test_references_of_a_tool_lead_within_that_tool(toy: Live, schema: dict[str, Any]) -> None:
    """Another tool has definitions of the same names."""
    schema |= {"type": "object", "required": ["city"], "additionalProperties": False}
    other = json.loads(json.dumps(schema).replace("Oslo", "Bonn").replace("Rome", "Bern"))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": one}}
        for name, one in {"other": other, "time": schema}.items()
    ]
    body, found = {**BODY, "tools": tools, "tool_choice": "required"}, set()
    for seed in range(6):
        name, arguments = _call_of(toy.post("/v1/chat/completions", **body, seed=seed))
        assert arguments["city"] in (["Oslo", "Rome"] if name == "time" else ["Bonn", "Bern"])
        found.add(name)
    assert found == {"other", "time"}


def _call_of(answer: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of the one call of an answer."""
    call = answer["choices"][0]["message"]["tool_calls"][0]["function"]
    return call["name"], json.loads(call["arguments"])


ONLY_A: dict[str, Any] = {
    "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        (None, {}), ({}, {}), (ONLY_A, {"a": 1}), (ONLY_A | {"type": ["null", "object"]}, {"a": 1}),
        ({"$ref": "#/$defs/A", "$defs": {"A": ONLY_A}}, {"a": 1}),
        ({"anyOf": [ONLY_A, {"type": "null"}]}, {"a": 1}),
    ],
)  # fmt: skip
def test_arguments_of_a_forced_call_are_an_object(toy: Live, parameters: Any, wanted: Any) -> None:
    """Also where the schema names no type, which admits numbers and text."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {**BODY, "tools": [tool], "tool_choice": "required"}
    for seed in range(2):
        answer = toy.post("/v1/chat/completions", **body, seed=seed)
        assert _call_of(answer) == ("f", wanted)


@pytest.mark.parametrize(
    "parameters",
    [[1], "x", {"properties": {"a": {"$ref": "#/$defs/b"}}}, {"type": "string"}, {"type": []}],
)
def test_parameters_that_are_no_schema_are_refused(toy: Live, parameters: Any) -> None:
    function = {"name": "f", "parameters": parameters}
    body = {**BODY, "tools": [{"type": "function", "function": function}]}
    assert "expected" in toy.refusal("/v1/chat/completions", 400, **body, tool_choice="required")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_template_and_the_grammar_know_the_allowed_tools_alone(toy: Live, mode: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "tools": TOOLS, "max_tokens": 120, "temperature": 0}
    allowed = [{"type": "function", "function": {"name": "time"}}]
    some = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    few = toy.post("/v1/chat/completions", **body, tool_choice=some)
    choice = "auto" if mode == "auto" else "required"
    alone = toy.post("/v1/chat/completions", **body | {"tools": TOOLS[1:]}, tool_choice=choice)
    none = toy.post("/v1/chat/completions", **body, tool_choice="none")
    told = [one["usage"]["prompt_tokens"] for one in (none, few, alone)]
    assert told[0] < told[1] == told[2]
    said, same = (one["choices"][0]["message"] for one in (few, alone))
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


@given(
    parts=st.lists(
        st.sampled_from(
            ["hello ", "<tool", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}',
             '{"name": "g", "arguments": {"x": [1, "</tool_call>"]}}', "\n", "{}", "<", "<think>",
             "</think>", '{"name": "h", "arguments": {"a": "\\"<tool_call>{', '}', '"}}',
             '{"arguments": "{}", "name": "i"}', "\\", '"']
        ), max_size=12,
    ),
    cuts=st.lists(st.integers(1, 9), max_size=30),
    reasoning=st.booleans(),
)  # fmt: skip
def test_calls_are_found_however_a_text_is_cut(
    parts: list[str], cuts: list[int], reasoning: bool
) -> None:
    text = "".join(parts)
    whole = ToolCallParser(CallStream(reasoning=reasoning))
    wanted = joined([*whole.push(text), *whole.finish()])
    cut, found = ToolCallParser(CallStream(reasoning=reasoning)), []
    for length in cuts:
        found += cut.push(text[:length])
        text = text[length:]
    found += [*cut.push(text), *cut.finish()]
    assert joined(found) == wanted


def joined(parts: list[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls


ONE, TWO = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g"}'


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        (f"<tool_call>\n{ONE}\n</tool_call>", "", ['f{"a": 1}']),
        (f"so: <tool_call>{ONE}</tool_call>", "so: ", ['f{"a": 1}']),
        (f"<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>", "", ['f{"a": 1}', "g{}"]),
        (f"<tool_call>{ONE}\n{TWO}</tool_call> so", " so", ['f{"a": 1}', "g{}"]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        (f"<tool_call>{ONE}", "", ['f{"a": 1}']),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_c', "", ['f{"a": "</tool_c']),
        ("a < b", "a < b", []),
        # Blanks right after a call are text where text follows, and blanks after text are text.
        (f"<tool_call>{TWO}</tool_call> \n", "", ["g{}"]),
        (f"<tool_call>{TWO}</tool_call> so \n", " so \n", ["g{}"]),
        (f"<tool_call>{TWO}</tool_call> so <tool_call>{TWO}</tool_call>", " so ", ["g{}", "g{}"]),
        # A tag within a string ends nothing, nor does one that opens.
        ('<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>"}}</tool_call>', "",
         ['f{"a": "x</tool_call>"}']),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\"}}<tool_call>"}}</tool_call>', "",
         ['f{"a": "\\"}}<tool_call>"}']),
        (f"<tool_call><tool_call>{ONE}</tool_call>", "<tool_call>", ['f{"a": 1}']),
        # Mistakes that models make: a brace too few or too many, a string left open.
        (f"<tool_call>{ONE[:-1]}</tool_call>.", ".", ['f{"a": 1}']),
        (f"<tool_call>{ONE}}}\n</tool_call>.", ".", ['f{"a": 1}']),
        (f"<tool_call>{ONE[:-2]}, b: no}}}}</tool_call>", "", ['f{"a": 1, b: no}']),
        ('<tool_call>{"name": "f", "arguments": {"a": "x}}\n</tool_call>.', ".",
         ['f{"a": "x}}']),
        # Other orders and kinds.
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ['f{"a": 1}']),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ['f{"a": 1}']),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", ["f{}"]),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", ["f{}"]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}, "id": 7}</tool_call>', "",
         ['f{"a": 1}']),
        # What is only thought of is not called.
        (f"<think>\n<tool_call>{ONE}</tool_call></think><tool_call>{TWO}</tool_call>",
         f"<think>\n<tool_call>{ONE}</tool_call></think>", ["g{}"]),
        (f"so <think><tool_call>{ONE}</tool_call>", "so <think>", ['f{"a": 1}']),
    ],
)  # fmt: skip
def test_what_is_no_call_stays_text(text: str, rest: str, calls: list[str]) -> None:
    for pieces in ([text], [*text]):
        parser, parts = ToolCallParser(), []
        for piece in pieces:
            parts += parser.push(piece)
        found_text, found = joined([*parts, *parser.finish()])
        assert found_text == rest
        assert [call.name + call.arguments for call in found] == calls
