"""Routes: each says of itself what the rest of the server has to know of it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from fastapi.routing import APIRoute

_CLASSES: dict[str, type[Route]] = {}
"""Of the routes, by their paths."""


class Route(APIRoute):
    """A route, and what its requests and answers are like."""

    public: ClassVar[bool] = False
    """Whether it needs no key."""
    most_bytes: ClassVar[Literal["max_body_bytes", "max_audio_bytes"]] = "max_body_bytes"
    """The option of the server that bounds its bodies."""
    errors: ClassVar[Literal["openai", "anthropic"]] = "openai"
    """Whose clients read its errors."""

    def __init__(self, path: str, *args: Any, **options: Any) -> None:
        super().__init__(path, *args, **options)
        _CLASSES[path] = type(self)


class PublicRoute(Route):
    """A route that needs no key."""

    public = True


STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}}
}
"""The `responses` of a route that may answer with events."""


def route_at(path: str) -> type[Route]:
    """Return the class of the route at a path, or of the nearest one above that needs a key."""
    if path in _CLASSES:
        return _CLASSES[path]
    above = route_at(path.rpartition("/")[0]) if path else Route
    return Route if above.public else above
