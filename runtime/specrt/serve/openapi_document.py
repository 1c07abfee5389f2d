"""The OpenAPI document: what FastAPI writes of the routes, with their real answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_PUBLIC = ("/health", "/ready", "/version", "/metrics")
_TEXT: dict[str, Any] = {"type": "string"}

_OPENAI: dict[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC: dict[str, Any] = {
    "title": "MessagesError",
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": _TEXT, "message": _TEXT},
        },
    },
}

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request cannot be honoured; the message names the field."},
    401: {"description": "A key is needed, or another one."},
    403: {"description": "A web page may not use the server, or not by this name."},
    404: {"description": "There is no such model or path."},
    405: {"description": "The path takes another method."},
    413: {"description": "The body is too large."},
    429: {"description": "The queue is full; Retry-After says when to come back."},
    500: {"description": "The server or its engine failed."},
    503: {"description": "The server is shutting down."},
}
"""The statuses of refusals, on every route."""


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application, made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        for path, methods in made["paths"].items():
            for operation in methods.values():
                _describe(path, operation)
        schemas = made["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):  # refusals are 400 here
            schemas.pop(name, None)
        schemas["Error"], schemas["MessagesError"] = _OPENAI, _ANTHROPIC
        made["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        app.openapi_schema = made
    return app.openapi_schema


def _describe(path: str, operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status in ERRORS:
        answers[str(status)]["content"] = content
    if path in _STREAMED:
        answers["200"]["content"] = {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {},
        }
    elif path == "/metrics":
        answers["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    elif path == "/ready":
        flag = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
        for status in ("200", "503"):
            answers[status]["content"] = {"application/json": {"schema": flag}}
    if path not in _PUBLIC:
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
