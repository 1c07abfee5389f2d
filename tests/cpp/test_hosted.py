"""The library that hosts the Python runtime, in programs with and without a Python of their own."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from cpp.conftest import BuildLibrary, Library, run_program
from specrt.generator import Generator
from specrt.params import SamplingParams


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["plain", "sanitized"],
)
def program(request: pytest.FixtureRequest, built_library: BuildLibrary) -> Library:
    return built_library("hosted", sanitize=request.param)


def test_processors_and_forks_end_with_their_generation(program: Library, codelet: Path) -> None:
    """A processor may end its own session in the turn of another; none runs once it has ended."""
    assert program.run("closing_processor", bundle=codelet) == ["2"]
    ended, inside = program.run("returning", bundle=codelet)
    assert ended.startswith("SPECRT_CANCELLED|")
    assert inside == "false"
    refused, ids = program.run("forked", bundle=codelet)
    assert refused.startswith("SPECRT_UNSUPPORTED|this process was forked")
    assert len(json.loads(ids)) == 4


def test_an_interpreter_leads_to_its_library(
    program: Library, codelet: Path, tmp_path: Path
) -> None:
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    here = Path(sys.prefix)
    if (here / "pyvenv.cfg").exists():
        shutil.copy(here / "pyvenv.cfg", tmp_path)
        (tmp_path / "lib").symlink_to(here / "lib")
    assert program.run("opening", bundle=codelet, python=link) == ["SPECRT_OK|"]


def test_interpreters_that_will_not_do_are_refused(
    program: Library, codelet: Path, tmp_path: Path
) -> None:
    for name, output in (("silent", ""), ("wrong", "/dev/null")):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {output}\n")
        (tmp_path / name).chmod(0o755)
    for name, says in (
        ("none", f"SPECRT_INVALID_ARGUMENT|python is '{tmp_path}/none', which cannot"),
        ("silent", f"SPECRT_ENGINE|the Python at {tmp_path}/silent has no shared library to load"),
        ("wrong", "SPECRT_ENGINE|/dev/null cannot be loaded ("),
    ):
        (line,) = program.run("opening", bundle=codelet, python=tmp_path / name)
        assert line.startswith(says)
    broken = {"PYTHONHOME": "/no/such"}
    (line,) = program.run("opening", environment=broken, bundle=codelet)
    assert line.startswith(f"SPECRT_ENGINE|the Python at {sys.executable} does not start with ")
    assert "PYTHONHOME=/no/such" in line
    assert "expected an interpreter that runs" in line


APPLICATION = """
import ctypes, os, signal, sys, threading
path, bundle, python, tokenizer = sys.argv[1:]
lib = ctypes.CDLL(path)
lib.specrt_last_error.restype = ctypes.c_char_p
class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("threads", ctypes.c_int32),
                ("owns_process", ctypes.c_int32), ("memory_bytes", ctypes.c_uint64),
                ("no_prompt_cache", ctypes.c_int32), ("python", ctypes.c_char_p),
                ("onnxruntime", ctypes.c_char_p), ("tokenizer", ctypes.c_char_p)]
generator, session, params = (ctypes.c_void_p() for _ in range(3))
begun = threading.Event()
def check(status):
    if status:
        print(status, lib.specrt_last_error().decode())
        sys.exit(0)
def open_bundle(lib=lib):
    options = Options(ctypes.sizeof(Options), 1, 0, 0, 0, python.encode() or None, None,
                      tokenizer.encode() or None)
    check(lib.specrt_open(os.fsencode(bundle), ctypes.byref(options), ctypes.byref(generator)))
    check(lib.specrt_session_create(generator, ctypes.byref(session)))
    check(lib.specrt_params_create(ctypes.byref(params)))
    check(lib.specrt_params_set_integer(params, b"ignore_eos", ctypes.c_int64(1)))
@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
def note(user, chunk):
    begun.set()
    return 0
def generate(tokens, callback=None):
    lib.specrt_params_set_integer(params, b"max_tokens", ctypes.c_int64(tokens))
    return lib.specrt_generate(session, b"def", ctypes.c_size_t(3), params, callback, None)
def show():
    check(generate(24))
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    check(lib.specrt_session_text(session, ctypes.byref(text), ctypes.byref(size)))
    print(repr(text.value.decode()), flush=True)
"""
"""A Python application of the library, and what it may do."""
OUTLIVES = """
before = signal.getsignal(signal.SIGINT)
open_bundle()
show()
thread = threading.Thread(target=show)
thread.start()
thread.join()
assert signal.getsignal(signal.SIGINT) is before
check(lib.specrt_shutdown())
print(sum(range(4)))
"""
DAEMON = """
open_bundle()
threading.Thread(target=lambda: print(generate(1500, note), flush=True), daemon=True).start()
begun.wait()
"""
INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored
open_bundle()
interrupted = threading.Event()
def interrupt():
    begun.wait()
    while not interrupted.wait(0.2):  # one that arrives within `note` is lost there
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    generate(1500, note)
    threading.Event().wait(10)
except KeyboardInterrupt:
    interrupted.set()
    print("interrupted", generate(3))
"""


def embedded(
    library: Library, codelet: Path, script: str, python: str = "", tokenizer: str = ""
) -> str:
    """Run a Python application that loads the library; `python` names an interpreter."""
    command = [sys.executable, "-c", APPLICATION + script, library.path, codelet, python, tokenizer]
    return run_program(command, timeout=60)


@pytest.mark.parametrize("python", ["", sys.executable], ids=["any", "named"])
def test_a_python_application_hosts_it_and_outlives_it(
    hosted: Library, codelet: Path, generator: Generator, python: str
) -> None:
    text = generator.generate("def", SamplingParams(max_tokens=24, ignore_eos=True)).text
    first, second, after = embedded(hosted, codelet, OUTLIVES, python).splitlines()
    assert first == second == repr(text)
    assert after == "6"


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        (DAEMON, ("2\n", "")),  # with a thread that nobody waits for; the end may cut its print off
        (INTERRUPTED, ("interrupted 0\n",)),
    ],
    ids=["daemon", "interrupted"],
)
def test_a_python_application_may_end_it_in_any_way(
    hosted: Library, codelet: Path, script: str, ends: tuple[str, ...]
) -> None:
    assert embedded(hosted, codelet, script).endswith(ends)


def test_a_second_interpreter_is_refused(hosted: Library, codelet: Path) -> None:
    line = embedded(hosted, codelet, OUTLIVES, "/usr/bin/python-of-another")
    assert line.startswith("1 python is '/usr/bin/python-of-another', and this process runs")
