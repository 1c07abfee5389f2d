"""Tools: what a model is told of them, and the calls that it may or must make."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

from specrt.errors import RequestError, did_you_mean
from specrt.json_schema import Path, rooted
from specrt.serve.bodies import MOST_SCHEMA, ChatBody
from specrt.serve.tool_calls import (
    CallStream,
    FirstCall,
    ForcedCallStream,
    ToolCall,
    ToolCallParser,
)
from specrt.text.detokenizer import StopStrings

_MOST_TOOLS = 128


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, and how they are to be used."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As the template is to describe them; empty where none may be called."""
    forced: str | None = None
    """`required`, or the name of the one function to call; None where the model is free."""
    several: bool = True
    """Whether an answer may have more calls than one."""
    stops: Sequence[str] = ()
    """The request's own stop strings."""

    @property
    def described(self) -> Sequence[Mapping[str, Any]] | None:
        """What a chat template is given: None without tools."""
        return self.tools or None

    def schema(self) -> dict[str, Any] | None:
        """Return the schema that the text must match; None where the model is free."""
        if self.forced is None:
            return None
        functions = [
            tool["function"]
            for tool in self.tools
            if self.forced in ("required", tool["function"]["name"])
        ]
        if len(functions) == 1:
            return _call_schema(functions[0], ())
        calls = [_call_schema(one, ("anyOf", at)) for at, one in enumerate(functions)]
        return {"anyOf": calls}

    def stream(self, *, reasoning: bool = False) -> CallStream | None:
        """Return what finds the calls in a completion; None where there can be none.

        `reasoning` tells whether the prompt ends within that.
        """
        if not self.tools:
            return None
        if self.forced is None:
            return CallStream(reasoning=reasoning)
        names = {tool["function"]["name"] for tool in self.tools}
        only = names.pop() if len(names) == 1 else None
        return ForcedCallStream(only if self.forced == "required" else self.forced)

    def end(self, *, reasoning: bool = False) -> FirstCall | None:
        """Return what ends a completion after its first call; None where more may follow."""
        if self.several or self.forced is not None or not self.tools:
            return None
        return FirstCall(StopStrings(tuple(self.stops)), CallStream(reasoning=reasoning))


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
        return ToolUse(tools, several=body.parallel_tool_calls is not False, stops=body.stops)
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
                f"tools[{number}] is not a function with a name; expected "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
        if name == "required":
            raise RequestError(f"tools[{number}] is named 'required', which is a tool_choice")
        names.append(name)
    return names


_NO_PARAMETERS = {"type": "object", "additionalProperties": False}
"""A function that is described without parameters has none, as OpenAI has it."""


def _call_schema(function: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """Return the schema of a call as Hermes and Qwen write one, for a place of the whole schema.

    Raises: RequestError for parameters with a reference that leads nowhere.
    """
    parameters = function.get("parameters") or _NO_PARAMETERS
    kinds = parameters.get("type", "object") if isinstance(parameters, Mapping) else None
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise RequestError(
            f"the parameters of {function['name']!r} are {short(parameters)}; expected a JSON "
            "Schema of an object"
        )
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {
                **rooted(parameters, (*place, "properties", "arguments")),
                "type": "object",  # a schema without a type admits numbers and text, too
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def call_parts(text: str, use: ToolUse, *, reasoning: bool = False) -> list[str | ToolCall]:
    """Return a whole text in parts: pieces of text, and the calls between them."""
    stream = use.stream(reasoning=reasoning)
    if stream is None:
        return [text] if text else []
    parser = ToolCallParser(stream)
    return [*parser.push(text), *parser.finish()]
