"""The command line inside the test process, prompts, and a verifier that is wrong."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrt.cli import run
from specrt.generator import Generator
from specrt.speculation.round import Verdict
from specrt.system.memory import measure_bandwidth

COMMAND = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"  # may be ignored
    "from specrt.cli import main; main()",
]
"""The command line in a process of its own."""


@dataclass(frozen=True)
class Ran:
    """What a finished command printed, and how it ended."""

    status: int
    out: str
    err: str

    @property
    def refusal(self) -> str:
        """What a command said that refused its input: status 2, one line, nothing on stdout."""
        assert (self.status, self.out) == (2, ""), self
        assert re.fullmatch(r"specrt: .*\n", self.err), self.err
        return self.err


Run = Callable[..., Ran]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `specrt` with some arguments, and bytes on standard input."""

    def command(*args: object, stdin: bytes = b"", terminal: bool = False) -> Ran:
        source: Any = SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: terminal)
        monkeypatch.setattr("sys.stdin", source)
        capsys.readouterr()
        status = run([str(a) for a in args])
        said = capsys.readouterr()
        return Ran(status, said.out, said.err)

    return command


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as little progress as a fast machine does, and read little memory."""
    monkeypatch.setattr("specrt.cli.options.INTERVAL_S", 1e6)
    little = partial(measure_bandwidth, array_bytes=1 << 20, reads=2)
    monkeypatch.setattr("specrt.cli.bench.measure_bandwidth", little)


@pytest.fixture
def opened(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verbs run codelet on engines that are open already."""
    generator.forget()
    monkeypatch.setattr(generator, "close", lambda: None)
    for verb in ("generate", "chat", "verify", "bench"):
        monkeypatch.setattr(f"specrt.cli.{verb}.load", lambda *_, **__: generator)


@pytest.fixture
def two_prompts(tmp_path: Path) -> Path:
    """A small prompt file."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def area(width, height):\\n"}\n{"turns": ["import os\\n", "b"]}\n')
    return path


@pytest.fixture
def believe_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the verifier: whatever was drafted is accepted."""

    def accept(drafted: Sequence[int], choose: Callable[[int], int]) -> Verdict:
        return Verdict(len(drafted), choose(len(drafted)))

    monkeypatch.setattr("specrt.speculation.target.match", accept)
    monkeypatch.setattr(
        "specrt.speculation.target.match_greedy",
        lambda drafted, best: accept(drafted, best.__getitem__),
    )
