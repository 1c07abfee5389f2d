"""What only a real process shows: Ctrl-C, a closed pipe, bytes that are not text."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from cli.conftest import COMMAND
from shared import REPOSITORY


def arguments(codelet: Path, *more: str) -> list[str]:
    return [*COMMAND, "generate", str(codelet), "--prompt", "import os\n", *more]


def test_ctrl_c_keeps_the_text_so_far(codelet: Path) -> None:
    endless = arguments(codelet, "--max-tokens", "2000", "--ignore-eos", "--threads", "1")
    with subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    said = err.decode()
    assert process.returncode == 130
    assert len(first + out) > 1
    assert out.endswith(b"\n")
    assert "Traceback" not in said
    assert said.count("\n") == 1
    assert said.endswith("| interrupted]\n")


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
        process = subprocess.run(
            [sys.executable, "-c", script, module], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert (process.returncode, process.stderr) == (130, "specrt: interrupted\n")


def test_a_closed_pipe_ends_without_a_word(codelet: Path) -> None:
    long = arguments(codelet, "--max-tokens", "400", "--ignore-eos", "--threads", "1")
    with subprocess.Popen(long, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        os.read(process.stdout.fileno(), 5)
        process.stdout.close()
        said = process.stderr.read().decode()
        process.wait(timeout=60)
    assert said == ""
    assert process.returncode == 1


def test_output_is_utf8_whatever_the_locale(codelet: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    few = ("generate", str(codelet), "--max-tokens", "3", "--threads", "1", "--json")
    done = subprocess.run(
        [*COMMAND, *few], input='s = "żółw żółw żółw '.encode(), capture_output=True,
        env=environment, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode("utf-8").startswith("{")


def test_a_full_disk_behind_stdout_is_one_line(codelet: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "inspect", str(codelet), "--json"], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "specrt: No space left on device\n")


def test_closed_streams_are_no_reason_to_fail() -> None:
    words = " ".join(map(shlex.quote, [*COMMAND, "doctor", "--help"]))
    done = subprocess.run(
        ["sh", "-c", f"{words} >&- <&-"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_make_passes_a_prompt_on_as_it_is() -> None:
    prompt = """cost $5, $HOME, $(x) and 'quotes' "too" \\ \u00e9"""
    for given in ([f"PROMPT={prompt}"], []):
        done = subprocess.run(
            ["make", "-s", "-C", str(REPOSITORY), "-f", "Makefile", "-f", "-", "show", *given],
            input="show:\n\t@printf '%s' \"$$PROMPT\"\n", env={**os.environ, "PROMPT": prompt},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout == prompt
