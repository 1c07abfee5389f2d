"""Run work in a process of its own, with a time limit; a crash or a hang ends that work alone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from gpucheck.evidence import (
    FAILED,
    NOT_RUN,
    OK,
    RUNNING,
    CheckError,
    Evidence,
    NotRunError,
    Outcome,
    Results,
)

LAST_LINES = 6
LONGEST_REASON = 600
CLEANUP_S = 5
_PR_SET_PDEATHSIG = 1


class Process(Protocol):
    """What is needed of a child process; `subprocess.Popen` is one."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, negative after a signal.

        Raises: subprocess.TimeoutExpired.
        """

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""


Start = Callable[[Path], Process]
"""Starts a child in a session of its own, whose output goes into a file."""


def command(arguments: Sequence[str]) -> Start:
    """Return what starts a command."""

    def start(log: Path) -> Process:
        with log.open("w") as file:
            return subprocess.Popen(arguments, stdout=file, stderr=file, start_new_session=True)

    return start


def supervise(results: Results, key: str, start: Start, seconds: float) -> Outcome:
    """Run a child that writes its facts under `key`, and complete that entry when it has ended."""
    began, when = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.put(Outcome(key, RUNNING, when=when))
    try:
        reason = _run(start, seconds)
    except KeyboardInterrupt:
        _complete(results, key, "interrupted", began)
        raise
    return _complete(results, key, reason, began)


def _complete(results: Results, key: str, reason: str, began: float) -> Outcome:
    entry = results.outcome(key)
    assert entry is not None, "the entry was written before the child began"
    if entry.status == RUNNING:
        entry = replace(entry, status=FAILED, reason=reason or "the process wrote no outcome")
    elif entry.status == OK and reason:
        entry = replace(entry, status=FAILED, reason=f"after its checks passed, {reason}")
    return results.put(replace(entry, seconds=round(time.monotonic() - began, 2)))


def _run(start: Start, seconds: float) -> str:
    """Wait for a child, and kill it and its children at the limit; return how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        child = start(log)
        code: int | None = None
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # the child is in a session of its own, and gets no Ctrl-C
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
                child.wait(timeout=CLEANUP_S)
            raise
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return "" if code == 0 else _reason(code, seconds, _last_lines(log))


def _reason(code: int | None, seconds: float, output: str) -> str:
    if code is None:
        how = f"the process was stopped at its limit of {seconds:.0f} s"
    elif code < 0:
        how = f"the process was ended by {signal.Signals(-code).name}"
    else:
        how = f"the process ended with {code}"
    return f"{how}; {output}" if output else how


def _last_lines(log: Path) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:])[-LONGEST_REASON:]


def report(results: Results, key: str, work: Callable[[Evidence], None]) -> None:
    """Do work in this process, the child, and write its facts and outcome under `key`."""
    end_with_parent()
    evidence = Evidence()
    evidence.save = lambda: results.update(key, facts=evidence.facts)
    status, reason = OK, ""
    try:
        work(evidence)
    except NotRunError as error:
        status, reason = NOT_RUN, str(error)
    except CheckError as error:
        status, reason = FAILED, str(error)
    except (Exception, SystemExit) as error:  # whatever a library raises ends this step alone
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split())[:LONGEST_REASON]
    results.update(key, facts=evidence.facts, status=status, reason=reason)


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends: a GPU must not stay taken."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
