"""Requests: the id of each, whose it is and what it used; a line of the log when it is over."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from time import monotonic
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrt.completion import Completion
from specrt.serve.api_keys import ApiKey
from specrt.serve.route import route_at

log = logging.getLogger("specrt.requests")

_ID = re.compile(r"[!-~]{1,128}")
_LONGEST_PATH = 200
_LONGEST_CLIENT = 64
"""A proxy on this machine, or who looks like one, says whom it asks for."""


class RequestFields(dict[str, Any]):
    """What is logged of a request; as text `name=value` pairs."""

    def __str__(self) -> str:
        return " ".join(f"{name}={_shown(value)}" for name, value in self.items())


class JsonLines(logging.Formatter):
    """Formats what is logged of requests as JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line."""
        return json.dumps(record.msg if isinstance(record.msg, Mapping) else record.getMessage())


def _shown(value: Any) -> str:
    text = ",".join(value) if isinstance(value, list) else str(value)
    return text if re.fullmatch(r"[!#-<>-~]+", text) else json.dumps(text)


class RequestRecord:
    """One request, or one session of a device: its id, its key and what it used."""

    def __init__(
        self, method: str = "", path: str = "", client: str = "", given: str = "",
        key: ApiKey | None = None,
    ) -> None:  # fmt: skip
        """`given` is the id by which the client knows it, if that can be one."""
        self.id = given if _ID.fullmatch(given) else f"req_{uuid4().hex}"
        self.key = key
        self.status: int | None = None
        self._method, self._path, self._client = method, path, client
        self._began = monotonic()
        self._used: dict[str, float] = {}
        self._reasons: list[str] = []
        self._written = False

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """Return the record of a connection of ASGI's."""
        headers = dict(scope.get("headers", ()))
        return cls(
            scope.get("method", "WEBSOCKET"),
            scope["path"][:_LONGEST_PATH],
            (scope.get("client") or ("",))[0][:_LONGEST_CLIENT],
            headers.get(b"x-request-id", b"").decode("latin-1"),
        )

    def session(self) -> RequestRecord:
        """Return the record of a session that begins within this one."""
        return RequestRecord("SESSION", self._path, self._client, self.id, self.key)

    def cache_salt(self, own: str | None = None) -> str:
        """Return with whose requests it shares prefixes: its key's, and its own salt's."""
        owner = self.key.owner if self.key else ""
        return f"{owner}\n{own or ''}" if owner or own else ""

    @property
    def headers(self) -> dict[str, str]:
        """Its answer's: Anthropic's clients read one of another name."""
        named = {"x-request-id": self.id}
        anthropic = route_at(self._path).errors == "anthropic"
        return named | {"request-id": self.id} if anthropic else named

    def end(self, completion: Completion) -> None:
        """Add a completion that is over."""
        counts, timings, used = completion.speculation, completion.timings, self._used
        for name, count in (
            ("completions", 1),
            ("prompt_tokens", completion.prompt_tokens),
            ("cached_tokens", completion.cached_tokens),
            ("completion_tokens", len(completion.token_ids)),
            ("rounds", counts.rounds),
            ("drafted", counts.drafted),
            ("evaluated", counts.evaluated),
            ("accepted", counts.accepted),
        ):
            used[name] = used.get(name, 0) + count
        for name, time_ms in (("queue_ms", timings.queue_ms), ("ttft_ms", timings.ttft_ms)):
            used[name] = max(used.get(name, 0.0), round(time_ms, 3))
        self._reasons.append(completion.finish_reason or "abort")

    def answered(self, status: int) -> None:
        """Take the status of the answer; the first one is what the client reads."""
        if self.status is None:
            self.status = status

    def write(self) -> None:
        """Log it, once it is over; no second time."""
        if not self._written and log.isEnabledFor(logging.INFO):
            log.info(self._fields())
        self._written = True

    def _fields(self) -> RequestFields:
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        known = {
            "time": now.replace("+00:00", "Z"),
            "request_id": self.id,
            "key": self.key and self.key.name,
            "client": self._client,
            "method": self._method,
            "path": self._path,
            "status": self.status,
            "duration_ms": round(1e3 * (monotonic() - self._began), 3),
            **self._used,
            "finish_reasons": self._reasons,
        }
        return RequestFields(
            {name: value for name, value in known.items() if value not in (None, "", [])}
        )


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, and make it where it has none yet."""
    state = scope.setdefault("state", {})
    if not isinstance(state.get("record"), RequestRecord):
        state["record"] = RequestRecord.of(scope)
    found: RequestRecord = state["record"]
    return found


class RequestLog:
    """Gives each request a record, its answer the id, and the log a line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        record = record_of(scope)
        own = [(name.encode(), value.encode()) for name, value in record.headers.items()]

        async def named(message: Message) -> None:
            kind = message["type"]
            if kind in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                record.answered(message.get("status", 101))
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            elif kind == "websocket.close":
                record.answered(403)  # before it was accepted
            await send(message)

        try:
            await self._app(scope, receive, named)
        except BaseException:
            record.answered(500)
            raise
        finally:
            record.write()
