"""Hub names: the real client against a local stand-in for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

COMMIT = "c0ffee" + "0" * 34
TENSOR = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": len(TENSOR).to_bytes(8, "little") + TENSOR + bytes(4),
    "pytorch_model.bin": b"pickled",
    "README.md": b"# hello",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}
ASK = """
import json, sys
from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint
answers = []
for name, revision, config_only in json.loads(sys.argv[1]):
    try:
        one = Checkpoint.open(name, revision, config_only)
        files = sorted(path.name for path in one.folder.iterdir())
        answers.append([files, one.folder.name, sorted(one.weights)])
    except CheckpointError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


class Hub(BaseHTTPRequestHandler):
    """One model, `owner/tiny`, with one commit called main and v1; `owner/shut` is gated."""

    sent: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            if "/tree/" in path:
                return self.list_files()
            return self.describe(*path.removeprefix("/api/models/").split("/revision/"))
        _, owner, model, _, _, file = path.split("/", 5)
        if f"{owner}/{model}" != "owner/tiny" or file not in FILES:
            return self.refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.sent.append(file)
        return self.give(FILES[file], ETag=f'"{file}"')

    def describe(self, name: str, revision: str = "main") -> None:
        if name != "owner/tiny":
            shut = name == "owner/shut"
            return self.refuse(403, "GatedRepo") if shut else self.refuse(404, "RepoNotFound")
        if revision not in ("main", "v1", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        files = [{"rfilename": file} for file in FILES]
        return self.give(json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())

    def list_files(self) -> None:
        self.give(json.dumps([
            {"type": "file", "path": file, "size": len(body), "oid": file}
            for file, body in FILES.items()
        ]).encode())  # fmt: skip

    def refuse(self, status: int, code: str) -> None:
        self.give(b"", status, **{"X-Error-Code": code})

    def give(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {"X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(endpoint: str, home: Path, *questions: tuple[str, str | None, bool]) -> list[Any]:
    """Open checkpoints in a process of their own: the client reads its settings once."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions)],
        env={**environment, **settings, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_hub_name_is_fetched_once_and_only_what_is_needed(hub: str, tmp_path: Path) -> None:
    asked = [(revision, revision == "v1") for revision in ("v1", None, COMMIT)]
    alone, whole, cached = ask(hub, tmp_path, *(("owner/tiny", *how) for how in asked))
    assert alone == [["config.json"], COMMIT, []]
    fetched = ["additional_chat_templates", "config.json", "model.safetensors"]
    assert whole == cached == [fetched, COMMIT, ["w"]]
    fetched[0] = "additional_chat_templates/tool_use.jinja"
    assert sorted(Hub.sent) == fetched


REFUSED = {
    ("owner/tiny", "v2"): "from the hub at revision 'v2' failed: the model has no such",
    ("owner/none", None): "there is no folder owner/none, and fetching it from the hub failed",
    ("owner/shut", None): "access is gated: accept its terms",
}


def test_what_the_hub_refuses_is_explained(hub: str, tmp_path: Path) -> None:
    found = ask(hub, tmp_path, *((*question, False) for question in REFUSED))
    assert all(told in said for told, said in zip(REFUSED.values(), found, strict=True))
    (answer,) = ask("http://127.0.0.1:9", tmp_path, ("owner/tiny", None, False))
    assert answer.startswith("there is no folder owner/tiny, and fetching it from the hub failed")
    assert "correct the name, or check the network" in answer
    assert "\n" not in answer
