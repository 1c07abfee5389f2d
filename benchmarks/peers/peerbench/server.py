"""An HTTP server of a peer's own, on a port that nobody else has."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

PATIENCE_S = 300


class Server:
    """A child process that answers JSON over one connection, kept open."""

    def __init__(self, program: Path, flags: Sequence[object]) -> None:
        port = _free_port()
        command = [str(program), "--host", "127.0.0.1", "--port", str(port), *map(str, flags)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self._link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            self._wait()
        except BaseException:
            self._process.kill()
            raise

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises: OSError where it is refused."""
        headers = {"Content-Type": "application/json"}
        self._link.request("POST", path, json.dumps(body), headers)
        answer = self._link.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise OSError(f"{path} was answered with {answer.status}: {text[:200]}")
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
            self._link.request("GET", "/health")
            answer = self._link.getresponse()
            answer.read()
        except OSError:
            self._link.close()
            return False
        return answer.status == 200

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._link.close()
        self._process.terminate()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
