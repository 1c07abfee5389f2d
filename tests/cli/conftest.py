"""A way to run the command line inside the test process."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cli.ran import Ran, Run
from specrt.cli import run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `specrt` with some arguments, and bytes on standard input."""

    def command(*args: object, stdin: bytes = b"") -> Ran:
        source: Any = SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False)
        monkeypatch.setattr("sys.stdin", source)
        capsys.readouterr()
        status = run([str(a) for a in args])
        said = capsys.readouterr()
        return Ran(status, said.out, said.err)

    return command


@pytest.fixture
def two_prompts(tmp_path: Path) -> Path:
    """A small prompt file."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "def area(width, height):\\n"}\n{"turns": ["import os\\n", "unused"]}\n',
        encoding="utf-8",
    )
    return path
