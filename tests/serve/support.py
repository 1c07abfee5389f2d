"""A server in a thread, over a generator of toys or a bundle."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from scheduler.support import target_of
from specrt.generator import Generator
from specrt.serve.application import ServerOptions, application
from specrt.serve.service import Service
from specrt.text.chat_template import ChatTemplate

TEMPLATE = """{%- for t in tools or [] %}{{ t.function.name }};{% endfor -%}
{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"""


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "time")
]


def until(holds: Callable[[], object]) -> None:
    """Wait until something holds."""
    for _ in range(3000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to pass")


class Live:
    """A server that listens, and a client of it."""

    def __init__(self, url: str, service: Service) -> None:
        self.url = url
        self.service = service
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **body: Any) -> Any:
        """Return the JSON of an answer that must be one."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, status: int, **body: Any) -> str:
        """Return the message of a refusal, which must have a status."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["type"]
        return str(error["message"])

    def events(self, path: str, **body: Any) -> list[Any]:
        """Return the objects of a streamed answer, which must end as one does."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def failing(generator: Generator, after: int = 3) -> Iterator[None]:
    """Let the target fail after so many passes more."""
    engine, honest = target_of(generator), target_of(generator).forward
    before = len(engine.calls)

    def fail(*args: Any) -> Any:
        if len(engine.calls) > before + after:
            raise ValueError("the cable is out")
        return honest(*args)

    engine.forward = fail
    try:
        yield
    finally:
        engine.forward = honest


@contextmanager
def serving(generator: Generator, name: str = "toy", **options: Any) -> Iterator[Live]:
    """Serve a generator, which is closed at the end."""
    chosen = ServerOptions(**options)
    service = Service(
        generator, name, template=ChatTemplate(TEMPLATE, {}), fingerprint="b0",
        max_queue=chosen.max_queue, metrics_prefix=chosen.metrics_prefix,
    )  # fmt: skip
    with listening(application(service, chosen)) as live:
        yield live


@contextmanager
def listening(made: FastAPI) -> Iterator[Live]:
    """Serve an application."""
    with running(made, log_level="warning") as port:
        live = Live(f"http://127.0.0.1:{port}", made.state.service)
        try:
            yield live
        finally:
            live.http.close()


@contextmanager
def running(made: FastAPI, **options: Any) -> Iterator[int]:
    """Serve an application in a thread, and give its port."""
    server = uvicorn.Server(uvicorn.Config(made, port=0, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
