"""Calls in the text of a model: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

Models of the Hermes and Qwen families write them so; no other form is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from specrt.text.detokenizer import StopStrings, overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_THINK, _THOUGHT = "<think>", "</think>"
"""Around the reasoning that an answer may begin with; nothing in it is a call."""

_STRING = r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
"""A call up to its arguments, which can be streamed from here on."""

_LONGEST_HEAD = 4096
"""Characters in which a head is sought."""


def begins_reasoning(prompt: str) -> bool:
    """Tell whether a prompt ends where reasoning begins."""
    return prompt.rstrip().endswith(_THINK)


class CallPiece(NamedTuple):
    """The beginning of a call, or more of its arguments."""

    name: str | None
    """Of the function; None where the call began before."""
    arguments: str
    """More of their JSON text."""
    ended: bool = False
    """Whether the call is whole."""

    def to_json(self, index: int) -> dict[str, Any]:
        """Return OpenAI's object of a call in a stream."""
        if self.name is None:
            return {"index": index, "function": {"arguments": self.arguments}}
        return {"index": index, **ToolCall(self.name, self.arguments).to_json()}


class ToolCall(NamedTuple):
    """A function to call, and the JSON text of its arguments."""

    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": f"call_{uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Reads the JSON of one call as its text comes."""

    def __init__(self) -> None:
        self.text = ""
        self.end: int | None = None
        """Where the call ends in the text, once that is known."""
        self.begun = False
        """Whether its name was returned."""
        self._read = self._depth = self._sent = 0
        self._string = self._escaped = False
        self._arguments_end: int | None = None

    def push(self, text: str) -> Iterator[CallPiece]:
        """Take text; yield what became certain of the call."""
        self.text += text
        if not self.begun and self._read < _LONGEST_HEAD:
            head = _HEAD.match(self.text[:_LONGEST_HEAD])
            if head is not None:
                self.begun, self._sent = True, head.end()
                yield CallPiece(json.loads(head[1]), "")
        self._scan()
        end = self._read if self._arguments_end is None else self._arguments_end
        if self.begun and (self._sent < end or self.end is not None):
            piece = self.text[self._sent : end]
            self._sent = max(self._sent, end)
            yield CallPiece(None, piece, self.end is not None)
        elif self.end is not None and (call := read_call(self.text[: self.end])) is not None:
            self.begun = True
            yield CallPiece(call.name, call.arguments, ended=True)

    def rest(self) -> str:
        """Return what is left of the arguments at the end of the text."""
        return self.text[self._sent :] if self._arguments_end is None else ""

    def _scan(self) -> None:
        """Find where arguments and call end; a closing tag counts where JSON can have none."""
        while self._read < len(self.text) and self.end is None:
            at = self._read + (self._string and self.text[self._read] == "\n")
            if (not self._string or at > self._read) and self.text[at : at + 1] in ("", "<"):
                seen = self.text[at : at + len(CLOSE)]
                if seen == CLOSE:
                    self.end = self._read
                    break
                if CLOSE.startswith(seen):
                    break  # until more is known
            self._take(self.text[self._read])
            self._read += 1

    def _take(self, char: str) -> None:
        if self._string:
            self._string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.end = self._read + 1
            elif self._depth == 1 and self.begun and self._read >= self._sent:
                self._arguments_end = self._read + 1


def read_call(text: str) -> ToolCall | None:
    """Return the call that a text is, None where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    if arguments in (None, ""):  # models write a call without arguments in any of these forms
        arguments = {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(found["name"], arguments)


class CallStream:
    """Finds calls in a text as it comes. What is not a call stays text, also between the tags."""

    def __init__(self, *, reasoning: bool = False) -> None:
        """Begin a text, within reasoning where the prompt has begun that."""
        self._held = ""
        self._reader: CallReader | None = None
        self._tag = OPEN
        """Before what the reader reads."""
        self._next: Callable[[], list[str | CallPiece]] = (
            self._thought if reasoning else self._beginning
        )
        self._after_call = False
        """Whether nothing but blanks came since a call."""

    def push(self, text: str) -> list[str | CallPiece]:
        """Return what became certain: pieces of text and of calls."""
        self._held += text
        parts: list[str | CallPiece] = []
        state: Any = None
        while state != (state := (self._next, len(self._held))):
            parts += self._next()
        return [part for part in parts if part]

    def finish(self) -> list[str | CallPiece]:
        """Return what is left at the end of the text."""
        reader, rest = self._reader, self._held
        if reader is not None and reader.begun:
            return [CallPiece(None, reader.rest())]
        if reader is not None:
            rest = self._tag + reader.text
        dropped = self._next == self._closing or (self._after_call and not rest.strip())
        return [] if dropped or not rest else [rest]

    def _beginning(self) -> list[str | CallPiece]:
        """Tell whether a text begins with reasoning."""
        begun = self._held.lstrip()
        if begun.startswith(_THINK):
            self._next = self._thought
        elif not _THINK.startswith(begun):
            self._next = self._plain
        return []

    def _thought(self) -> list[str | CallPiece]:
        """Return reasoning up to its end."""
        at = self._held.find(_THOUGHT)
        if at < 0:
            return [self._taken(self._certain(_THOUGHT))]
        self._next = self._plain
        return [self._taken(at + len(_THOUGHT))]

    def _plain(self) -> list[str | CallPiece]:
        """Return text up to a call; blanks right after a call are text where text follows."""
        at = self._held.find(OPEN)
        text = self._held[: self._certain(OPEN) if at < 0 else at]
        blank = self._after_call and not text.strip()
        if at >= 0:
            self._next = self._opened
        elif blank:
            return []
        taken = self._taken(len(text))
        self._after_call = blank
        return [] if blank else [taken]

    def _opened(self) -> list[str | CallPiece]:
        """Find out whether a call follows its tag; return the tag where none does."""
        rest = self._held[len(OPEN) :].lstrip()
        if not rest:
            return []
        tag = self._taken(len(OPEN))
        if rest.startswith("{"):
            self._read(OPEN)
            return []
        self._next, self._after_call = self._plain, False
        return [tag]

    def _call(self) -> list[str | CallPiece]:
        """Return what the reader makes of a call, and its text where it is none."""
        reader = self._reader
        assert reader is not None, "there is one between the tags"
        pieces = [*reader.push(self._taken(len(self._held)))]
        if reader.end is None:
            return [*pieces]
        self._reader, self._held = None, reader.text[reader.end :]
        self._next = self._closing if reader.begun else self._plain
        self._after_call = reader.begun
        return [*pieces] if reader.begun else [self._tag + reader.text[: reader.end]]

    def _closing(self) -> list[str | CallPiece]:
        """Take the tag after a call; surplus braces are dropped, another call may follow."""
        rest = self._held.lstrip(" \t\r\n}")
        if rest.startswith("{"):
            self._held = rest
            self._read("")
        elif rest.startswith(CLOSE):
            self._held, self._next = rest[len(CLOSE) :], self._plain
        elif not CLOSE.startswith(rest):
            self._next = self._plain
        return []

    def _read(self, tag: str) -> None:
        self._tag, self._reader, self._next = tag, CallReader(), self._call

    def _certain(self, tag: str) -> int:
        return len(self._held) - overlap(self._held, tag)

    def _taken(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


class ForcedCallStream(CallStream):
    """Reads a text that a grammar keeps to one call, without tags."""

    def __init__(self, name: str | None) -> None:
        """Begin; `name` is of the one function that may be called, if there is only one."""
        super().__init__()
        self._name = name
        self._read("")

    def finish(self) -> list[str | CallPiece]:
        """Return what is left of a call that was cut short; one without a name is nothing."""
        if self._reader is not None and not self._reader.begun:
            return [] if self._name is None else [CallPiece(self._name, "")]
        return super().finish()


class ToolCallParser:
    """Finds whole calls in a text as it comes."""

    def __init__(self, stream: CallStream | None = None) -> None:
        self._stream = stream or CallStream()
        self._name: str | None = None
        self._arguments = ""

    def push(self, text: str) -> list[str | ToolCall]:
        """Return what became certain: pieces of text, and calls."""
        return [*self._whole(self._stream.push(text))]

    def finish(self) -> list[str | ToolCall]:
        """Return what is left at the end of the text; its last call may be cut short."""
        parts = [*self._whole(self._stream.finish())]
        return [*parts, ToolCall(self._name, self._arguments)] if self._name is not None else parts

    def _whole(self, parts: Iterable[str | CallPiece]) -> Iterator[str | ToolCall]:
        for part in parts:
            if isinstance(part, str):
                yield part
                continue
            if part.name is not None:
                self._name, self._arguments = part.name, ""
            self._arguments += part.arguments
            if part.ended:
                assert self._name is not None, "a call begins with its name"
                yield ToolCall(self._name, self._arguments)
                self._name = None


class FirstCall:
    """Ends a text after its first call, or at a stop string."""

    def __init__(self, stops: StopStrings, stream: CallStream) -> None:
        self._stops = stops
        self._stream = stream

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return what may be shown, and what ended it, if anything did."""
        shown, stop = self._stops.push(text)
        for at, char in enumerate(shown):
            for part in self._stream.push(char):
                if isinstance(part, CallPiece) and part.ended:
                    return shown[: at + 1], CLOSE
        return shown, stop

    def finish(self) -> str:
        """Return what was held back."""
        return self._stops.finish()
