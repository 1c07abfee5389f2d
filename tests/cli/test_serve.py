"""`specrt serve` as a process: where it listens, who may use it, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.conftest import COMMAND, Run
from shared import nightly_but


@contextmanager
def started(
    codelet: Path, *options: str, log: Any = None, **variables: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server, and give its address."""
    process = subprocess.Popen(
        [*COMMAND, "serve", str(codelet), "--port", "0", "--threads", "1", *options],
        stdout=log, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving codelet at (http://\S+)/v1", line):
                assert "drafter cascade, gamma auto; 1 request runs" in said
                assert "specrt tune" in said
                yield found[1], process
                return
        raise AssertionError("it never said where it listens")
    finally:
        process.kill()
        process.communicate()


ENDS = [signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", nightly_but(ENDS[:1], ENDS))
def test_a_signal_lets_what_runs_end(codelet: Path, tmp_path: Path, number: int) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\n  #old\n of-the-team \n")
    body = {"prompt": "def f(", "max_tokens": 300, "ignore_eos": True, "stream": True, "gamma": 0}
    with (
        started(codelet, "--api-key-file", str(keys), SPECRT_API_KEY="k") as (url, process),
        httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        for key, status in {"#old": 401, "# of the team": 401, "of-the-team": 200}.items():
            asked = {"X-Api-Key": key, "Host": "llm.example"}
            assert httpx.get(f"{url}/v1/models", headers=asked).status_code == status
        assert client.get("/v1/models").json()["data"][0]["specrt"]["backend"] == "ort-cpu"
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(number)
        *_, last = [line for line in lines if line]
        assert last == "data: [DONE]"
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "stopped serving codelet" in process.stderr.read()


LONG = {"max_tokens": 2000, "ignore_eos": True, "gamma": 0}
HELLO = [{"role": "user", "content": "def f("}]
STREAMS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "def f("},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "def f(", "max_output_tokens": 2000},
    "/v1/messages": {"messages": HELLO},
}


def cut_short(client: httpx.Client, path: str, begun: threading.Barrier) -> dict[str, Any]:
    """Return the last event of a stream that the end of its server cuts."""
    body = LONG | STREAMS[path] | {"stream": True}
    with client.stream("POST", path, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        begun.wait(60)
        *_, last = [line for line in answer.iter_lines() if line]
    told: dict[str, Any] = json.loads(last.removeprefix("data: "))
    return told


@pytest.mark.parametrize("signals", nightly_but([2], [1, 2]))
def test_what_is_cut_is_told_so(codelet: Path, tmp_path: Path, signals: int) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    drain = "0" if signals == 1 else "600"
    begun = threading.Barrier(len(STREAMS) + 1)
    with (
        started(codelet, "--drain", drain, "--chat-template", str(template)) as (url, process),
        httpx.Client(base_url=url) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = {path: pool.submit(cut_short, client, path, begun) for path in STREAMS}
        body = LONG | {"prompt": "def f("}
        whole = pool.submit(client.post, "/v1/completions", json=body, timeout=60)
        begun.wait(60)
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 403
        while 'num_requests_waiting{model_name="codelet"} 4.0' not in client.get("/metrics").text:
            assert process.poll() is None
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)  # two that come at once are one
        told = {path: one.result() for path, one in asked.items()}
        errors = [
            told["/v1/completions"]["error"],
            told["/v1/chat/completions"]["error"],
            told["/v1/responses"]["response"]["error"],
            told["/v1/messages"]["error"],
            whole.result().json()["error"],
        ]
        assert all("shut down" in error["message"] for error in errors)
        assert told["/v1/responses"]["type"] == "response.failed"
        assert told["/v1/messages"]["type"] == "error"
        assert whole.result().status_code == 503
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "5 of its completions were cut" in process.stderr.read()


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


def test_what_cannot_be_served_is_one_line(cli: Run, codelet: Path, tmp_path: Path) -> None:
    empty, broken = tmp_path / "keys", tmp_path / "broken.jinja"
    empty.write_text("\n# none yet\n")
    broken.write_text("{% for")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for told, *options in (
            (f"port {port}", codelet, "--port", port), ("--host", codelet, "--host", "300.1.1.1"),
            ("--port", codelet, "--port", 70000), ("specrt build", tmp_path / "nothing"),
            ("no key", codelet, "--port", 0, "--api-key-file", empty),
            ("Jinja", codelet, "--port", 0, "--chat-template", broken),
        ):  # fmt: skip
            ran = cli("serve", *options)
            assert (ran.status, told in ran.err.splitlines()[-1]) == (2, True), ran


LACKING = """
import os, sys
from specrt.cli import run
for library in ("fastapi", "httptools"):
    child = os.fork()
    if not child:
        sys.modules[library] = None
        os._exit(run(["serve", sys.argv[1]]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
"""


def test_a_server_without_its_libraries_says_so_before_any_model_is_opened(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LACKING, str(tmp_path)]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stderr.splitlines()
    for line, library in zip(said, ("fastapi", "httptools"), strict=True):
        assert f"needs {library}" in line
        assert "setup-serve" in line


def test_keys_are_read_again_and_requests_are_lines(codelet: Path, tmp_path: Path) -> None:
    keys, log = tmp_path / "keys", tmp_path / "log"
    keys.write_text("old name=alice\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    options = ("--api-key-file", str(keys), "--metrics-port", port, "--log-json")
    with log.open("w") as out, started(codelet, *options, log=out) as (url, process):
        body = {"prompt": "def f(", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Api-Key": "old"})
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'specrt_key_generation_tokens_total{key="alice",model_name="codelet"} 5.0' in metrics
        assert httpx.get(f"{url}/metrics").status_code == 404
        assert process.stderr is not None
        for text, told, opens in (("", "stay as they were", "old"), ("new", "read again", "new")):
            keys.write_text(text)
            process.send_signal(signal.SIGHUP)
            assert told in process.stderr.readline()
            for key in ("old", "new"):
                found = httpx.get(f"{url}/v1/models", headers={"X-Api-Key": key})
                assert found.status_code == (200 if key == opens else 401)
    first, *_ = map(json.loads, log.read_text().splitlines())
    assert first["request_id"] == answer.headers["x-request-id"]
    assert first.items() >= {"key": "alice", "status": 200, "completion_tokens": 5}.items()
