"""A server of the page and of answers that a test writes down, with the real one's interface."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Step = bytes | float | None
"""What a script does next: send bytes, wait seconds, or (None) drop the connection."""
Script = Callable[[dict[str, Any]], Iterable[Step]]
Round = tuple[int, list[tuple[str, bool]]]
"""Tokens drafted, and the spans that came of it."""

PIECES = [
    "def ", "fib", "(", "n", "):", "\n    ", "if ", "n ", "< ", "2", ":", "\n    ", "return ", "n",
]  # fmt: skip
LENGTHS = [4, 2, 0, 3, 1, 4, 0, 2]


def event(content: object) -> bytes:
    """Return an event of a stream."""
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def rounds(pieces: list[str], gamma: int = 4) -> list[Round]:
    """Cut tokens into rounds that accept now more, now fewer, as the request's gamma allows."""
    made: list[Round] = []
    while pieces:
        accepted = min(LENGTHS[len(made) % len(LENGTHS)], gamma, len(pieces) - 1)
        spans = [(token, True) for token in pieces[:accepted]] + [(pieces[accepted], False)]
        made.append((gamma, spans))
        pieces = pieces[accepted + 1 :]
    return made


def content(request: dict[str, Any], spans: list[tuple[str, bool]], drafted: int) -> dict[str, Any]:
    """Return the chunk of a round, as a chat or as a completion."""
    text = "".join(text for text, _ in spans)
    body = {"delta": {"content": text}} if "messages" in request else {"text": text}
    return {
        "choices": [{"index": 0, "finish_reason": None, **body}],
        "speculation": {
            "drafted": drafted,
            "accepted": sum(accepted for _, accepted in spans),
            "source": "model" if drafted else "none",
            "acceptance_rate": 0.5,
            "tokens_per_round": 2.0,
            "spans": [{"text": text, "accepted": accepted} for text, accepted in spans],
        },
    }


def closing(request: dict[str, Any], made: list[Round], speed: float) -> list[bytes]:
    """Return the events after the text: usage with metrics, and the end."""
    drafted = sum(count for count, _ in made)
    accepted = sum(kept for _, spans in made for _, kept in spans)
    tokens = sum(len(spans) for _, spans in made)
    vllm = {"mean_acceptance_length": tokens / max(1, len(made)), "num_spec_steps": len(made)}
    ours = {
        "rounds": len(made), "drafted": drafted, "accepted": accepted, "ttft_ms": 6.4,
        "tokens_per_second": speed, "queue_ms": 0.1, "seed": request["seed"],
        "acceptance_rate": 0.7143, "tokens_per_round": 1.2143,
    }  # fmt: skip
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    metrics = {"speculative_decoding": vllm, "specrt": ours}
    last = {"choices": [], "usage": usage, "metrics": metrics}
    return [event(last), b"data: [DONE]\n\n"]


def answer(pieces: list[str] = PIECES, pause: float = 0.0) -> Script:
    """Return a script that streams tokens, with plain decoding at half the speed."""

    def script(request: dict[str, Any]) -> Iterator[Step]:
        gamma = 4 if request["gamma"] == "auto" else request["gamma"]
        made = rounds(pieces, gamma)
        for drafted, spans in made:
            yield event(content(request, spans, drafted))
            yield pause
        yield from closing(request, made, 412.0 if gamma else 206.0)

    return script


def refusal(message: str, code: str = "invalid_request_error") -> dict[str, Any]:
    """Return the body of a refused request."""
    return {"error": {"message": message, "type": code, "param": None, "code": code}}


class PageServer(ThreadingHTTPServer):
    """Serves the page, the model list, and the script for every request to complete."""

    daemon_threads = True

    def __init__(self, page: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.page = page
        self.gone = threading.Event()
        self.renew()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def renew(self, *, mode: str = "", key: str = "", script: Script | None = None) -> None:
        """Forget all requests, and answer as told from here on; mode `chat` or `source`."""
        self.mode, self.key, self.script = mode, key, script or answer()
        self.refused: tuple[int, dict[str, Any]] | None = None
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.paths: list[str] = []
        self.gone.clear()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"

    def models(self) -> dict[str, Any]:
        """Return the model list."""
        specrt = {
            "chat": self.mode == "chat", "gammas": [0, 1, 2, 3, 4, 6, 8], "gamma": "auto",
            "drafters": ["cascade", "model", "ngram", "none"], "drafter": "cascade", "rows": 1,
            "backend": "ort-cpu", **({"max_source": 256} if self.mode == "source" else {}),
            "target": {"model_type": "llama", "parameters": 15735168, "precision": "fp32"},
            "sampling": {"temperature": 0.55, "top_p": 0.9},
        }  # fmt: skip
        return {"data": [{"id": "codelet", "max_model_len": 2048, "specrt": specrt}]}

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep quiet about browsers that hang up."""


class Handler(BaseHTTPRequestHandler):
    """One connection of the browser's."""

    server: PageServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.path == "/":
            self._send(200, "text/html; charset=utf-8", self.server.page.read_bytes())
        elif self._may():
            known = self.path == "/v1/models"
            self._json(200 if known else 404, self.server.models() if known else refusal("no"))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        if not self._may():
            return
        if self.server.refused:
            self._json(*self.server.refused)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._play(self.server.script(request))
        except OSError:
            self.server.gone.set()
            self.close_connection = True

    def _play(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step is None:
                self.close_connection = True
                return
            if isinstance(step, float):
                time.sleep(step)
            else:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(step), step))
                self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _may(self) -> bool:
        if not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self._json(401, refusal("the API key is missing or wrong", "invalid_api_key"))
        return False

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
