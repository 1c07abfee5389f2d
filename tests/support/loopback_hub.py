"""A hub of models on this machine: the routes that specrt and huggingface_hub use, and faults."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".gguf")


@dataclass
class LoopbackHub:
    """What it serves, how it fails, and what it was asked for."""

    models: dict[str, dict[str, bytes]]
    gated: tuple[str, ...] = ()
    token: str = ""
    """The one that opens what is gated."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers with a file end."""
    spoiled: set[str] = field(default_factory=set)
    """Files that are sent with another first byte."""
    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    """Refusals of the next requests."""
    whole: bool = False
    """Whether ranges are ignored."""
    sent: list[tuple[str, int]] = field(default_factory=list)
    """Files, and where the answer began."""
    asked: int = 0
    address: str = ""


def listed(name: str, body: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
    one = {"rfilename": name, "size": len(body), "blobId": git}
    sha256 = hashlib.sha256(body).hexdigest()
    large = {"lfs": {"sha256": sha256, "size": len(body), "pointerSize": 134}}
    return {**one, **(large if name.endswith(LARGE) else {})}


class Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub

    def do_GET(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.asked += 1
        if hub.answers:
            status, headers = hub.answers.pop(0)
            return self.give(b"", status, **headers)
        if path.startswith("/api/models/"):
            return self.describe(*path.removeprefix("/api/models/").split("/revision/"))
        if "/resolve/" not in path:
            return self.refuse(404, "EntryNotFound")
        _, owner, model, _, commit, file = path.split("/", 5)
        body = hub.models.get(f"{owner}/{model}", {}).get(file)
        if body is None or commit != COMMIT:
            return self.refuse(404, "EntryNotFound")
        return self.send(file, body)

    def describe(self, name: str, revision: str = "main") -> None:
        hub = self.hub
        if name not in hub.models:
            return self.refuse(404, "RepoNotFound")
        if name in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.refuse(403, "GatedRepo")
        if revision not in ("main", "v1", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        files = [listed(*file) for file in hub.models[name].items()]
        return self.give(json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())

    def send(self, file: str, body: bytes) -> None:
        hub = self.hub
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        begins = int(asked[1]) if asked and not hub.whole else 0
        hub.sent.append((file, begins))
        if file in hub.spoiled:
            body = bytes([body[0] ^ 1]) + body[1:]
        cut = hub.cuts.pop(0) if hub.cuts else None
        length = f"bytes {begins}-{len(body) - 1}/{len(body)}"
        ranged = {"Content-Range": length} if asked and not hub.whole else {}
        self.give(body[begins:], 206 if ranged else 200, cut, **ranged)

    def refuse(self, status: int, code: str) -> None:
        self.give(b"", status, **{"X-Error-Code": code})

    def give(self, body: bytes, status: int = 200, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:cut])

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(hub: LoopbackHub) -> Iterator[LoopbackHub]:
    """Serve a hub while the block runs."""
    handler = type("OneHub", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
