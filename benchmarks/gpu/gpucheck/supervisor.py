"""Run work in a process of its own, with a time limit; a crash or a hang ends that work alone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

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

LAST_LINES, LAST_BYTES = 6, 1 << 14
LONGEST_REASON = 600
LOOK_S, ENDING_S, KILLING_S = 2.0, 30.0, 5.0
"""How often a child is looked at, how long it may take to end once its outcome is written, and once
it is sent a signal."""
_PR_SET_PDEATHSIG = 1


Start = Callable[[Path], "subprocess.Popen[bytes]"]
"""Starts a child in a session of its own, whose output goes into a file."""
Clock = Callable[[], float]


def command(arguments: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Return what starts a command."""

    def start(log: Path) -> subprocess.Popen[bytes]:
        with log.open("w") as file:
            return subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, env=environment,
            )  # fmt: skip

    return start


def supervise(
    results: Results, key: str, start: Start, seconds: float, clock: Clock = time.monotonic
) -> Outcome:
    """Run a child that writes its facts under `key`, and complete that entry when it has ended."""
    began, when = clock(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.put(Outcome(key, RUNNING, when=when))

    def complete(reason: str) -> Outcome:
        entry = results.outcome(key)
        assert entry is not None, "the entry was written before the child began"
        if entry.status == RUNNING:
            entry = replace(entry, status=FAILED, reason=reason or "the process wrote no outcome")
        elif entry.status == OK and reason:
            entry = replace(entry, status=FAILED, reason=f"after its checks passed, {reason}")
        return results.put(replace(entry, seconds=round(clock() - began, 2)))

    def told() -> bool:
        entry = results.outcome(key)
        return entry is not None and entry.status != RUNNING

    try:
        reason = _run(start, seconds, told, clock)
    except KeyboardInterrupt:
        complete("interrupted")
        raise
    return complete(reason)


def _run(start: Start, seconds: float, told: Callable[[], bool], clock: Clock) -> str:
    """Wait for a child, and kill it and its children at the limit; return how it failed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        try:
            child = start(log)
        except OSError as error:  # no memory or no processes left: the next step may have them
            return f"its process could not be started: {error}"
        code: int | None = None
        try:
            code = _wait(child, seconds, told, clock)
        except KeyboardInterrupt:  # the child is in a session of its own, and gets no Ctrl-C
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
                child.wait(timeout=KILLING_S)
            raise
        finally:
            kept = _kill(child)
        if code is None and told():
            return f"the process did not end{kept}"
        return "" if code == 0 else _reason(code, seconds, _last_lines(log)) + kept


def _wait(
    child: subprocess.Popen[bytes], seconds: float, told: Callable[[], bool], clock: Clock
) -> int | None:
    """Return a child's exit code; None where it does not end within the seconds.

    One that has told its outcome, and hangs while it ends, is not waited for long.
    """
    end, ending = clock() + seconds, False
    while (left := end - clock()) > 0:
        try:
            return child.wait(timeout=min(left, LOOK_S))
        except subprocess.TimeoutExpired:
            if not ending and told():
                ending, end = True, min(end, clock() + ENDING_S)
    return None


def _kill(child: subprocess.Popen[bytes]) -> str:
    """Kill a child and its children; say so where it stays, as one that waits in a driver does."""
    if child.poll() is not None:
        return ""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(timeout=KILLING_S)
    except subprocess.TimeoutExpired:
        return "; it cannot be killed"
    return ""


def _reason(code: int | None, seconds: float, output: str) -> str:
    if code is None:
        how = f"the process was stopped at its limit of {seconds:.0f} s"
    elif code < 0:
        names = {number: number.name for number in signal.Signals}
        how = f"the process was ended by {names.get(-code, f'signal {-code}')}"  # type: ignore[call-overload]
    else:
        how = f"the process ended with {code}"
    return f"{how}; {output}" if output else how


def _last_lines(log: Path) -> str:
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode("utf-8", "replace")
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
    except KeyboardInterrupt:
        status, reason = FAILED, "interrupted"
    except BaseException as error:  # whatever a library raises ends this step alone
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split())[:LONGEST_REASON]
    results.update(key, facts=evidence.facts, status=status, reason=reason)


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends: a GPU must not stay taken."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
