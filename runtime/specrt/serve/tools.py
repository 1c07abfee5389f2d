"""Tools: what a model is told of them, calls that a grammar forces, calls found in a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from specrt.errors import RequestError, did_you_mean
from specrt.serve.bodies import MOST_SCHEMA, ChatBody
from specrt.text.detokenizer import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""How models of the Hermes and Qwen families write a call; no other form is read."""

_MOST_TOOLS = 128


class ToolCall(NamedTuple):
    """A function to call, and the JSON text of its arguments."""

    name: str
    arguments: str

    def to_json(self, index: int | None = None) -> dict[str, Any]:
        """Return OpenAI's object; in a stream it has an index."""
        call = {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return call if index is None else {"index": index, **call}


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, and how they are to be used."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As the template is to describe them; empty where none may be called."""
    forced: str | None = None
    """`required`, or the name of the one function to call; None where the model is free."""
    several: bool = True
    """Whether an answer may have more calls than one."""

    @property
    def described(self) -> Sequence[Mapping[str, Any]] | None:
        """What a chat template is given: None without tools."""
        return self.tools or None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the text: behind the one call that may be made."""
        free = self.tools and self.forced is None
        return (CLOSE,) if free and not self.several else ()

    def schema(self) -> dict[str, Any] | None:
        """Return the schema that the text must match; None where the model is free."""
        if self.forced is None:
            return None
        calls = [
            _call_schema(tool["function"])
            for tool in self.tools
            if self.forced in ("required", tool["function"]["name"])
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}

    @property
    def parser(self) -> ToolCallParser | None:
        """What finds the calls in a completion; None where there can be none."""
        if not self.tools:
            return None
        return ForcedCallParser() if self.forced is not None else ToolCallParser()


def tool_use(body: ChatBody) -> ToolUse:
    """Return how tools are to be used.

    Raises: RequestError for tools or a choice of another form.
    """
    tools: Sequence[Mapping[str, Any]] = body.tools or ()
    choice = body.tool_choice
    names = _names(tools)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, names = _allowed(choice, names)
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    if choice in (None, "auto"):
        return ToolUse(tools, several=body.parallel_tool_calls is not False)
    if choice == "none":
        return ToolUse()
    if not names:
        raise RequestError("tool_choice was given without tools; give tools, or leave it out")
    if choice == "required":
        return ToolUse(tools, "required")
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {json.dumps(choice)[:200]}; expected 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": ...}}'
        )
    if name not in names:
        raise RequestError(f"tool_choice names {name!r}{did_you_mean(name, names)}")
    return ToolUse(tools, name)


def _allowed(choice: Mapping[str, Any], known: Sequence[str]) -> tuple[str, list[str]]:
    """Return whether a call must be made, as a choice, and the names that may be called.

    Raises: RequestError for another form, and for a tool that is not there.
    """
    given = choice.get("allowed_tools")
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, Mapping) else ("", 0)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise RequestError(
            f"tool_choice is {json.dumps(choice)[:200]}; expected allowed_tools with a mode, "
            "'auto' or 'required', and tools"
        )
    names = _names([tool if isinstance(tool, Mapping) else {} for tool in tools])
    for name in names:
        if name not in known:
            raise RequestError(f"tool_choice allows {name!r}{did_you_mean(name, known)}")
    return mode, names


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(tools) > _MOST_TOOLS:
        raise RequestError(f"{len(tools)} tools were given; expected up to {_MOST_TOOLS}")
    if len(json.dumps(tools)) > MOST_SCHEMA:
        raise RequestError(f"tools have more than {MOST_SCHEMA} characters; shorten them")
    names = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type", "function") != "function" or not isinstance(name, str) or not name:
            raise RequestError(
                f"tools[{number}] is no function with a name; expected "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
        if name == "required":
            raise RequestError(f"tools[{number}] is named 'required', which is a tool_choice")
        names.append(name)
    return names


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call, as Hermes and Qwen write one."""
    parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def call_parts(text: str, use: ToolUse) -> list[str | ToolCall]:
    """Return a whole text in parts: pieces of text, and the calls between them."""
    parser = use.parser
    parts = [text] if parser is None else [*parser.push(text), *parser.finish()]
    return [part for part in parts if part]


class ToolCallParser:
    """Finds calls in a text as it comes: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    What is no call stays text, also between the tags.
    """

    def __init__(self) -> None:
        self._text = ""
        self._inside = False
        self._called = False

    def push(self, text: str) -> list[str | ToolCall]:
        """Return what became certain: pieces of text, and calls."""
        self._text += text
        parts: list[str | ToolCall] = []
        while True:
            tag = CLOSE if self._inside else OPEN
            at = self._text.find(tag)
            if at < 0:
                break
            before, self._text = self._text[:at], self._text[at + len(tag) :]
            if self._inside:
                call = read_call(before)
                parts.append(call or OPEN + before + CLOSE)
                self._called |= call is not None
            elif not self._called or before.strip():  # blanks between calls are no text
                parts.append(before)
            self._inside = not self._inside
        if not self._inside:
            certain = len(self._text) - overlap(self._text, OPEN)
            text, rest = self._text[:certain], self._text[certain:]
            if not (self._called and not text.strip()):
                parts.append(text)
                self._text = rest
        return [part for part in parts if part]

    def finish(self) -> list[str | ToolCall]:
        """Return what is left at the end of the text."""
        rest = (OPEN if self._inside else "") + self._text
        if self._inside:
            call = read_call(self._text)  # the end token may stand for the closing tag
            if call is not None:
                return [call]
        return [rest] if rest.strip() else []


class ForcedCallParser(ToolCallParser):
    """Reads a text that a grammar keeps to one call, once it is whole."""

    def push(self, text: str) -> list[str | ToolCall]:
        """Keep the text."""
        self._text += text
        return []

    def finish(self) -> list[str | ToolCall]:
        """Return the call; of a text that was cut short, the text."""
        call = read_call(self._text)
        return [call] if call is not None else [self._text] if self._text else []


def read_call(text: str) -> ToolCall | None:
    """Return the call that a text is, None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(found["name"], arguments)
