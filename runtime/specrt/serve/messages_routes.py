"""/v1/messages: Anthropic's Messages, whole and streamed, and the count of their tokens."""

from __future__ import annotations

import json
from asyncio import to_thread
from collections.abc import Iterator, Mapping, Sequence
from reprlib import repr as short
from typing import Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specrt.errors import RequestError
from specrt.serve.answer_blocks import BlockAnswer, ConvertedBody, Event
from specrt.serve.bodies import MOST_STOPS, FormatOptions, Items, Messages, response_format
from specrt.serve.request_log import record_of
from specrt.serve.route import STREAMED
from specrt.serve.sending import ANTHROPIC_KINDS, StrictJsonRoute, answer
from specrt.serve.service import ServedCompletions, Service
from specrt.serve.tool_calls import CallPiece
from specrt.serve.tools import ToolUse, tool_use
from specrt.text.message_forms import object_of

Blocks = str | Items[dict[str, Any]]

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Names of `tool_choice`, and those that the chat route has for them."""

_UNREAD = ("thinking", "redacted_thinking")
"""Blocks that clients send back; of the user, or sealed, no template reads them."""


class ConversationMessage(BaseModel):
    """A turn of the user or of the model, or what the operator says between them."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CountBody(ConvertedBody):
    """A request to /v1/messages/count_tokens."""

    messages: Messages[ConversationMessage]
    system: Blocks | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "container": "nothing is run here; leave it out",
        "mcp_servers": "no tool is run here; give tools with an input_schema",
        "context_management": "nothing is stored here; send the conversation as it is to be read",
    }

    ignored = ConvertedBody.ignored | {"thinking"}

    def converted(self) -> dict[str, Any]:
        """Return the protocol's own fields as the chat route has them."""
        messages = []
        if self.system is not None:
            messages.append({"role": "system", "content": _text_of(self.system, "system")})
        for number, message in enumerate(self.messages):
            turns = _turn(message, f"messages[{number}]")
            if message.role == "system" and messages and messages[-1]["role"] == "system":
                messages[-1]["content"] += f"\n\n{turns[0]['content']}"  # one, as templates have it
            else:
                messages += turns
        if messages[-1]["role"] == "assistant":
            raise RequestError(
                "messages end with one of the assistant, and an answer that was begun is not "
                "continued here; end with one of the user"
            )
        return {
            "messages": messages,
            "tools": None if self.tools is None else [*map(_tool, self.tools)],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": not (self.tool_choice or {}).get("disable_parallel_tool_use"),
        }


class MessagesBody(CountBody):
    """A request to /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    output_config: FormatOptions | None = None

    def converted(self) -> dict[str, Any]:
        """Return the protocol's own fields as the chat route has them."""
        form = self.output_config.format if self.output_config else None
        response_format(form, "output_config.format")
        return {
            **super().converted(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "response_format": form,
        }


def _turn(message: ConversationMessage, where: str) -> list[dict[str, Any]]:
    """Return a turn as messages of a chat: results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    turns: list[dict[str, Any]] = []

    def current() -> dict[str, Any]:
        if not turns or turns[-1]["role"] != message.role:
            turns.append({"role": message.role, "content": ""})
        return turns[-1]

    for block in message.content:
        kind = block.get("type")
        if kind == "text":
            current()["content"] += _text_of([block], where)
        elif kind == "thinking" and message.role == "assistant":
            before = current().get("reasoning_content", "")
            current()["reasoning_content"] = before + str(block.get("thinking") or "")
        elif kind == "tool_use" and message.role == "assistant":
            current().setdefault("tool_calls", []).append(_call(block, where))
        elif kind == "tool_result" and message.role == "user":
            content = _text_of(block.get("content") or "", f"{where}: a tool_result")
            told = {"tool_call_id": block.get("tool_use_id")}
            turns.append({"role": "tool", "content": content, **told})
        elif kind not in _UNREAD:
            raise RequestError(
                f"{where} has a block of type {kind!r} of the {message.role}; expected 'text', "
                "'tool_use' of the assistant or 'tool_result' of the user: this model reads "
                "nothing else"
            )
    return turns or [current()]


def _text_of(content: Any, where: str) -> str:
    """Return the text of blocks that must be text."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [
            block.get("text")
            for block in content
            if isinstance(block, Mapping) and block.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise RequestError(f"{where} has content that is not text; expected a text, or 'text' blocks")


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise RequestError(
            f"{where} has a tool_use without a name, or whose input is not an object"
        )
    function = {"name": name, "arguments": json.dumps(given)}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"tools have one of type {tool['type']!r}; expected 'custom' with an input_schema: "
            "this server runs no tools"
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"the tool {tool.get('name')!r} has no input_schema; expected an object")
    described = {name: tool[name] for name in ("name", "description") if name in tool}
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"the tool {short(tool)} has no name; give one")
    return {"type": "function", "function": {**described, "parameters": schema}}


def _choice(choice: Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool" and isinstance(name := choice.get("name"), str):
        return {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(
            f"tool_choice is {short(choice)}; expected the type 'auto', 'any', 'none', or 'tool' "
            "with a name"
        )
    return _CHOICES[kind]


class MessagesAnswer(BlockAnswer):
    """The objects and events of /v1/messages."""

    def __init__(
        self, service: Service, body: MessagesBody, answers: ServedCompletions, use: ToolUse
    ) -> None:
        super().__init__(service, body, answers, use)
        self._id = f"msg_{uuid4().hex[:24]}"
        self._content: list[dict[str, Any]] = []
        self._text: list[str] | None = None
        self._call: dict[str, Any] | None = None
        """The block of a call that is not whole yet."""
        self._arguments = ""

    def opening(self) -> Iterator[Event]:
        """Yield the message without its content."""
        usage = _usage(len(self._answers.completions[0].prompt_token_ids), 0, 0)
        head = self._head() | {"stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": {**head, "content": [], "usage": usage}}

    def add(self, part: str | CallPiece) -> Iterator[Event]:
        """Take a piece of text or of a call; yield the events of it."""
        if isinstance(part, CallPiece):
            yield from self._add_call(part)
            return
        yield from self._end_call()
        at = len(self._content)
        if self._text is None:
            self._text = []
            yield _start(at, {"type": "text", "text": ""})
        self._text.append(part)
        yield _delta(at, {"type": "text_delta", "text": part})

    def finish(self) -> Iterator[Event]:
        """End the last block; without any there is an empty one."""
        if self._text is None and self._call is None and not self._content:
            self._text = []
            yield _start(0, {"type": "text", "text": ""})
        yield from self._end_text()
        yield from self._end_call()

    def closing(self) -> Iterator[Event]:
        """Yield why the message ended, and what it took."""
        usage = self._used()
        yield "message_delta", {"delta": self._ending(), "usage": usage, "metrics": self.metrics}
        yield "message_stop", {}

    def failure(self, status: int, reason: str) -> Event:
        """Return the event of an answer that failed."""
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error")
        error = {"type": kind, "message": reason}
        return "error", {"error": error, "request_id": self._answers.record.id}

    def to_json(self) -> dict[str, Any]:
        """Return the whole message."""
        told = {"usage": self._used(), "metrics": self.metrics}
        return {**self._head(), "content": self._content, **self._ending(), **told}

    def _head(self) -> dict[str, Any]:
        model = self._service.name
        return {"id": self._id, "type": "message", "role": "assistant", "model": model}

    def _ending(self) -> dict[str, Any]:
        done = self.completion
        stop = done.stop_reason if isinstance(done.stop_reason, str) else None
        if done.finish_reason == "length":
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._content):
            reason = "tool_use"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _used(self) -> dict[str, Any]:
        done = self.completion
        return _usage(done.prompt_tokens, done.cached_tokens, len(done.token_ids))

    def _end_text(self) -> Iterator[Event]:
        if self._text is None:
            return
        yield _stop(len(self._content))
        self._content.append({"type": "text", "text": "".join(self._text)})
        self._text = None

    def _add_call(self, piece: CallPiece) -> Iterator[Event]:
        at = len(self._content)
        given = piece.arguments
        if piece.name is not None:
            yield from self._end_text()
            yield from self._end_call()
            at = len(self._content)
            self._call = {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": piece.name}
            self._arguments = ""
            yield _start(at, {**self._call, "input": {}})
            if piece.ended:  # it may be other than an object
                given = json.dumps(_input(given), ensure_ascii=False)
        if given:
            self._arguments += given
            yield _delta(at, {"type": "input_json_delta", "partial_json": given})
        if piece.ended:
            yield from self._end_call()

    def _end_call(self) -> Iterator[Event]:
        if self._call is None:
            return
        yield _stop(len(self._content))
        self._content.append({**self._call, "input": _input(self._arguments)})
        self._call = None


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; what is not an object becomes the one field of one."""
    found = object_of(arguments or "{}")
    return {"arguments": arguments} if found is None else found


def _start(index: int, block: dict[str, Any]) -> Event:
    return "content_block_start", {"index": index, "content_block": block}


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return "content_block_delta", {"index": index, "delta": delta}


def _stop(index: int) -> Event:
    return "content_block_stop", {"index": index}


def _usage(read: int, cached: int, made: int) -> dict[str, Any]:
    """Return Anthropic's count of tokens, in which those read from a cache stand apart."""
    return {
        "input_tokens": read - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": made,
    }


class MessagesRoute(StrictJsonRoute):
    """A route of Anthropic's."""

    errors = "anthropic"


def messages_routes(service: Service) -> APIRouter:
    """Return the routes of messages."""
    router = APIRouter(route_class=MessagesRoute)

    @router.post("/v1/messages", response_model=None, responses=STREAMED)
    async def messages(body: MessagesBody, request: HttpRequest) -> Response:
        """Answer a conversation."""
        service.check(body)
        chat = body.chat()
        use = tool_use(chat)
        answers = await service.begin_chat(chat, use, record_of(request.scope))
        form = MessagesAnswer(service, body, answers, use)
        return await answer(request, answers, form, stream=body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody) -> dict[str, int]:
        """Count the tokens that a conversation is read as."""
        service.check(body)
        chat = body.chat()
        use = tool_use(chat)
        prompt = await to_thread(service.render, chat.messages, use.described)
        ids = await to_thread(service.tokens_of, prompt)
        return {"input_tokens": len(ids)}

    return router
