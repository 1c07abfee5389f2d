"""The ASGI application: routes, who may call them, how large a request may be, errors as JSON."""

from __future__ import annotations

import re
from asyncio import to_thread
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from reprlib import repr as short
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import specrt
from specrt.bundle import DEFAULT_BUNDLE, TOKENIZER, Manifest, read_manifest
from specrt.errors import RequestError, SpecrtError
from specrt.loading import load
from specrt.remote.frames import PATH
from specrt.serve.admission import OverloadError
from specrt.serve.api_keys import ApiKey, ApiKeys
from specrt.serve.bodies import DetokenizeBody, TokenizeBody, refusal_of
from specrt.serve.completion_routes import completion_routes
from specrt.serve.messages_routes import messages_routes
from specrt.serve.openapi_document import ERRORS, openapi_document
from specrt.serve.origin_policy import ANY, OriginPolicy
from specrt.serve.request_log import RequestLog, record_of
from specrt.serve.responses_routes import responses_routes
from specrt.serve.route import PublicRoute, route_at
from specrt.serve.sending import StrictJsonRoute, error_response
from specrt.serve.service import Service, UnknownModelError
from specrt.serve.transcription_routes import transcription_routes
from specrt.serve.verify_sessions import VerifyEndpoint, VerifyLimits
from specrt.speech.whisper_config import SPEECH_TASK, read_whisper_config
from specrt.text.chat_template import ChatTemplate, NoTemplateError, read_template
from specrt.text.prompt_file import read_text

_DENIAL = "websocket.http.response"
"""ASGI's extension for an answer to a WebSocket that is refused."""

_MOST_DIGITS = 18
"""Digits of a number that is read: Python refuses thousands of them."""

_PAGE_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest of it is the page's own
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of the application."""

    name: str = ""
    """Of the model, as clients name it; the bundle's folder's when empty."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the server; without one it is open to all who reach it. Each may have a
    name and limits after it, as a line of the file has."""
    api_key_file: Path | None = None
    """A file of such lines (docs/serving.md); `app.state.keys.read()` reads it again."""
    share_prefixes: bool = False
    """Whether prompts of one key may begin with what another's left in the KV buffers; how long the
    first token takes then tells each what others sent."""
    aliases: tuple[str, ...] = ()
    """Other names of the model."""
    metrics_port: int | None = None
    """The port, of those the server listens at, that answers /metrics and nothing else; any answers
    it when None."""
    allow_origins: tuple[str, ...] = ()
    """Of web pages elsewhere that may call the server from a browser, as `https://app.example`;
    `*` is all."""
    allow_hosts: tuple[str, ...] = (ANY,)
    """Names by which clients call the server, as `llm.example`; `*` is all. Others are refused, but
    for IP addresses and names without a dot. `specrt serve` takes only these on loopback."""
    max_queue: int = 64
    """Completions that may wait for a row; beyond them the answer is 429."""
    max_body_bytes: int = 4 << 20
    max_audio_bytes: int = 25 << 20
    """The same of a form with a recording."""
    metrics_prefix: str = "specrt"
    """`vllm` gives the names that tools for vLLM look for."""
    chat_template: Path | None = None
    """A file with a Jinja template, in place of the bundle's."""
    verify: VerifyLimits | None = None
    """Lets devices draft for this target (docs/remote.md), within these limits."""
    threads: int | None = None
    """Cores to use; every one when None."""
    owns_process: bool = False
    """See `specrt.load`."""

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.max_queue < 0:
            raise RequestError(f"max_queue is {self.max_queue}; expected 0 or more")
        _ = self.keys
        if any(not alias.strip() for alias in self.aliases):
            raise RequestError("an alias is empty; leave it out, or give a name")
        for origin in self.allow_origins:
            if origin != ANY and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*]+", origin):
                raise RequestError(
                    f"origin {short(origin)} is none; expected one such as 'https://app.example', "
                    "without a path, or '*'"
                )
        for host in self.allow_hosts:
            if host != ANY and not re.fullmatch(r"[^/:\s*]+", host):
                raise RequestError(
                    f"host {short(host)} is not a name; expected one such as 'llm.example', "
                    "without scheme and port, or '*'"
                )

    @cached_property
    def keys(self) -> ApiKeys:
        """The keys; their file, which may be a pipe, is read once.

        Raises: RequestError.
        """
        share = self.share_prefixes
        return ApiKeys(self.api_keys, self.api_key_file, share_prefixes=share)


def app(bundle: str | Path = DEFAULT_BUNDLE, options: ServerOptions | None = None) -> FastAPI:
    """Return the ASGI application of a bundle, which it opens at once and closes at its shutdown.

    Raises: BundleError, EngineError, RequestError.
    """
    options = options or ServerOptions()
    folder = Path(bundle)
    template = _template(folder, options.chat_template)
    manifest = read_manifest(folder)
    speech = read_whisper_config(folder) if manifest.task == SPEECH_TASK else None
    generator = load(
        folder, threads=options.threads, owns_process=options.owns_process, text_memory_bytes=0
    )
    service = Service(
        generator,
        options.name or re.sub(r"-[0-9a-f]{16}$", "", folder.resolve().name),  # the cache's hash
        template=template,
        fingerprint=f"b{manifest.files[TOKENIZER].sha256[:12]}",
        facts=_facts(manifest),
        max_queue=options.max_queue,
        metrics_prefix=options.metrics_prefix,
        speech=speech,
        aliases=options.aliases,
    )
    return application(service, options)


def application(service: Service, options: ServerOptions) -> FastAPI:
    """Return the ASGI application of a service, whose generator it closes at its shutdown."""
    reader, sessions = service.generator.reader, None
    if options.chat_template is not None:
        reader.require_continuing("it holds no conversations; leave --chat-template out")
    if options.verify is not None:
        reader.require_continuing("no device drafts for it; leave --verify out")
        sessions = VerifyEndpoint(
            service.generator,
            options.verify,
            name=service.name,
            draining=lambda: service.admission.draining,
            on_round=service.metrics.device_round,
        )
        service.metrics.devices = sessions

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.admission.draining = True
        if sessions is not None:
            sessions.close()
        await to_thread(service.close)

    made = FastAPI(
        title="specrt",
        version=specrt.__version__,
        description="OpenAI's and Anthropic's interfaces over a bundle.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    made.openapi = lambda: openapi_document(made)  # type: ignore[method-assign]
    made.state.service = service
    made.state.keys = service.metrics.keys = keys = options.keys
    _add_errors(made, service)
    for routes in (
        status_routes, model_routes, completion_routes, responses_routes, messages_routes,
        transcription_routes,
    ):  # fmt: skip
        made.include_router(routes(service))
    if sessions is not None:
        made.add_api_websocket_route(PATH, sessions.endpoint)
    _add_no_route(made, service)
    made.add_middleware(AccessControl, options=options, service=service, keys=keys)
    if options.metrics_port is not None:
        made.add_middleware(MetricsPort, port=options.metrics_port)
    if options.allow_origins:  # asked before a request is made, without a key
        made.add_middleware(
            CORSMiddleware, allow_origins=options.allow_origins, allow_methods=["*"],
            allow_headers=["*"], expose_headers=["x-request-id", "request-id", "retry-after"],
        )  # fmt: skip
    made.add_middleware(RequestLog)
    return made


def _facts(manifest: Manifest) -> dict[str, Any]:
    """Return what /v1/models tells of a bundle."""
    models = {
        role: {
            "model_type": model.model_type,
            "parameters": model.parameters,
            "precision": model.precision,
        }
        for role, model in (("target", manifest.target), ("draft", manifest.draft))
        if model is not None
    }
    return {"backend": manifest.backend_of(manifest.target), **models}


def _template(folder: Path, file: Path | None) -> ChatTemplate | None:
    if file is not None:
        return read_template(folder, read_text(file))
    try:
        return read_template(folder)
    except NoTemplateError:
        return None


_READY = {
    "content": {
        "application/json": {
            "schema": {"type": "object", "properties": {"ready": {"type": "boolean"}}}
        }
    }
}


def status_routes(service: Service) -> APIRouter:
    """Return the page, and the routes that say how the server is."""
    router = APIRouter(route_class=PublicRoute)
    page = files("specrt.serve").joinpath("page.html")

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page.read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Tell that the process works."""
        return {"status": "ok"}

    @router.get(
        "/ready", response_model=None, responses={200: _READY, 503: {**ERRORS[503], **_READY}}
    )
    async def ready() -> Response:
        """Tell whether new requests are taken, as far as the queue has room."""
        draining = service.admission.draining
        return JSONResponse({"ready": not draining}, 503 if draining else 200)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Tell the version of specrt."""
        return {"version": specrt.__version__}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Tell what Prometheus scrapes."""
        return Response(service.metrics.exposition(), media_type=service.metrics.content_type)

    return router


def model_routes(service: Service) -> APIRouter:
    """Return the routes about the model and its tokenizer, which runs in threads."""
    router = APIRouter(route_class=StrictJsonRoute)
    tokenizer = service.generator.tokenizer

    def piece(token: int) -> str | list[int]:
        text = tokenizer.text_of(token)
        return [*tokenizer.bytes_of(token)] if text is None else text

    @router.get("/models", include_in_schema=False)  # as llama.cpp's clients have it
    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model, under each of its names."""
        return {"object": "list", "data": [*map(service.to_json, service.names)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the one model."""
        service.require(name)
        return service.to_json(name)

    @router.post("/tokenize")
    def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the tokens of a text, or of a conversation."""
        if body.messages is not None:
            ids = service.tokens_of(service.render(body.messages))
        else:
            text = body.prompt if body.prompt is not None else body.content
            if text is None:
                raise RequestError("there is no text; give prompt, content or messages")
            default = body.prompt is not None  # llama.cpp's field adds none
            given = (body.add_special_tokens, body.add_special)
            special = next((one for one in given if one is not None), default)
            ids = service.tokens_of(text, special=special) if text else []
        tokens = (
            [{"id": token, "piece": piece(token)} for token in ids] if body.with_pieces else ids
        )
        return {"tokens": tokens, "count": len(ids), "max_model_len": service.context}

    @router.post("/detokenize")
    def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Return the text of tokens."""
        text = tokenizer.decode(service.generator.reader.token_ids(body.tokens))
        return {"prompt": text, "content": text}

    return router


def _add_errors(made: FastAPI, service: Service) -> None:
    """Answer every error as the clients of its route read it."""

    def refuse(
        request: HttpRequest, status: int, message: str, *kind: str, **more: Any
    ) -> Response:
        service.metrics.refuse(status)
        return error_response(request.scope, status, message, *kind, **more)

    @made.exception_handler(RequestValidationError)
    async def invalid(request: HttpRequest, error: RequestValidationError) -> Response:
        found = [{**one, "loc": one["loc"][1:]} for one in error.errors()]
        param, message = refusal_of(found, error.body)
        return refuse(request, 400, message, param=param)

    @made.exception_handler(UnknownModelError)
    async def unknown(request: HttpRequest, error: UnknownModelError) -> Response:
        more = {"param": "model", "code": "model_not_found"}
        return refuse(request, 404, str(error), "not_found_error", **more)

    @made.exception_handler(RequestError)
    async def refused(request: HttpRequest, error: RequestError) -> Response:
        return refuse(request, 400, str(error))

    @made.exception_handler(OverloadError)
    async def overloaded(request: HttpRequest, error: OverloadError) -> Response:
        status = 503 if service.admission.draining else 429
        headers = {"Retry-After": str(error.retry_after_s)}
        kind = "rate_limit_error" if status == 429 else "service_unavailable"
        return refuse(request, status, str(error), kind, headers=headers)

    @made.exception_handler(SpecrtError)
    async def failed(request: HttpRequest, error: SpecrtError) -> Response:
        return refuse(request, 500, str(error), "server_error")

    @made.exception_handler(HTTPException)
    async def plain(request: HttpRequest, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        headers = dict(error.headers or {})
        return refuse(request, error.status_code, error.detail, kind, headers=headers)

    @made.exception_handler(Exception)
    async def defect(request: HttpRequest, _: Exception) -> Response:
        message, headers = "the server failed; its log says why", record_of(request.scope).headers
        return refuse(request, 500, message, "server_error", headers=headers)


def _add_no_route(made: FastAPI, service: Service) -> None:
    """Tell what is asked for where nothing is, a WebSocket too."""

    async def no_route(scope: Scope, receive: Receive, send: Send) -> None:
        told = f"there is nothing at {scope['path'][:200]!r}; /openapi.json tells what is here"
        if scope["type"] == "http":
            raise HTTPException(404, told)
        service.metrics.refuse(404)
        if _DENIAL in scope.get("extensions", {}):
            await error_response(scope, 404, told, "not_found_error")(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    made.router.default = no_route


class AccessControl:
    """Lets in who has a key, or no page of another site, and bodies that are not too large."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, service: Service, keys: ApiKeys
    ) -> None:
        self._app = app
        self._keys = keys
        self._options = options
        self._policy = OriginPolicy(options.allow_hosts, options.allow_origins)
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = {key.lower(): value for key, value in scope.get("headers", [])}
        record_of(scope).key = key = self._key(headers)
        if refused := self._refused(scope, headers):
            await self._refuse(*refused, scope, receive, send)
            return
        route = route_at(scope["path"])
        if self._keys and not route.public and key is None:
            await self._refuse(
                401, "this server needs a key: Authorization: Bearer KEY", scope, receive, send
            )
            return
        length = headers.get(b"content-length", b"").lstrip(b"0")
        most: int = getattr(self._options, route.most_bytes)
        if length.isdigit() and (len(length) > _MOST_DIGITS or int(length) > most):
            await self._refuse(413, _too_large(most), scope, receive, send)
            return
        if scope.get("method") == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        await self._app(scope, _bounded(receive, most), send)

    def _refused(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Return the status and why, if the request is of a page that may not use the server."""
        hosts = [value for key, value in scope["headers"] if key.lower() == b"host"]
        if len(hosts) > 1 or (not hosts and scope.get("http_version") == "1.1"):
            return 400, f"the request has {len(hosts)} Host headers; expected one"
        reason = self._policy.refuses_host(hosts[0].decode("latin-1")) if hosts else None
        if reason is None and not self._keys:
            method = scope.get("method", "WEBSOCKET")
            reason = self._policy.refuses_origin(method, headers)
        return (403, reason) if reason else None

    def _key(self, headers: dict[bytes, bytes]) -> ApiKey | None:
        """Return the key of a request, None without one."""
        bearer = headers.get(b"authorization", b"")
        scheme, _, token = bearer.partition(b" ")
        given = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        return self._keys.find(given)

    async def _refuse(
        self, status: int, message: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._service.metrics.refuse(status)
        if scope["type"] == "websocket" and _DENIAL not in scope.get("extensions", {}):
            await send({"type": "websocket.close"})  # before it was accepted: the answer is 403
            return
        kind = {401: "authentication_error", 403: "permission_error"}.get(
            status, "invalid_request_error"
        )
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        response = error_response(scope, status, message, kind, code=status, headers=headers)
        await response(scope, receive, send)


class MetricsPort:
    """Answers /metrics at a port of its own, and nothing else there."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        here = (scope.get("server") or ("", None))[1] == self._port
        websocket = scope["type"] == "websocket"
        if scope["type"] == "lifespan" or here == (scope["path"] == "/metrics" and not websocket):
            await self._app(scope, receive, send)
        elif not websocket or _DENIAL in scope.get("extensions", {}):
            told = "only /metrics is here" if here else f"/metrics is at port {self._port}"
            await error_response(scope, 404, told, "not_found_error")(scope, receive, send)
        else:
            await send({"type": "websocket.close"})


def _bounded(receive: Receive, most: int) -> Receive:
    """Return what receives a body of so many bytes, and no more."""
    read = 0

    async def receive_bounded() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > most:
            raise HTTPException(413, _too_large(most))
        return message

    return receive_bounded


def _too_large(most: int) -> str:
    return f"the body has more than {most} bytes; send less"
