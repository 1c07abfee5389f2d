"""The server as a BentoML service, which `bentoml build` and `bentoml containerize` package.

SPECRT_BUNDLE=engines/build/codelet bentoml serve deploy.bentoml_service:SpecrtService

BentoML passes a service no arguments, so the environment configures it: SPECRT_BUNDLE,
SPECRT_THREADS for the cores of a worker, SPECRT_WORKERS for processes, each with the bundle open.
"""

from __future__ import annotations

import os
from pathlib import Path

import bentoml
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from specrt.bundle import DEFAULT_BUNDLE
from specrt.serve import ServerOptions, app

_WORKERS = int(os.environ.get("SPECRT_WORKERS", "1"))


class OpenedLate:
    """Opens the bundle in the process that serves, not where BentoML only reads the service."""

    app: Starlette | None = None

    def open(self) -> None:
        """Open the bundle that the environment names."""
        threads = os.environ.get("SPECRT_THREADS")
        self.app = app(
            Path(os.environ.get("SPECRT_BUNDLE", DEFAULT_BUNDLE)),
            ServerOptions(threads=int(threads) if threads else None),
        )

    async def close(self) -> None:
        """End what runs, and close the bundle."""
        if self.app is not None:
            service = self.app.state.service
            service.admission.draining = True
            service.generator.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        assert self.app is not None
        # BentoML's own routes, such as /metrics, come first; the rest is below the mount.
        await self.app(scope, receive, send)


_SERVER = OpenedLate()


@bentoml.asgi_app(_SERVER, path="/")
@bentoml.service(name="specrt", workers=_WORKERS, traffic={"timeout": 3600})
class SpecrtService:
    """One bundle behind OpenAI's interface."""

    def __init__(self) -> None:
        _SERVER.open()

    @bentoml.on_shutdown
    async def close(self) -> None:
        """Close the bundle."""
        await _SERVER.close()
