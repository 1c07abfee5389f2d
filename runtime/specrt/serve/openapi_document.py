"""The OpenAPI document: what FastAPI writes of the routes, with their real answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from specrt.serve.route import Route, route_at

_TEXT: dict[str, Any] = {"type": "string"}

_OPENAI: dict[str, Any] = {
    "title": "Error",
    "type": "object",
    "required": ["error", "request_id"],
    "properties": {
        "request_id": _TEXT,
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        },
    },
}
_ANTHROPIC: dict[str, Any] = {
    "title": "MessagesError",
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "request_id": _TEXT,
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
    429: {"description": "The queue is full, or the key has used what it may; see Retry-After."},
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
                _describe(route_at(path), operation)
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


def _describe(route: type[Route], operation: dict[str, Any]) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    name = "MessagesError" if route.errors == "anthropic" else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status in ERRORS:
        answers[str(status)].setdefault("content", content)
    if not route.public:
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
