"""Fleets as they are started by hand, and what nginx passes on."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect as open_websocket

from scheduler.support import rows
from serve.support import serving
from specrt.remote.frames import PATH
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.fleets import (
    ROOT,
    Watched,
    answers,
    complete,
    connections,
    descendants,
    free_port,
    lose,
    servers,
    started,
    until,
)
from support.rows import packed

NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
CONFIG = ROOT / "deploy" / "nginx.conf"
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx: `apt-get install nginx-light`")


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
            assert "not a bundle for automatic-speech-recognition" in heard.text
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


Fleet = tuple[str, Callable[[], list[int]]]
"""Its address, and what returns the processes that serve."""


@contextmanager
def nginx(bundle: Path, folder: Path) -> Iterator[Fleet]:
    ports, own = [free_port() for _ in range(3)], free_port()
    url, file = f"http://127.0.0.1:{own}", with_ports(folder, own, ports)
    command = [str(NGINX), "-p", str(folder), "-c", str(file), "-g", "daemon off;"]
    with (
        servers(bundle, ports, folder) as upstream,
        started(command, url, folder / "nginx.log", {}),
    ):
        yield url, lambda: [server.pid for server in upstream if server.poll() is None]


@contextmanager
def ray(bundle: Path, folder: Path) -> Iterator[Fleet]:
    url = "http://127.0.0.1:8000"  # Ray's own choice
    serve = str(Path(sys.executable).with_name("serve"))
    options = [f"bundle={bundle}", "name=codelet", "replicas=2"]
    env = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    command = [serve, "run", "deploy.ray_serve:build", *options]
    with started(command, url, folder / "ray.log", env, seconds=240) as process:
        yield url, lambda: descendants(process.pid, "ServeReplica:default:Replica")


@contextmanager
def bentoml(bundle: Path, folder: Path) -> Iterator[Fleet]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "bentoml", "serve", "deploy.bentoml_service:SpecrtService",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    env = {
        "SPECRT_BUNDLE": str(bundle), "SPECRT_THREADS": "1", "SPECRT_WORKERS": "2",
        "BENTOML_HOME": str(folder), "BENTOML_DO_NOT_TRACK": "True",
    }  # fmt: skip
    with started(command, url, folder / "bento.log", env) as process:
        yield (
            url,
            lambda: (
                descendants(process.pid, "bentoml/_bentoml_impl/worker/service")
                or descendants(process.pid, "worker.service")
            ),
        )


@pytest.mark.nightly
@pytest.mark.parametrize("fleet", [nginx, ray, bentoml])
def test_a_process_that_dies_takes_only_its_own_streams(
    fleet: Callable[[Path, Path], AbstractContextManager[Fleet]], codelet: Path, tmp_path: Path
) -> None:
    if fleet is not nginx and find_spec(fleet.__name__) is None:
        pytest.skip(f"needs {fleet.__name__}: `make test-deploy` installs it")
    with fleet(codelet, tmp_path) as (url, processes):
        stream = Watched(url, "def slowly(", 400)
        until(lambda: stream.chunks > 3)
        assert stream.finish_reason is None  # events come one by one
        stream.join(60)
        assert stream.whole
        streams = [Watched(url, f"def part_{n}(") for n in range(6)]
        whole, broken = lose(max(processes(), key=connections), streams, begun=2)
        assert broken
        assert all(stream.error is not None for stream in broken)
        assert len(whole) + len(broken) == 6
        until(lambda: answers(url))
        for n in range(6):  # nginx asks another server, the others start one
            assert complete(url, f"def again_{n}(")
