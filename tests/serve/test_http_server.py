"""Limits of the HTTP server that only a connection of one's own shows."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress

from scheduler.support import rows
from serve.support import TEMPLATE
from serve.test_admission import until
from specrt.serve.application import ServerOptions, application
from specrt.serve.http_server import HttpServer
from specrt.serve.service import Service
from specrt.text.chat_template import ChatTemplate
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

BODY = json.dumps(
    {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "n": 60, "logprobs": 5, "stream": True}
)


def test_a_client_that_reads_nothing_is_dropped(tokenizer: Tokenizer) -> None:
    service = Service(rows(packed, 1, tokenizer), "toy", template=ChatTemplate(TEMPLATE, {}))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server = HttpServer(
            application(service, ServerOptions()), drain_s=30, write_timeout_s=0.2
        )  # fmt: skip
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            client.settimeout(30)
            client.connect(listener.getsockname())
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode())
            until(lambda: service.admission.live)
            until(lambda: not service.admission.live)
            told = b""
            with suppress(ConnectionResetError):
                while more := client.recv(1 << 16):
                    told += more
            assert b"200 OK" in told
            assert b"[DONE]" not in told
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()
