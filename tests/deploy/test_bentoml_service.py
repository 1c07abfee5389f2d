"""The server as a BentoML service of two worker processes, as it is started by hand."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from support.fleets import (
    Watched,
    answers,
    complete,
    connections,
    descendants,
    free_port,
    lose,
    started,
    until,
)

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("bentoml") is None,
        reason="needs BentoML: `make test-deploy` installs it",
    ),
]


class Bento(NamedTuple):
    url: str
    pid: int

    @property
    def workers(self) -> list[int]:
        return descendants(self.pid, "bentoml/_bentoml_impl/worker/service") or descendants(
            self.pid, "worker.service"
        )


@pytest.fixture(scope="module")
def bento(codelet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bento]:
    port, folder = free_port(), tmp_path_factory.mktemp("bento")
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "bentoml", "serve", "deploy.bentoml_service:SpecrtService",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    env = {
        "SPECRT_BUNDLE": str(codelet), "SPECRT_THREADS": "1", "SPECRT_WORKERS": "2",
        "BENTOML_HOME": str(folder), "BENTOML_DO_NOT_TRACK": "True",
    }  # fmt: skip
    with started(command, url, folder / "bento.log", env) as process:
        yield Bento(url, process.pid)


def test_the_openai_client_is_answered(bento: Bento) -> None:
    assert complete(bento.url, "def f(")[0]
    stream = Watched(bento.url, "def slowly(", 400)
    until(lambda: stream.chunks > 3)
    assert stream.finish_reason is None
    stream.join(60)
    assert stream.whole
    assert httpx.get(f"{bento.url}/readyz").status_code == 200  # BentoML's own


def test_a_worker_that_dies_takes_only_its_own_streams(bento: Bento) -> None:
    streams = [Watched(bento.url, f"def part_{n}(") for n in range(6)]
    whole, broken = lose(max(bento.workers, key=connections), streams, begun=1)
    assert broken
    assert all(stream.error is not None for stream in broken)
    until(lambda: answers(bento.url), 60)
    assert complete(bento.url, "def again(")[0]
    until(lambda: len(bento.workers) == 2)
    assert len(whole) + len(broken) == 6
