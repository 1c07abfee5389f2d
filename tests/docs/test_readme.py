"""The README: its length, and every command of it as a new user types it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared import REPOSITORY, nightly_but

README = (REPOSITORY / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]
SHORT = [line for line in COMMANDS if not re.search("specrt (bench|verify)|--compare", line)]


@pytest.fixture
def clone(codelet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks as a clone does after `make generate`, and is the working one."""
    for name in ("Makefile", "benchmarks", "requirements", "runtime", "pyproject.toml", "setup.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shutil.copytree(
        REPOSITORY / "engines",
        tmp_path / "engines",
        ignore=shutil.ignore_patterns("build", "*.onnx"),
    )
    (tmp_path / "engines" / "build").mkdir()
    (tmp_path / "engines" / "build" / "codelet").symlink_to(codelet)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_short() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


def test_what_it_links_to_is_there() -> None:
    assert all((REPOSITORY / link).is_file() for link in re.findall(r"\]\(([^):#]+)\)", README))


@pytest.mark.parametrize(
    "line", nightly_but(SHORT, COMMANDS), ids=lambda line: line.partition("#")[0].strip()
)
def test_a_command_does_what_it_says(line: str, clone: Path) -> None:
    """`make` plans only: it would install; a server takes any port, and ends when told."""
    program, *words = shlex.split(line.replace("8080", "0"), comments=True)
    command = [sys.executable, "-m", program, *words]
    if program == "make":
        command = ["make", "-n", *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(clone)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        if words[0] == "serve" and program == "specrt":
            said = next(line for line in process.stdout if "http://" in line)
            process.send_signal(signal.SIGINT)
        else:
            said = ""
        said += process.stdout.read()
    assert (process.returncode, bool(said.strip())) == (0, True), said


def test_its_python_runs(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
        assert capsys.readouterr().out.strip()
