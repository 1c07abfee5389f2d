"""HTTP servers of a peer's own, on ports that nobody else has."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any

from peerbench.lifetime import die_with_parent
from peerbench.protocol import Completed, Gamma, Order

PATIENCE_S = 300
GREEDY = {"temperature": 0, "samplers": ["top_k"], "top_k": 1}


class Server:
    """A child process that answers JSON, over a new connection each time: it rests between."""

    def __init__(self, program: Path, flags: Sequence[object]) -> None:
        self._port = _free_port()
        place = ["--host", "127.0.0.1", "--port", str(self._port)]
        command = [str(program), *place, *map(str, flags)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there is one thread
        )
        try:
            self._wait()
        except BaseException:
            self._process.kill()
            raise

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises: OSError where it is refused."""
        status, text = self._request("POST", path, json.dumps(body))
        if status != 200:
            raise OSError(f"{path} was answered with {status}: {text[:200]}")
        read: dict[str, Any] = json.loads(text)
        return read

    def _wait(self) -> None:
        """Ask until the model is loaded. Raises: OSError where the server ends instead."""
        for _ in range(PATIENCE_S * 10):
            if self._process.poll() is not None:
                raise OSError(f"the server ended with {self._process.returncode}")
            if self._healthy():
                return
            time.sleep(0.1)
        raise OSError(f"the server was not ready within {PATIENCE_S} seconds")

    def _healthy(self) -> bool:
        try:
            return self._request("GET", "/health")[0] == 200
        except OSError:
            return False

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        link = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        with closing(link):
            link.request(method, path, body, {"Content-Type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read().decode()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()


class LlamaServers:
    """Servers of llama.cpp or of a fork, started when they are first asked for.

    A server has one way to speculate and one gamma, so there is one for each.
    """

    def __init__(
        self, program: Path, flags: Callable[[Order], Sequence[object]], stack: ExitStack
    ) -> None:
        self._program = program
        self._flags = flags
        self._stack = stack
        self._servers: dict[tuple[str, Gamma], Server] = {}

    def of(self, order: Order) -> Server:
        """Return the server of an order's mode and gamma."""
        key = (order.mode, order.gamma)
        if key not in self._servers:
            server = Server(self._program, self._flags(order))
            self._servers[key] = self._stack.enter_context(server)
        return self._servers[key]

    def answer(self, prompt: Sequence[int], order: Order) -> dict[str, Any]:
        """Complete one prompt greedily, read anew."""
        wanted = {"prompt": list(prompt), "n_predict": order.max_tokens, "ignore_eos": True,
                  "cache_prompt": False, "return_tokens": True}  # fmt: skip
        return self.of(order).post("/completion", {**wanted, **GREEDY})


def completed(answer: dict[str, Any], tokens: list[int]) -> Completed:
    """Read the times that a server took of itself, so that HTTP is not counted."""
    times = answer["timings"]
    return Completed(
        tokens,
        round(times["prompt_ms"] * 1e6),
        round(times["predicted_ms"] * 1e6),
        drafted=times.get("draft_n"),
        accepted=times.get("draft_n_accepted"),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
