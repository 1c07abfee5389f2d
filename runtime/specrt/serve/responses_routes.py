"""/v1/responses: OpenAI's Responses without their storage, whole and as typed events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from reprlib import repr as short
from time import time
from typing import Annotated, Any, ClassVar
from uuid import uuid4

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from specrt.errors import RequestError
from specrt.serve.answer_blocks import BlockAnswer, ConvertedBody, Event
from specrt.serve.bodies import FormatOptions, Items, Messages, response_format
from specrt.serve.request_log import record_of
from specrt.serve.route import STREAMED
from specrt.serve.sending import StrictJsonRoute, answer
from specrt.serve.service import ServedCompletions, Service
from specrt.serve.tool_calls import CallPiece
from specrt.serve.tools import ToolUse, tool_use

_STORED = "nothing is stored here; leave it out, and send the whole conversation as input"


class ResponsesBody(ConvertedBody):
    """A request to /v1/responses."""

    input: str | Messages[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: FormatOptions | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    store: bool | None = None
    truncation: str | None = None
    parallel_tool_calls: bool | None = None
    include: Items[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    refused: ClassVar[Mapping[str, str]] = {
        "previous_response_id": _STORED,
        "conversation": _STORED,
        "prompt": _STORED,
        "background": "answers are whole or streamed; leave it out",
        "max_tool_calls": "no tool is run here; leave it out",
        "top_logprobs": "use /v1/chat/completions for log-probabilities",
    }

    ignored = ConvertedBody.ignored | {"reasoning"}

    def refuse(self) -> None:
        """Refuse what cannot be honoured.

        Raises: RequestError, which names the field.
        """
        super().refuse()
        if self.store:
            raise RequestError(f"store is not supported: {_STORED}")
        if self.truncation not in (None, "disabled"):
            raise RequestError(
                f"truncation is {self.truncation!r}; expected 'disabled': a conversation that "
                "is too long is refused, so send less of it"
            )
        if "message.output_text.logprobs" in (self.include or ()):
            raise RequestError(
                "include has 'message.output_text.logprobs', which is not told here: use "
                "/v1/chat/completions for log-probabilities"
            )

    def converted(self) -> dict[str, Any]:
        """Return the protocol's own fields as the chat route has them."""
        messages = [] if self.instructions is None else [_said("system", self.instructions)]
        if isinstance(self.input, str):
            messages.append(_said("user", self.input))
        else:
            for number, item in enumerate(self.input):
                _take(item, f"input[{number}]", messages)
        if not messages:
            raise RequestError("input has no messages; expected a text, or items")
        form = self.text.format if self.text else None
        response_format(form, "text.format")
        return {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": form,
            "tools": None if self.tools is None else [*map(_tool, self.tools)],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def _choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """Return a choice of tools as the chat route has it."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    given = choice if isinstance(choice, Mapping) else {}
    kind, tools = given.get("type"), given.get("tools")
    if kind == "function" and isinstance(given.get("name"), str):
        return {"type": kind, "function": {"name": given["name"]}}
    if kind == "allowed_tools" and isinstance(tools, list):
        chosen = [_tool(tool) if isinstance(tool, Mapping) else tool for tool in tools]
        return {"type": kind, kind: {"mode": given.get("mode"), "tools": chosen}}
    raise RequestError(
        f"tool_choice is {json.dumps(choice)[:200]}; expected 'none', 'auto', 'required', "
        '{"type": "function", "name": ...} or {"type": "allowed_tools", "mode": ..., "tools": ...}'
    )


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _take(item: Mapping[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    """Add an item of the input to the messages of a chat."""
    kind = item.get("type", "message")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind == "message" and isinstance(item.get("role"), str):
        content = _content(item.get("content"), f"{where}.content")
        if last is not None and item["role"] == "assistant" and set(last) == _THOUGHT:
            last["content"] = content
        else:
            messages.append(_said(item["role"], content))
    elif kind == "function_call":
        if not isinstance(item.get("name"), str):
            raise RequestError(f"{where} is a function_call without a name; give one")
        function = {"name": item["name"], "arguments": item.get("arguments", "{}")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if last is None:
            messages.append(_said("assistant", None))
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        thought = _reasoning(item)
        if thought:
            messages.append(_said("assistant", None) | {"reasoning_content": thought})
    elif kind == "function_call_output":
        told = {"tool_call_id": item.get("call_id")}
        messages.append(_said("tool", _content(item.get("output"), f"{where}.output")) | told)
    else:
        raise RequestError(
            f"{where} is of type {kind!r}; expected 'message' with a role, 'function_call' or "
            "'function_call_output'"
        )


def _content(given: Any, where: str) -> Any:
    """Return what is a text or parts; the chat route reads them."""
    parts = isinstance(given, list) and all(isinstance(part, Mapping) for part in given)
    if parts or given is None or isinstance(given, str):
        return given
    raise RequestError(f"{where} is {short(given)}; expected a text, or a list of parts")


_THOUGHT = {"role", "content", "reasoning_content"}
"""Keys of a message that has reasoning alone so far."""


def _reasoning(item: Mapping[str, Any]) -> str:
    """Return the text of reasoning that a client sends back, or its summary."""
    for parts in (item.get("content"), item.get("summary")):
        found = parts if isinstance(parts, list) else ()
        texts = [part.get("text") for part in found if isinstance(part, Mapping)]
        if texts:
            return "".join(text for text in texts if isinstance(text, str))
    return ""


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(
            f"tools have one of type {kind!r}; expected 'function': this server runs no tools"
        )
    if not isinstance(tool.get("name"), str):
        raise RequestError(
            f"the tool {json.dumps(tool)[:200]} has no name; expected "
            '{"type": "function", "name": ..., "parameters": ...}'
        )
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


class ResponsesAnswer(BlockAnswer):
    """The objects and events of /v1/responses."""

    def __init__(
        self, service: Service, body: ResponsesBody, answers: ServedCompletions, use: ToolUse
    ) -> None:
        super().__init__(service, body, answers, use)
        self._body = body
        self._id = f"resp_{uuid4().hex}"
        self._created = int(time())
        self._output: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None
        self._text: list[str] = []
        self._call: dict[str, Any] | None = None
        """The item of a call that is not whole yet."""
        self._sent = 0

    def encode(self, event: Event) -> bytes:
        """Return an event as it is sent, with its number in the stream."""
        kind, fields = event
        number = self._sent
        self._sent += 1
        return super().encode((kind, {"sequence_number": number, **fields}))

    def opening(self) -> Iterator[Event]:
        """Yield that the response has begun."""
        for state in ("created", "in_progress"):
            yield f"response.{state}", {"response": self.to_json("in_progress")}

    def add(self, part: str | CallPiece) -> Iterator[Event]:
        """Take a piece of text or of a call; yield the events of it."""
        if isinstance(part, CallPiece):
            yield from self._add_call(part)
            return
        yield from self._end_call("completed")
        if self._message is None:
            yield from self._begin_message()
        self._text.append(part)
        yield "response.output_text.delta", {**self._place(), "delta": part, "logprobs": []}

    def finish(self) -> Iterator[Event]:
        """End the message; without any item there is an empty one."""
        if self._message is None and self._call is None and not self._output:
            yield from self._begin_message()
        yield from self._end_message(self._state)
        yield from self._end_call(self._state)

    def closing(self) -> Iterator[Event]:
        """Yield the whole response."""
        yield f"response.{self._state}", {"response": self.to_json()}

    def failure(self, status: int, reason: str) -> Event:
        """Return the event of a response that failed; OpenAI has one code for a client's fault."""
        error = {"code": "invalid_prompt" if status == 400 else "server_error", "message": reason}
        return "response.failed", {"response": self.to_json("failed") | {"error": error}}

    def to_json(self, status: str | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        body, ended = self._body, status is None
        cut = ended and self._state == "incomplete"
        given = (body.text.format if body.text else None) or {"type": "text"}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time()) if ended else None,
            "status": status or self._state,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._service.name,
            "output": [*self._output],
            "usage": self._usage() if ended else None,
            "metrics": self.metrics if ended else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": given},
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "metadata": body.metadata or {},
            "user": body.user,
            **_FIXED,
        }

    @property
    def _state(self) -> str:
        return "incomplete" if self.completion.finish_reason == "length" else "completed"

    def _usage(self) -> dict[str, Any]:
        read, made = self.completion.prompt_tokens, len(self.completion.token_ids)
        cached = self.completion.cached_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + made,
        }

    def _place(self) -> dict[str, Any]:
        assert self._message is not None
        item = {"item_id": self._message["id"], "output_index": len(self._output)}
        return {**item, "content_index": 0}

    def _begin_message(self) -> Iterator[Event]:
        self._message = {
            "id": f"msg_{uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        at = len(self._output)
        yield "response.output_item.added", {"output_index": at, "item": {**self._message}}
        yield "response.content_part.added", {**self._place(), "part": _part("")}

    def _end_message(self, status: str) -> Iterator[Event]:
        if self._message is None:
            return
        text, place = "".join(self._text), self._place()
        yield "response.output_text.done", {**place, "text": text, "logprobs": []}
        yield "response.content_part.done", {**place, "part": _part(text)}
        item = self._message | {"status": status, "content": [_part(text)]}
        self._message, self._text = None, []
        yield from self._end_item(item)

    def _add_call(self, piece: CallPiece) -> Iterator[Event]:
        if piece.name is not None:
            yield from self._end_message("completed")
            yield from self._end_call("completed")
            self._call = {
                "id": f"fc_{uuid4().hex}",
                "type": "function_call",
                "call_id": f"call_{uuid4().hex[:24]}",
                "name": piece.name,
                "arguments": "",
                "status": "in_progress",
            }
            item = {**self._call}
            yield "response.output_item.added", {"output_index": len(self._output), "item": item}
        assert self._call is not None, "a call begins with its name"
        if piece.arguments:
            self._call["arguments"] += piece.arguments
            place = {"item_id": self._call["id"], "output_index": len(self._output)}
            yield f"{_ARGUMENTS}.delta", {**place, "delta": piece.arguments}
        if piece.ended:
            yield from self._end_call("completed")

    def _end_call(self, status: str) -> Iterator[Event]:
        if self._call is None:
            return
        item, self._call = self._call | {"status": status}, None
        told = {name: item[name] for name in ("name", "arguments")}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield f"{_ARGUMENTS}.done", {**place, **told}
        yield from self._end_item(item)

    def _end_item(self, item: dict[str, Any]) -> Iterator[Event]:
        at = len(self._output)
        self._output.append(item)
        yield "response.output_item.done", {"output_index": at, "item": item}


_ARGUMENTS = "response.function_call_arguments"

_FIXED: dict[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "max_tool_calls": None,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "service_tier": "default",
    "store": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}
"""Fields of a response that say the same here, whatever was asked for."""


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def responses_routes(service: Service) -> APIRouter:
    """Return the route of responses."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post("/responses", response_model=None, include_in_schema=False)
    @router.post("/v1/responses", response_model=None, responses=STREAMED)
    async def responses(body: ResponsesBody, request: HttpRequest) -> Response:
        """Answer a conversation that the request has whole."""
        service.check(body)
        chat = body.chat()
        use = tool_use(chat)
        answers = await service.begin_chat(chat, use, record_of(request.scope))
        form = ResponsesAnswer(service, body, answers, use)
        return await answer(request, answers, form, stream=body.stream)

    return router
