"""The library that hosts the Python runtime, in programs with and without a Python of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cpp.conftest import BuildLibrary, Library, compiler, run_program
from shared import REPOSITORY
from specrt.generator import Generator
from specrt.params import SamplingParams

PROMPT = "def area(radius):\n"
SOURCES = sorted((REPOSITORY / "tests" / "cpp" / "hosted").glob("*.cpp"))


@pytest.fixture(scope="session")
def hosted(built_library: BuildLibrary) -> Library:
    return built_library("hosted")


@pytest.fixture(scope="session")
def hosted_program(hosted: Library, tmp_path_factory: Any) -> Path:
    return compiled(hosted, False, tmp_path_factory.mktemp("hosted"))


@pytest.fixture(
    scope="session",
    params=[False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["plain", "sanitized"],
)
def program(
    request: pytest.FixtureRequest, built_library: BuildLibrary, tmp_path_factory: Any
) -> Path:
    if not request.param:
        plain: Path = request.getfixturevalue("hosted_program")
        return plain
    return compiled(built_library("hosted", True), True, tmp_path_factory.mktemp("sanitized"))


def compiled(library: Library, sanitized: bool, folder: Path) -> Path:
    """Compile the program of the folder hosted, which links no Python."""
    flags = ["-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror"]
    if sanitized:
        flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    made, place = folder / "stream", library.path.parent
    link = [f"-L{place}", f"-Wl,-rpath,{place}", "-lspecrt"]
    include = f"-I{library.prefix / 'include'}"
    run_program([*compiler(), *flags, *SOURCES, "-o", made, include, *link])
    return made


def run(
    program: Path, bundle: Path, case: str, *more: str | Path, environment: Any = None
) -> list[str]:
    """Run a case of the program; CPython keeps memory at its end, which is no leak of ours."""
    done = subprocess.run(
        [program, bundle, case, *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", **(environment or {})},
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


def facts(line: str) -> dict[str, Any]:
    told = json.loads(line)
    kept: dict[str, Any] = {
        name: told[name] for name in ("text", "token_ids", "finish_reason", "seed")
    }
    rounds = told["speculation"]
    return kept | {name: rounds[name] for name in ("rounds", "drafted", "evaluated", "accepted")}


@pytest.fixture(scope="module")
def expected(generator: Generator) -> list[dict[str, Any]]:
    """What the Python runtime makes of the same requests."""
    return [
        facts(json.dumps(generator.generate(PROMPT, params, gamma=2).to_json()))
        for temperature in (0.0, 0.8)
        for params in (SamplingParams(max_tokens=24, seed=7, temperature=temperature),)
    ]


def test_it_streams_what_python_streams_and_opens_twice(
    program: Path, codelet: Path, expected: list[dict[str, Any]]
) -> None:
    *lines, closed = run(program, codelet, "twice")
    assert [facts(line) for line in lines] == expected * 2
    assert "was shut down" in closed


def test_leaving_with_a_text_half_read_is_no_crash(program: Path, codelet: Path) -> None:
    assert run(program, codelet, "leave") == ["1"]


def test_another_thread_cancels(program: Path, codelet: Path) -> None:
    cancelled, after = (json.loads(line) for line in run(program, codelet, "cancel"))
    assert cancelled["finish_reason"] == "cancelled"
    assert len(cancelled["token_ids"]) < 1500
    assert len(after["token_ids"]) == 4


def test_processors_decide_stop_and_throw(program: Path, codelet: Path) -> None:
    decided, line, stopped, threw = run(program, codelet, "processors")
    assert decided == "SPECRT_OK|"
    assert json.loads(line)["token_ids"] == [65] * 6
    assert stopped.startswith("SPECRT_CALLBACK|a logits processor returned 3")
    assert threw == "SPECRT_CALLBACK|a logits processor threw: no scores today"


def test_a_processor_may_end_its_own_session_in_the_turn_of_another(
    program: Path, codelet: Path
) -> None:
    assert run(program, codelet, "closing_processor") == ["2"]


def test_no_processor_runs_once_its_generation_has_ended(program: Path, codelet: Path) -> None:
    assert run(program, codelet, "returning") == ["0"]


def test_a_fork_is_told_and_its_parent_goes_on(
    program: Path, codelet: Path, expected: list[dict[str, Any]]
) -> None:
    told, status, *lines = run(program, codelet, "forked")
    assert told.startswith("SPECRT_UNSUPPORTED|this process was forked")
    assert status == "0"
    assert [facts(line) for line in lines] == expected


def test_an_interpreter_is_asked_for_its_library(
    program: Path, codelet: Path, tmp_path: Path
) -> None:
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    here = Path(sys.prefix)
    if (here / "pyvenv.cfg").exists():
        shutil.copy(here / "pyvenv.cfg", tmp_path)
        (tmp_path / "lib").symlink_to(here / "lib")
    assert run(program, codelet, "opening", link) == ["SPECRT_OK|"]


def test_interpreters_that_will_not_do_are_refused(
    program: Path, codelet: Path, tmp_path: Path
) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho\n")
    silent.chmod(0o755)
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/sh\necho /dev/null\n")
    wrong.chmod(0o755)
    for python, said in (
        (tmp_path / "none", f"SPECRT_INVALID_ARGUMENT|python is '{tmp_path}/none', which cannot"),
        (silent, f"SPECRT_ENGINE|the Python at {silent} has no shared library to load; name"),
        (wrong, "SPECRT_ENGINE|/dev/null cannot be loaded ("),
    ):
        (line,) = run(program, codelet, "opening", python)
        assert line.startswith(said)


def test_an_interpreter_that_cannot_start_leaves_the_application_running(
    program: Path, codelet: Path
) -> None:
    (line,) = run(program, codelet, "opening", environment={"PYTHONHOME": "/no/such"})
    assert line.startswith(f"SPECRT_ENGINE|the Python at {sys.executable} does not start with ")
    assert "PYTHONHOME=/no/such" in line
    assert "expected an interpreter that runs" in line


@pytest.mark.nightly
def test_memory_goes_back(hosted_program: Path, codelet: Path) -> None:
    (kib,) = run(hosted_program, codelet, "threads")  # kept for each, they take 12 MiB
    assert int(kib) < 2048
    generations, cycles = map(int, run(hosted_program, codelet, "memory")[0].split())
    assert generations < 2048
    assert cycles < 8192


EMBEDDED = """
import ctypes, json, os, signal, sys, threading
library, bundle, python = sys.argv[1:]
before = signal.getsignal(signal.SIGINT)
lib = ctypes.CDLL(library)
lib.specrt_last_error.restype = ctypes.c_char_p
class Options(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("threads", ctypes.c_int32),
                ("owns_process", ctypes.c_int32), ("memory_bytes", ctypes.c_uint64),
                ("no_prompt_cache", ctypes.c_int32), ("python", ctypes.c_char_p),
                ("onnxruntime", ctypes.c_char_p), ("tokenizer", ctypes.c_char_p)]
def check(status):
    if status:
        print(status, lib.specrt_last_error().decode())
        sys.exit(0)
def open_one(named):
    generator = ctypes.c_void_p()
    options = Options(ctypes.sizeof(Options), 1, 0, 0, 0, named.encode() or None)
    check(lib.specrt_open(os.fsencode(bundle), ctypes.byref(options), ctypes.byref(generator)))
    return generator
def complete(generator, tokens):
    session, params = ctypes.c_void_p(), ctypes.c_void_p()
    check(lib.specrt_session_create(generator, ctypes.byref(session)))
    check(lib.specrt_params_create(ctypes.byref(params)))
    check(lib.specrt_params_set_integer(params, b"max_tokens", ctypes.c_int64(tokens)))
    check(lib.specrt_params_set_integer(params, b"gamma", ctypes.c_int64(2)))
    check(lib.specrt_params_set_integer(params, b"seed", ctypes.c_int64(7)))
    prompt = b"def area(radius):\\n"
    check(lib.specrt_generate(session, prompt, ctypes.c_size_t(len(prompt)), params, None, None))
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    check(lib.specrt_session_json(session, ctypes.byref(text), ctypes.byref(size)))
    print(text.value.decode(), flush=True)
generator = open_one(python)
complete(generator, 24)
thread = threading.Thread(target=complete, args=(generator, 24))
thread.start()
thread.join()
assert signal.getsignal(signal.SIGINT) is before
check(lib.specrt_shutdown())
print(sum(range(4)))
"""


def embedded(hosted: Library, codelet: Path, python: str) -> list[str]:
    command: list[str | Path] = [sys.executable, "-c", EMBEDDED, hosted.path, codelet, python]
    return run_program(command).splitlines()


@pytest.mark.parametrize("python", ["", sys.executable], ids=["any", "named"])
def test_a_python_application_hosts_it_and_outlives_it(
    hosted: Library, codelet: Path, expected: list[dict[str, Any]], python: str
) -> None:
    first, second, after = embedded(hosted, codelet, python)
    assert [facts(first), facts(second)] == [expected[0]] * 2
    assert after == "6"


LOCKED = """
import ctypes, os, sys, threading
way, library, bundle = sys.argv[1:]
lib = ctypes.CDLL(library)
asked = ctypes.PyDLL(library) if way == "locked" else lib
session, params, generator = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
assert asked.specrt_open(os.fsencode(bundle), None, ctypes.byref(generator)) == 0
assert asked.specrt_session_create(generator, ctypes.byref(session)) == 0
assert asked.specrt_params_create(ctypes.byref(params)) == 0
assert asked.specrt_params_set_integer(params, b"max_tokens", ctypes.c_int64(1500)) == 0
assert asked.specrt_params_set_integer(params, b"ignore_eos", ctypes.c_int64(1)) == 0
begun = threading.Event()
@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
def heard(user, chunk):
    begun.set()
    return 0
def generate():
    status = lib.specrt_generate(session, b"def", ctypes.c_size_t(3), params, heard, None)
    print(status, flush=True)
thread = threading.Thread(target=generate, daemon=way == "daemon")
thread.start()
begun.wait()
if way == "locked":
    assert asked.specrt_shutdown() == 0
    thread.join()
"""


@pytest.mark.parametrize("way", ["locked", "daemon"])
def test_python_that_holds_its_lock_or_ends_stops_what_runs(
    hosted: Library, codelet: Path, way: str
) -> None:
    """By ctypes.PyDLL, which keeps the lock in a call; and with a thread that nobody waits for."""
    said = run_program([sys.executable, "-c", LOCKED, way, hosted.path, codelet], timeout=60)
    assert said in ("2\n", "") if way == "daemon" else said == "2\n"


UNLOADED = """
import _ctypes, ctypes, os, sys, threading
def use():
    library, generator = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
    assert library.specrt_open(os.fsencode(sys.argv[2]), None, ctypes.byref(generator)) == 0
    assert library.specrt_generator_close(generator) == 0
    _ctypes.dlclose(library._handle)
thread = threading.Thread(target=use)
thread.start()
thread.join()
print("left")
"""


def test_an_application_may_let_go_of_the_library(hosted: Library, codelet: Path) -> None:
    said = run_program([sys.executable, "-c", UNLOADED, hosted.path, codelet])
    assert said == "left\n"


INTERRUPTED = """
import ctypes, os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored
library, session, params = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p(), ctypes.c_void_p()
generator = ctypes.c_void_p()
assert library.specrt_open(os.fsencode(sys.argv[2]), None, ctypes.byref(generator)) == 0
assert library.specrt_session_create(generator, ctypes.byref(session)) == 0
assert library.specrt_params_create(ctypes.byref(params)) == 0
assert library.specrt_params_set_integer(params, b"ignore_eos", ctypes.c_int64(1)) == 0
def generate(tokens, callback=None):
    library.specrt_params_set_integer(params, b"max_tokens", ctypes.c_int64(tokens))
    return library.specrt_generate(session, b"def", ctypes.c_size_t(3), params, callback, None)
begun = threading.Event()
@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
def heard(user, chunk):
    begun.set()
    return 0
def interrupt():
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    generate(1500, heard)
    threading.Event().wait(10)
except KeyboardInterrupt:
    print("interrupted", generate(3))
"""


def test_an_interrupt_reaches_the_python_that_generates(hosted: Library, codelet: Path) -> None:
    said = run_program([sys.executable, "-c", INTERRUPTED, hosted.path, codelet])
    assert said.endswith("interrupted 0\n")


def test_a_second_interpreter_is_refused(hosted: Library, codelet: Path) -> None:
    (line,) = embedded(hosted, codelet, "/usr/bin/python-of-another")
    assert line.startswith("1 python is '/usr/bin/python-of-another', and this process runs")
