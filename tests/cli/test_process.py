"""What only a real process shows: Ctrl-C, a closed pipe, bytes that are not text."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import COMMAND
from shared import REPOSITORY


def run(*words: str, **how: Any) -> subprocess.CompletedProcess[Any]:
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 60, **how}
    return subprocess.run(words, check=False, **how)


@pytest.mark.parametrize("how", ["ctrl-c", "closed pipe"])
def test_an_answer_that_is_cut_off(codelet: Path, how: str) -> None:
    asked = ["--prompt", "import os\n", "--max-tokens", "2000", "--ignore-eos", "--threads", "1"]
    words = [*COMMAND, "generate", str(codelet), *asked]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = os.read(process.stdout.fileno(), 1)
        if how == "ctrl-c":
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            assert len(first + out) > 1
            assert out.endswith(b"\n")
            assert "Traceback" not in err.decode()
            assert (err.count(b"\n"), err[-15:]) == (1, b"| interrupted]\n")
        else:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.wait(timeout=60) == (130 if how == "ctrl-c" else 1)


def test_ctrl_c_while_modules_load_is_one_line() -> None:
    script = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == slow:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "slow, sys.argv[1:] = sys.argv[1], ['inspect']\n"
        "runpy.run_module('specrt', run_name='__main__')\n"
    )
    for module in ("click", "specrt.cli.inspect"):
        done = run(sys.executable, "-c", script, module)
        assert (done.returncode, done.stderr) == (130, b"specrt: interrupted\n")


def test_output_is_utf8_whatever_the_locale(codelet: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    few = ("generate", str(codelet), "--max-tokens", "3", "--threads", "1", "--json")
    done = run(*COMMAND, *few, input='s = "żółw żółw żółw '.encode(), env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("utf-8").startswith("{")


def test_a_full_disk_behind_stdout_is_one_line(codelet: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = run(*COMMAND, "inspect", str(codelet), "--json", stdout=full)
    assert (done.returncode, done.stderr) == (2, b"specrt: No space left on device\n")


def test_closed_streams_are_no_reason_to_fail() -> None:
    words = " ".join(map(shlex.quote, [*COMMAND, "doctor", "--help"]))
    done = run("sh", "-c", f"{words} >&- <&-")
    assert (done.returncode, done.stderr) == (0, b"")


def test_make_passes_a_prompt_on_as_it_is() -> None:
    prompt = """cost $5, $HOME, $(x) and 'quotes' "too" \\ \u00e9"""
    words = ("make", "-s", "-C", str(REPOSITORY), "-f", "Makefile", "-f", "-", "show")
    show = b"show:\n\t@printf '%s' \"$$PROMPT\"\n"
    for given in ([f"PROMPT={prompt}"], []):
        done = run(*words, *given, input=show, env={**os.environ, "PROMPT": prompt})
        assert done.stdout.decode() == prompt
