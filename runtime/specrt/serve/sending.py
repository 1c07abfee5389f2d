"""Sending answers: server-sent events, and what ends when a client has gone away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from math import isfinite
from reprlib import repr as short
from typing import Any, Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specrt.errors import RequestError, first_line, reason_of
from specrt.serve.admission import ShutDownError
from specrt.serve.large_bodies import BodyField, read_body
from specrt.serve.request_log import record_of
from specrt.serve.route import Route, route_at
from specrt.serve.service import ServedCompletions

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def as_event(data: Any, name: str | None = None) -> bytes:
    """Return one server-sent event of JSON; a name where a client reads it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode(errors="replace")


class JsonBody(JSONResponse):
    """A response of JSON; half of a surrogate pair, which UTF-8 has not, is a question mark."""

    def render(self, content: Any) -> bytes:
        """Return the bytes of the JSON."""
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="replace")


ANTHROPIC_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def error_body(
    request_id: str, message: str, kind: str, param: str | None = None,
    code: str | int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return an error as OpenAI's clients read it."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error, "request_id": request_id}


def error_response(
    scope: Scope, status: int, message: str, kind: str = "invalid_request_error", *,
    param: str | None = None, code: str | int | None = None, headers: dict[str, str] | None = None,
) -> JSONResponse:  # fmt: skip
    """Return the response of an error, as the clients of its path read it."""
    request_id = record_of(scope).id
    if route_at(scope["path"]).errors == "anthropic":
        kind = ANTHROPIC_KINDS.get(status, "invalid_request_error")
        error = {"type": kind, "message": message}
        body = {"type": "error", "error": error, "request_id": request_id}
    else:
        body = error_body(request_id, message, kind, param, code)
    return JsonBody(body, status, headers)


def status_of(error: BaseException) -> int:
    """Return the status of what ended an answer: whose fault it is."""
    if isinstance(error, ShutDownError):
        return 503
    return 400 if isinstance(error, RequestError) else 500


_KINDS = {400: "invalid_request_error", 500: "server_error", 503: "service_unavailable"}


class WholeOrStream(Protocol):
    """How the completions of one request become what its protocol sends."""

    def whole(self) -> dict[str, Any]:
        """Return the answer, once all completions are over."""

    def events(self) -> AsyncIterator[bytes]:
        """Yield the events of a streamed answer."""


async def answer(
    request: HttpRequest, answers: ServedCompletions, form: WholeOrStream, *, stream: bool | None
) -> Response:
    """Return the answer, whole or as a stream of events."""
    if stream:
        return EventStream(form.events(), answers.close)
    try:
        if await unless_gone(request, answers.finish()) is None:
            return Response(status_code=499)  # no client reads it
        return JsonBody(form.whole())
    finally:
        await answers.close()


class EventStream(Response):
    """Sends events as they come, and stops when the client has gone; `close` is called at the end.

    An error within the stream is its last event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await _unless_gone(receive, self._send(record_of(scope).id, send))
        finally:
            await self._close()

    async def _send(self, request_id: str, send: Send) -> None:
        with suppress(OSError):  # the client is gone
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except OSError:
                raise
            except Exception as error:
                code = status_of(error)
                body = error_body(request_id, reason_of(error), _KINDS[code], code=code)
                await send(
                    {"type": "http.response.body", "body": as_event(body), "more_body": True}
                )
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(request: HttpRequest, work: Awaitable[T]) -> T | None:
    """Await work, and cancel it when the client goes away; None then."""
    return await _unless_gone(request.receive, work)


async def _unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StrictJsonRoute(Route):
    """A route whose bodies are JSON as its standard has it: no NaN, no number beyond a float's."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """Return the handler, which reads its body strictly."""
        handle = super().get_route_handler()

        async def strict(request: HttpRequest) -> Response:
            if request.method == "POST":
                _require_json(request.headers.get("content-type", ""))
            given = _StrictRequest(request.scope, request.receive)
            given.field = self.body_field
            return await handle(given)

        return strict


def _require_json(content_type: str) -> None:
    """Refuse another type, which a page of another site may send without being asked first.

    Raises: RequestError.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if not re.fullmatch(r"application/([\w.-]+\+)?json", kind):
        said = f"the Content-Type is {kind[:80]!r}" if kind else "there is no Content-Type"
        raise RequestError(
            f"{said}; expected application/json, as `curl -H 'Content-Type: application/json'` "
            "sends it"
        )


class _StrictRequest(HttpRequest):
    field: BodyField | None

    async def json(self) -> Any:
        """Return the body.

        Raises: HTTPException, which FastAPI passes on as it is.
        """
        return await read_body(await self.body(), _strict_json, self.field)


def _strict_json(body: bytes) -> Any:
    try:
        value = json.loads(body, parse_constant=_no_number, parse_float=_finite)
        if isinstance(value, dict):
            return value
        reason = f"it is {short(value)}; expected an object"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except RecursionError:
        reason = "it is nested too deep"
    except ValueError as error:
        reason = first_line(error).partition("; use sys.")[0]  # a number of 4,300 digits
    raise HTTPException(400, f"the body is not a JSON object: {reason}")


def _no_number(text: str) -> Any:
    raise ValueError(f"{text[:40]} is not a number that JSON has")


def _finite(text: str) -> float:
    value = float(text)
    return value if isfinite(value) else _no_number(text)
