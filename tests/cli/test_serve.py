"""`specrt serve` as a process: where it listens, who may use it, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from cli.conftest import COMMAND


@contextmanager
def started(
    codelet: Path, *options: str, **variables: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server, and give its address."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(codelet), "--port", "0", "--threads", "1", *options],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"serving codelet at (http://\S+)/v1", line):
                yield found[1], process
                return
        raise AssertionError("it never said where it listens")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_what_runs_end(codelet: Path, number: int) -> None:
    body = {"prompt": "def f(", "max_tokens": 300, "ignore_eos": True, "stream": True, "gamma": 0}
    with (
        started(codelet, SPECRT_API_KEY="k") as (url, process),
        httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(number)
        *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
        assert process.wait(60) == 0


EARLY = """
import os, signal, uvicorn
honest = uvicorn.Server.run
def run(*args, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    honest(*args, **options)
uvicorn.Server.run = run
from specrt.cli import main
main()
"""


def test_a_signal_before_the_server_listens_to_signals_ends_it(codelet: Path) -> None:
    words = [sys.executable, "-c", EARLY, "serve", str(codelet), "--port", "0", "--threads", "1"]
    assert subprocess.run(words, check=False, timeout=60, capture_output=True).returncode == 0


def refused(*options: str) -> str:
    """Return the one line of a server that does not start."""
    words = [*COMMAND, "serve", *options]
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    return line


def test_what_cannot_be_served_is_one_line(codelet: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"port {port}" in refused(str(codelet), "--port", port)
    assert "--host" in refused(str(codelet), "--host", "300.1.1.1")
    assert "--port" in refused(str(codelet), "--port", "70000")
    assert "specrt build" in refused(str(tmp_path / "nothing"), "--port", "0")
    empty = tmp_path / "keys"
    empty.write_text("\n")
    assert "no key" in refused(str(codelet), "--port", "0", "--api-key-file", str(empty))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for")
    assert "Jinja" in refused(str(codelet), "--port", "0", "--chat-template", str(broken))


def test_a_device_drafts_for_a_server_that_verifies(codelet: Path) -> None:
    prompt = ["--prompt", "def f(", "--max-tokens", "30", "--temperature", "0.8", "--seed", "3"]

    def text(*options: str) -> str:
        words = [*COMMAND, "generate", str(codelet), *prompt, "--threads", "1", *options]
        variables = {**os.environ, "SPECRT_API_KEY": "k"}
        return subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL, env=variables)

    with started(codelet, "--verify", SPECRT_API_KEY="k") as (url, _):
        remote = url.replace("http", "ws")
        assert text("--remote", remote, "--gamma", "4") == text("--gamma", "0")
        refused_ = subprocess.run(
            [*COMMAND, "generate", str(codelet), *prompt, "--remote", remote],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert refused_.returncode == 2
        assert "key" in refused_.stderr
