"""The server: OpenAI's interface over a bundle. `app` makes the ASGI application."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specrt.errors import RequestError, how_to_install

if TYPE_CHECKING:
    from specrt.serve.application import ServerOptions, app
    from specrt.serve.http_server import HttpServer as HttpServer
    from specrt.serve.verify_sessions import VerifyLimits

__all__ = ["ServerOptions", "VerifyLimits", "app"]

_PLACES = {**dict.fromkeys(__all__, "application"), "HttpServer": "http_server"}
"""Where each is; the second needs what serves an application, too."""


def __getattr__(name: str) -> Any:
    """Import a part when it is used; without its libraries say what to install."""
    if name not in _PLACES:
        raise AttributeError(f"module 'specrt.serve' has no attribute {name!r}")
    try:
        module = import_module(f"specrt.serve.{_PLACES[name]}")
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == "specrt":
            raise
        raise RequestError(
            f"the server needs {library}, which is not installed: {how_to_install('serve')}"
        ) from None
    return getattr(module, name)
