"""A fleet on Ray Serve: replicas of the server, and a router that keeps a prefix on one of them.

export RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1
serve run deploy.ray_serve:build bundle=engines/build/codelet replicas=2

HAProxy, which Ray starts, asks the router for a replica and then talks to that replica itself, so
chunks pass through no Python process but the server. Ray's ordinary proxy shows a router no
bodies, so prefixes cannot be kept together behind it: without the two variables the fleet works,
and every request goes to the shorter queue of two replicas.

The hook that joins router and replicas has no stable name in Ray yet: this is for Ray 2.60.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.prefix_routing import PREFIX_CHARS, SPILL, prefix_of, ranked

REPLICA_HEADER = "x-specrt-replica"
"""Header of answers that names the replica."""

_QUEUE_DEADLINE_S = 0.5
_UNKNOWN = 1 << 20


class FleetOptions(BaseModel, frozen=True, extra="forbid"):
    """Arguments of `serve run`, as NAME=VALUE."""

    bundle: Path
    name: str = ""
    """Of the model; that of the bundle's folder when empty."""
    replicas: int | None = None
    """A fixed number of them; between the next two without it."""
    min_replicas: int = 1
    max_replicas: int = 2
    target_ongoing_requests: float = 4
    """Requests a replica has, on average, before there is to be one more."""
    upscale_delay_s: float = 10
    downscale_delay_s: float = 600
    max_ongoing_requests: int = 64
    """Of a replica; the server's own queue answers 429 beyond `max_queue`."""
    max_queue: int = 64
    threads: int = 1
    """Cores of a replica."""
    metrics_prefix: str = "specrt"
    prefix_chars: int = PREFIX_CHARS
    spill: int = SPILL


def build(arguments: dict[str, str]) -> serve.Application:
    """Return the application: replicas, and before them the router where HAProxy runs."""
    options = FleetOptions.model_validate(arguments)
    routed = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    options = options.model_copy(update={"bundle": options.bundle.resolve()})
    replicas = _replicas(options, routed=routed).bind(options)
    if not routed:
        return replicas
    router = serve.deployment(
        PrefixRouter, num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    return replicas._with_ingress_request_router(router.bind(replicas))


def _replicas(options: FleetOptions, *, routed: bool) -> serve.Deployment:
    count: dict[str, Any] = {"num_replicas": options.replicas}
    if options.replicas is None:
        count = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.min_replicas,
                max_replicas=options.max_replicas,
                target_ongoing_requests=options.target_ongoing_requests,
                upscale_delay_s=options.upscale_delay_s,
                downscale_delay_s=options.downscale_delay_s,
            )
        }
    if routed:
        count["request_router_config"] = RequestRouterConfig(
            request_router_class=PrefixRequestRouter,
            request_router_kwargs={"chars": options.prefix_chars, "spill": options.spill},
        )
    return serve.deployment(
        Replica,
        max_ongoing_requests=options.max_ongoing_requests,
        ray_actor_options={"num_cpus": options.threads},
        health_check_period_s=5,
        graceful_shutdown_timeout_s=30,
        **count,
    )


@serve.ingress()
class Replica:
    """One process with the bundle open."""

    def __init__(self, options: FleetOptions) -> None:
        self._options = options

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the server, which Ray mounts."""
        from specrt.serve import ServerOptions, app

        options = self._options
        made = app(
            options.bundle,
            ServerOptions(
                name=options.name,
                max_queue=options.max_queue,
                metrics_prefix=options.metrics_prefix,
                threads=options.threads,
            ),
        )
        made.add_middleware(ReplicaHeader, name=serve.get_replica_context().replica_id.unique_id)
        return made


class ReplicaHeader:
    """Adds the name of the replica to its answers."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REPLICA_HEADER] = self._name
            await send(message)

        await self._app(scope, receive, named)


class PrefixRequestRouter(RequestRouter):
    """Ray's request router with the policy of `prefix_routing`; its argument is a request's body.

    The router counts the requests that it sends, and asks the replicas for their queues when its
    counts, which know of no ends, would take a request from its prefix; no other one waits.
    """

    def initialize_state(self, chars: int = PREFIX_CHARS, spill: int = SPILL) -> None:
        """Take the options."""
        self._chars = chars
        self._spill = spill
        self._sent: dict[str, int] = {}

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return replicas, the best one first, and count the request as sent to that."""
        body = pending_request.args[0] if pending_request and pending_request.args else b""
        prefix = prefix_of(body, self._chars)
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        counts = {name: self._sent.get(name, 0) for name in replicas}
        order = ranked(prefix, counts, self._spill)
        if prefix and order[0] != ranked(prefix, counts, _UNKNOWN)[0]:
            told = await asyncio.gather(*map(_queue, replicas.values()))
            counts = self._sent = dict(zip(replicas, told, strict=True))
            order = ranked(prefix, counts, self._spill)
        self._sent[order[0]] = counts[order[0]] + 1
        return [[replicas[name]] for name in order]


async def _queue(replica: RunningReplica) -> int:
    """Return the length of a queue; a replica that does not answer has a long one."""
    with suppress(RayError, asyncio.TimeoutError):
        asked = replica.get_queue_len(deadline_s=_QUEUE_DEADLINE_S)
        return await asyncio.wait_for(asked, _QUEUE_DEADLINE_S)
    return _UNKNOWN


@serve.ingress()
class PrefixRouter:
    """What HAProxy asks before it forwards a request."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the one route that HAProxy calls."""
        return Starlette(routes=[Route("/internal/route", self.route, methods=["POST"])])

    async def route(self, request: Request) -> JSONResponse:
        """Tell which replica takes a request, whose body this one has."""
        try:
            # Nothing is reserved: HAProxy sends the request, not this process.
            chosen = self._replicas.choose_replica(await request.body(), _reserve=False)
            async with chosen as selection:
                return JSONResponse({"replica_id": selection._replica.replica_id.to_full_id_str()})
        except (RuntimeError, RayError, RayServeException) as error:
            return JSONResponse({"detail": str(error)}, 503)
