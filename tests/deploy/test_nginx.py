"""What nginx passes on."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect as open_websocket

from scheduler.support import rows
from serve.support import serving, until
from shared import REPOSITORY
from specrt.remote.frames import PATH
from specrt.serve.verify_sessions import VerifyLimits
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

NGINX = shutil.which("nginx") or ("/usr/sbin/nginx" if Path("/usr/sbin/nginx").exists() else None)
CONFIG = REPOSITORY / "deploy" / "nginx.conf"
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


@contextmanager
def nginx(folder: Path, port: int) -> Iterator[str]:
    """Run nginx before a server until it passes requests on; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = int(listener.getsockname()[1])
    command = [str(NGINX), "-p", folder, "-c", with_ports(folder, own, [port] * 3)]
    process = subprocess.Popen([*command, "-g", "daemon off;"], stderr=subprocess.DEVNULL)

    def passes() -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{own}/health").status_code == 200
        return False

    try:
        until(passes)
        yield f"http://127.0.0.1:{own}"
    finally:
        process.terminate()
        process.wait(60)


def test_what_the_server_takes_passes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Recordings, WebSockets of devices, its own page; and no page of another site."""
    toys = rows(packed, 1, tokenizer)
    with (
        serving(toys, verify=VerifyLimits(), allow_hosts=()) as live,
        nginx(tmp_path, live.http.base_url.port or 0) as url,
    ):
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
