"""Runs a step in a process of its own, with a time limit: a crash or a hang ends it alone."""

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


def supervise(
    results: Results, key: str, command: Sequence[str], environment: Mapping[str, str],
    seconds: float,
) -> Outcome:  # fmt: skip
    """Run a child that writes its facts under `key`, and complete that entry when it has ended."""
    began, when = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    results.put(Outcome(key, RUNNING, when=when))

    def is_told() -> bool:
        return results.outcome(key).status != RUNNING

    reason = "interrupted"
    try:
        reason = _run(command, environment, seconds, is_told)
    finally:
        entry = results.outcome(key)
        if entry.status == RUNNING:
            entry = replace(entry, status=FAILED, reason=reason or "the process wrote no outcome")
        elif entry.status == OK and reason:
            entry = replace(entry, status=FAILED, reason=f"after its checks passed, {reason}")
        results.put(replace(entry, seconds=round(time.monotonic() - began, 2)))
    return results.outcome(key)


def _run(
    command: Sequence[str], environment: Mapping[str, str], seconds: float,
    is_told: Callable[[], bool],
) -> str:  # fmt: skip
    """Wait for a child, and kill it and its children at the limit; return how it failed."""
    with tempfile.TemporaryFile() as log:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # no memory or no processes left: the next step may have them
            return f"its process could not be started: {error}"
        code: int | None = None
        try:
            code = _wait(child, seconds, is_told)
        except KeyboardInterrupt:  # the child is in a session of its own, and gets no Ctrl-C
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
                child.wait(timeout=KILLING_S)
            raise
        finally:
            stays = _kill(child)
        if code is None and is_told():
            return f"the process did not end{stays}"
        return "" if code == 0 else _reason(code, seconds, _last_lines(log.fileno())) + stays


def _wait(
    child: subprocess.Popen[bytes], seconds: float, is_told: Callable[[], bool]
) -> int | None:
    """Return a child's exit code; None where it does not end within the seconds.

    One that has told its outcome, and hangs while it ends, is not waited for long.
    """
    end, is_ending = time.monotonic() + seconds, False
    while (left := end - time.monotonic()) > 0:
        try:
            return child.wait(timeout=min(left, LOOK_S))
        except subprocess.TimeoutExpired:
            if not is_ending and is_told():
                is_ending, end = True, min(end, time.monotonic() + ENDING_S)
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
        names = {int(number): number.name for number in signal.Signals}
        how = f"the process was ended by {names.get(-code, f'signal {-code}')}"
    else:
        how = f"the process ended with {code}"
    return f"{how}; {output}" if output else how


def _last_lines(log: int) -> str:
    text = os.pread(log, LAST_BYTES, max(0, os.fstat(log).st_size - LAST_BYTES))
    lines = [line for line in text.decode("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:])[-LONGEST_REASON:]


def report(results: Results, key: str, work: Callable[[Evidence], None]) -> None:
    """Do work in this process, the child, and write its facts and outcome under `key`."""
    with suppress(OSError, AttributeError):  # a GPU must not stay taken when the parent ends
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
