"""nginx before three servers: streams pass at once, and a server that dies takes only its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from websockets.sync.client import connect as open_websocket

from scheduler.support import rows
from serve.support import serving
from specrt.remote.frames import PATH
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.fleets import ROOT, Watched, complete, free_port, lose, servers, started, until
from support.rows import packed

NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
CONFIG = ROOT / "deploy" / "nginx.conf"
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx: `apt-get install nginx-light`")


class Edge(NamedTuple):
    url: str
    ports: list[int]
    pids: list[int]


def with_ports(folder: Path, own: int, upstreams: list[int]) -> Path:
    """Return the configuration as it is, but for its ports and where its files lie."""
    text = CONFIG.read_text()
    for old, new in zip((8080, 8081, 8082, 8083), (own, *upstreams), strict=True):
        text, count = re.subn(rf"^(\s+(?:server|listen) 127\.0\.0\.1:){old}", rf"\g<1>{new}",
                              text, flags=re.MULTILINE)  # fmt: skip
        assert count == 1
    file = folder / "nginx.conf"
    file.write_text(text.replace("/tmp/specrt-nginx", str(folder / "nginx")))
    return file


def test_the_configuration_is_read_without_a_warning(tmp_path: Path) -> None:
    assert NGINX is not None
    file = with_ports(tmp_path, free_port(), [free_port() for _ in range(3)])
    tried = subprocess.run(
        [NGINX, "-p", str(tmp_path), "-t", "-c", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
    assert "warn" not in tried.stderr


def test_what_the_server_takes_passes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Recordings, WebSockets of devices, its own page; and no page of another site."""
    assert NGINX is not None
    own = free_port()
    toys = rows(packed, 1, tokenizer)
    with serving(toys, verify=VerifyLimits(), allow_hosts=()) as live:
        port = live.http.base_url.port
        assert port is not None
        file = with_ports(tmp_path, own, [port] * 3)
        command = [NGINX, "-p", str(tmp_path), "-c", str(file), "-g", "daemon off;"]
        url = f"http://127.0.0.1:{own}"
        with started(command, url, tmp_path / "nginx.log", {}):
            recording = {"file": ("a.wav", b"\0" * 5_000_000)}
            heard = httpx.post(f"{url}/v1/audio/transcriptions", files=recording)
            assert "no bundle for automatic-speech-recognition" in heard.text
            body = {"prompt": "ab", "max_tokens": 2}
            for headers, status in (
                ({"Origin": url}, 200),
                ({"Origin": "https://evil.example"}, 403),
                ({"Host": "evil.example"}, 403),
            ):
                answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers)
                assert answer.status_code == status
            large = httpx.post(f"{url}/v1/completions", json={"prompt": "a" * 5_000_000})
            assert large.status_code == 413
            with open_websocket(f"{url.replace('http', 'ws')}{PATH}") as link:
                assert json.loads(link.recv(10))["type"] == "welcome"


@pytest.fixture
def edge(codelet: Path, tmp_path: Path) -> Iterator[Edge]:
    assert NGINX is not None
    ports, own = [free_port() for _ in range(3)], free_port()
    file = with_ports(tmp_path, own, ports)
    url = f"http://127.0.0.1:{own}"
    command = [NGINX, "-p", str(tmp_path), "-c", str(file), "-g", "daemon off;"]
    with (
        servers(codelet, ports, tmp_path) as behind,
        started(command, url, tmp_path / "nginx.log", {}),
    ):
        yield Edge(url, ports, [process.pid for process in behind])


@pytest.mark.nightly
def test_a_server_that_dies_takes_only_its_own_streams(edge: Edge) -> None:
    streams = [Watched(edge.url, f"def part_{n}(") for n in range(3)]
    whole, broken = lose(edge.pids[0], streams)
    assert (len(whole), len(broken)) == (2, 1)  # one on each: the fewest requests in flight
    assert broken[0].chunks > 5
    assert broken[0].error is not None
    for n in range(6):  # one of three servers refuses connections, and no client is told
        assert complete(edge.url, f"def again_{n}(")[0]


@pytest.mark.nightly
def test_events_come_one_by_one(edge: Edge) -> None:
    stream = Watched(edge.url, "def slowly(", 400)
    until(lambda: stream.chunks > 3)
    assert stream.finish_reason is None
    stream.join(60)
    assert stream.whole
