"""The server: OpenAI's interface over a bundle. `app` makes the ASGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrt.errors import RequestError, how_to_install

if TYPE_CHECKING:
    from specrt.serve.application import ServerOptions, app
    from specrt.serve.verify_sessions import VerifyLimits

__all__ = ["ServerOptions", "VerifyLimits", "app"]


def __getattr__(name: str) -> Any:
    """Import the application when it is used; without its libraries say what to install."""
    if name not in __all__:
        raise AttributeError(f"module 'specrt.serve' has no attribute {name!r}")
    try:
        from specrt.serve import application
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "specrt":
            raise
        raise RequestError(
            f"the server needs {error.name}, which is not installed: {how_to_install('serve')}"
        ) from None
    return getattr(application, name)
