"""Run steps, each in a process of its own: one that crashes or hangs takes nobody along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpucheck.environment import no_gpu, why_not
from gpucheck.place import HERE, Place
from gpucheck.probe import verdict
from gpucheck.step import FAILED, NOT_RUN, OK, CheckError, NotRunError, Outcome, Step

SCRIPT = HERE / "check.py"
NO_TIME = "too little was left of --minutes"
_LAST_LINES = 6
_SHORTEST, _PATIENCE = 3.0, 4.0
"""Minutes that any step may take where time is short, and how many times what was expected."""
_LONGEST = 600
_TIDYING_S = 5


def perform(step: Step, place: Place) -> dict[str, Any]:
    """Run a step here; return its status, reason and facts."""
    if step.needs_gpu and not place.has_gpu:
        return {"status": NOT_RUN, "reason": no_gpu(place.found), "facts": {}}
    try:
        return {"status": OK, "reason": "", "facts": step.run(place, step.backend)}
    except NotRunError as error:
        return {"status": NOT_RUN, "reason": str(error), "facts": {}}
    except CheckError as error:
        return {"status": FAILED, "reason": str(error), "facts": error.facts}
    except Exception as error:  # whatever a library raises ends this step alone
        reason = f"{type(error).__name__}: {error}"
        return {"status": FAILED, "reason": " ".join(reason.split())[:_LONGEST], "facts": {}}


def apart(step: Step, arguments: Sequence[str], seconds: float | None) -> Outcome:
    """Run a step in a process of its own, for at most so long; as long as it takes when None."""
    began, when = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, str(SCRIPT), *arguments, "--step", step.key, str(answer)]
        code, said = _ran(command, Path(folder) / "said", seconds)
        done = json.loads(answer.read_text("utf-8")) if answer.exists() else _lost(code, said)
    took = round(time.monotonic() - began, 2)
    return Outcome(step.subject, step.backend, **done, seconds=took, when=when)


def _ran(command: list[str], log: Path, seconds: float | None) -> tuple[int | None, str]:
    """Return how a process ended, None where it had to be stopped, and what it said last."""
    with log.open("w") as file:
        started = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            code: int | None = started.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        except KeyboardInterrupt:  # it is in a session of its own, and has not heard of it
            with suppress(subprocess.TimeoutExpired, ProcessLookupError):
                os.killpg(started.pid, signal.SIGINT)
                started.wait(timeout=_TIDYING_S)  # what is half built is removed
            raise
        finally:
            if started.poll() is None:  # Ctrl-C too leaves nobody behind
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return code, " | ".join(lines[-_LAST_LINES:])[-_LONGEST:]


def _lost(code: int | None, said: str) -> dict[str, Any]:
    if code is None:
        how = "stopped: its time was up"
    elif code < 0:
        how = f"the process was ended by {signal.Signals(-code).name}"
    else:
        how = f"the process ended with {code}"
    return {"status": FAILED, "reason": f"{how}; {said}" if said else how, "facts": {}}


def answer(step: Step, place: Place, path: Path) -> None:
    """Run a step in this process, and leave what it found in a file."""
    done = perform(step, place)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(done), encoding="utf-8")
    aside.replace(path)


def run_all(
    steps: Sequence[Step], arguments: Sequence[str], minutes: float | None, place: Place,
    note: Callable[[Outcome], dict[str, Any]], begun: Callable[[Step], None],
) -> list[Outcome]:  # fmt: skip
    """Run steps in their order within a number of minutes.

    `begun` is told each step that is really started. `note` is told each outcome as it comes, and
    returns all that is known by then.
    """
    ends = None if minutes is None else time.monotonic() + 60 * minutes
    outcomes: list[Outcome] = []
    backends = Backends(place)
    for step in steps:
        left = None if ends is None else ends - time.monotonic()
        if reason := backends.why_not(step.backend) if step.needs_gpu else "":
            done = Outcome(step.subject, step.backend, NOT_RUN, reason)
        elif left is not None and left < 60 * step.minutes:
            facts = {"minutes_needed": step.minutes, "minutes_left": round(max(left, 0) / 60, 1)}
            done = Outcome(step.subject, step.backend, NOT_RUN, NO_TIME, facts=facts)
        else:
            begun(step)
            done = apart(step, arguments, _patience(step, left))
        outcomes.append(done)
        backends.known = note(done)
    return outcomes


class Backends:
    """What keeps steps from running, found out once for each backend and after its probe."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._lacks: dict[str, str] = {}
        self.known: dict[str, Any] = {}
        """Steps by key, as results keep them."""

    def why_not(self, backend: str) -> str:
        """Say why what needs a GPU is left out; empty where it is not."""
        if not self._place.has_gpu:
            return no_gpu(self._place.found)
        if not backend:
            return ""
        if backend not in self._lacks:
            self._lacks[backend] = why_not(backend, self._place.found)
        asked = self._place.capabilities  # other plans than those that were probed
        return self._lacks[backend] or ("" if asked else verdict(self.known, backend))


def _patience(step: Step, left: float | None) -> float | None:
    """Return how long a step may take: where time is short, one that hangs must not take it all."""
    return None if left is None else min(left, 60 * max(_SHORTEST, _PATIENCE * step.minutes))
