"""`specrt serve`: OpenAI's interface over a bundle."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click

from specrt.cli.cache import bundle_argument
from specrt.cli.options import API_KEY, print_notices
from specrt.errors import RequestError
from specrt.generator import Generator


@click.command("serve")
@bundle_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True,
              help="Port to listen at; 0 takes a free one.")  # fmt: skip
@click.option("--name", default="", help="Name of the model; the bundle's folder without it.")
@click.option(
    "--alias", multiple=True, metavar="NAME", help="Another name of the model. Repeat it."
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    help=f"File of keys, one a line, each with a name and limits where it has them, # before "
    f"comments; ${API_KEY} is one more. SIGHUP reads it again. Without a key the server is open.",
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    help="Let prompts of one key begin with what another's left in the KV buffers.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Of a web page that may call the server, as https://app.example; * is all. Repeat it.",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Name by which clients call the server, as llm.example; * is all. Repeat it. Without it "
    "a server on loopback without a key takes addresses and names without a dot, others any.",
)
@click.option(
    "--max-queue",
    default=64,
    show_default=True,
    help="Completions that may wait for a row; more are told to come back.",
)
@click.option(
    "--metrics-prefix",
    default="specrt",
    show_default=True,
    help="Of the names in /metrics; `vllm` gives those that tools for vLLM look for.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Port that answers /metrics and nothing else; the other port answers it no longer.",
)
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path),
    help="Jinja file in place of the bundle's chat template.",
)
@click.option(
    "--verify", is_flag=True, help="Let devices draft for this target: `generate --remote`."
)
@click.option("--threads", type=int, help="Cores to use; every one without it.")
@click.option(
    "--drain",
    type=click.FloatRange(0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long requests that run may go on after SIGTERM; a second one ends them at once.",
)
@click.option(
    "--shutdown-delay",
    type=click.FloatRange(0),
    default=0,
    show_default=True,
    metavar="SECONDS",
    help="How long the port stays open after SIGTERM at least, so that balancers see /ready fail.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Open at once; idle ones make room for new ones, else the answer is 503.",
)
@click.option(
    "--read-timeout",
    type=click.FloatRange(0, min_open=True),
    default=20,
    show_default=True,
    metavar="SECONDS",
    help="How long a client may take to send its headers; a body has 1 s more for 500 bytes.",
)
@click.option(
    "--write-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long a client may leave what it is sent unread; its connection is dropped then.",
)
@click.option(
    "--log-requests",
    "request_log",
    flag_value="text",
    help="Write a line for each request to standard output: its id, key, tokens and times.",
)
@click.option("--log-json", "request_log", flag_value="json", help="The same as lines of JSON.")
@click.pass_obj
def command(
    owns_process: bool,
    /,
    bundle: Path,
    host: str,
    port: int,
    name: str,
    alias: tuple[str, ...],
    api_key_file: Path | None,
    share_prefixes: bool,
    allow_origin: tuple[str, ...],
    allow_host: tuple[str, ...],
    max_queue: int,
    metrics_prefix: str,
    metrics_port: int | None,
    chat_template: Path | None,
    verify: bool,
    threads: int | None,
    drain: float,
    shutdown_delay: float,
    max_connections: int,
    read_timeout: float,
    write_timeout: float,
    request_log: str | None,
) -> int:
    """Serve BUNDLE over HTTP as OpenAI's clients expect, with a page to try it at /.

    Requests share the rows of the bundle as they come and go. SIGTERM and Ctrl-C let what runs
    end. No prompt and no text is logged.
    """
    from specrt.serve import ServerOptions, VerifyLimits, app

    own = os.environ.get(API_KEY, "").strip()
    is_open = not own and api_key_file is None
    with ExitStack() as sockets:
        ports = [port] if metrics_port is None else [port, metrics_port]
        listeners = [sockets.enter_context(_listening(host, one)) for one in ports]
        loopback = ip_address(listeners[0].getsockname()[0]).is_loopback
        options = ServerOptions(
            name=name,
            aliases=alias,
            api_keys=(own,) if own else (),
            api_key_file=api_key_file,
            share_prefixes=share_prefixes,
            metrics_port=None if metrics_port is None else _port(listeners[1]),
            allow_origins=allow_origin,
            allow_hosts=allow_host or (() if loopback and is_open else ("*",)),
            max_queue=max_queue,
            metrics_prefix=metrics_prefix,
            chat_template=chat_template,
            verify=VerifyLimits() if verify else None,
            threads=threads,
            owns_process=owns_process,
        )
        if is_open and not loopback:
            print(
                f"warning: everybody who reaches {host} can use the server; --api-key-file or "
                f"${API_KEY} closes it",
                file=sys.stderr,
            )
        if request_log is not None:
            _log_requests(as_json=request_log == "json")
        _serve(
            partial(app, bundle, options),
            listeners,
            host,
            (max_connections, read_timeout, write_timeout),
            drain_s=drain,
            shutdown_delay_s=shutdown_delay,
        )
    return 0


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # nobody reads them any more
            print(self.format(record), flush=True)


def _log_requests(*, as_json: bool) -> None:
    """Write a line for each request to standard output."""
    from specrt.serve.request_log import JsonLines, log

    handler = _LogLines()
    if as_json:
        handler.setFormatter(JsonLines())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def _listening(host: str, port: int) -> socket.socket:
    """Open the port before anything else is done.

    Raises: RequestError for an address that cannot be had.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        raise RequestError(
            f"{host} port {port} cannot be listened at: {reason}; give another "
            "one with --host and --port"
        ) from None


def _port(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def _serve(
    make: Callable[[], Any],
    listeners: list[socket.socket],
    host: str,
    limits: tuple[int, float, float],
    **options: Any,
) -> None:
    """Serve the application that `make` makes, until SIGTERM or Ctrl-C, and let what runs end."""
    from specrt.serve import HttpServer
    from specrt.serve.connection import ConnectionLimits

    application = make()
    service = application.state.service
    notices, models = service.generator.notices, service.generator.models
    print_notices(notices)
    told = any("specrt tune" in notice for notice in notices)
    if models.costs is None and len(models.gammas) > 1 and not told:
        print_notices(["not tuned here: `auto` learns what passes cost; run `specrt tune BUNDLE`"])
    print(_drafting(service.generator), file=sys.stderr)
    shown = f"[{host}]" if ":" in host else host
    url, *others = [f"http://{shown}:{_port(listener)}" for listener in listeners]
    metrics = "".join(f", metrics: {other}/metrics" for other in others)

    def ready() -> None:
        told = f"serving {service.name} at {url}/v1 (page: {url}/{metrics})"
        print(told, file=sys.stderr, flush=True)

    server = HttpServer(application, ready, limits=ConnectionLimits(*limits), **options)
    # One that comes before uvicorn listens to signals counts too. It raises the signal again once
    # it has ended: that is not a failure here.
    signal.signal(signal.SIGTERM, server.handle_exit)
    with suppress(KeyboardInterrupt):
        server.run(sockets=listeners)
    print(f"stopped serving {service.name}", file=sys.stderr)


def _drafting(generator: Generator) -> str:
    """Return in words what drafts where a request does not say, and how many requests run."""
    rows = "1 request runs" if generator.rows == 1 else f"{generator.rows} requests run"
    drafter, gamma = generator.check_drafter(None), generator.check_gamma(None)
    return f"drafter {drafter}, gamma {gamma}; {rows} at once, others wait"
