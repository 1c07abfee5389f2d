"""Processes that serve on this machine, and clients whose streams one of them loses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import openai

ROOT = Path(__file__).parents[2]
LONG = 1500
"""Tokens that take a while on one core."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str], url: str, log: Path, env: dict[str, str], seconds: float = 120
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until it answers at /health; end its whole session."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **env},
        )  # fmt: skip
    try:
        until(lambda: answers(url), seconds, lambda: _tail(process, log))
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@contextmanager
def servers(bundle: Path, ports: Sequence[int], folder: Path) -> Iterator[list[Any]]:
    """Run `specrt serve` on each port, one core each."""
    import sys

    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    [sys.executable, "-m", "specrt", "serve", str(bundle), "--port", str(port),
                     "--threads", "1", "--name", "codelet"],
                    f"http://127.0.0.1:{port}", folder / f"{port}.log", {},
                )
            )
            for port in ports
        ]  # fmt: skip


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def until(holds: Any, seconds: float = 60, otherwise: Any = lambda: "") -> None:
    end = monotonic() + seconds
    while not holds():
        assert monotonic() < end, f"it did not come to pass within {seconds} s: {otherwise()}"
        sleep(0.05)


def client_of(url: str) -> openai.OpenAI:
    """Return a client, which is closed when nothing refers to it."""
    http = httpx.Client(timeout=120)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
    weakref.finalize(client, http.close)
    return client


def complete(url: str, prompt: str) -> str:
    """Return a short completion."""
    made = client_of(url).completions.create(
        model="codelet", prompt=prompt, max_tokens=4, temperature=0
    )
    return made.choices[0].text


class Watched(threading.Thread):
    """A stream that is read to its end in a thread."""

    def __init__(self, url: str, prompt: str, tokens: int = LONG) -> None:
        super().__init__(daemon=True)
        self.chunks = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._url, self._prompt, self._tokens = url, prompt, tokens
        self.start()

    @property
    def whole(self) -> bool:
        return self.error is None and self.finish_reason == "length"

    def run(self) -> None:
        try:
            with client_of(self._url).completions.create(
                model="codelet", prompt=self._prompt, max_tokens=self._tokens, stream=True,
                temperature=0, extra_body={"ignore_eos": True, "gamma": 0},
            ) as stream:  # fmt: skip
                for event in stream:
                    self.chunks += 1
                    if event.choices and event.choices[0].finish_reason:
                        self.finish_reason = event.choices[0].finish_reason
        except (openai.OpenAIError, httpx.HTTPError) as error:
            self.error = error


def lose(pid: int, streams: Sequence[Watched], begun: int) -> tuple[list[Watched], list[Watched]]:
    """Kill a process in the middle of streams; return those that ended whole, and the others.

    So many streams have begun by then; others wait for the row of their server.
    """
    until(lambda: sum(s.chunks > 5 for s in streams) >= begun, 60, lambda: _state(streams))
    os.kill(pid, signal.SIGKILL)
    for stream in streams:
        stream.join(120)
    assert not any(stream.is_alive() for stream in streams), _state(streams)
    return [s for s in streams if s.whole], [s for s in streams if not s.whole]


def connections(pid: int) -> int:
    """Return how many established connections a process has on its listening TCP ports."""
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            held.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {row[1].split(":")[1] for row in rows if row[3] == "0A"}
    return sum(
        row[3] == "01" and row[9] in held and row[1].split(":")[1] in listening for row in rows
    )


def descendants(pid: int, words: str) -> list[int]:
    """Return the processes below one whose command line has certain words."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
    found = []
    for child in parents:
        above = child
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and child != pid:
            with suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words in line:
                    found.append(child)
    return found


def _state(streams: Sequence[Watched]) -> list[Any]:
    return [(s.chunks, s.finish_reason, s.error) for s in streams]


def _tail(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"exit {process.poll()}: {log.read_text(errors='replace')[-3000:]}"
