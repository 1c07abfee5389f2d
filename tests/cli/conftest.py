"""The command line inside the test process, prompts, and a verifier that is wrong."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.ran import Ran, Run
from specrt.cli import run
from specrt.generator import Generator
from specrt.speculation.round import Verdict
from specrt.system import measure_bandwidth


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
def _quiet_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine prints no more lines of progress than a fast one."""
    monkeypatch.setattr("specrt.cli.options.INTERVAL_S", 1e6)


@pytest.fixture
def opened(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verbs run codelet on engines that are open already."""
    generator.forget()
    monkeypatch.setattr(generator, "close", lambda: None)
    for verb in ("generate", "chat", "verify", "bench"):
        monkeypatch.setattr(f"specrt.cli.{verb}.load", lambda *_, **__: generator)


@pytest.fixture(autouse=True)
def _read_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the bandwidth of memory in no time."""
    little = partial(measure_bandwidth, array_bytes=1 << 20, reads=2)
    monkeypatch.setattr("specrt.cli.bench.measure_bandwidth", little)


@pytest.fixture
def two_prompts(tmp_path: Path) -> Path:
    """A small prompt file."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "def area(width, height):\\n"}\n{"turns": ["import os\\n", "unused"]}\n',
        encoding="utf-8",
    )
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
