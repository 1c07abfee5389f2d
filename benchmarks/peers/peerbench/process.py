"""One runner as a child process, stopped whenever it is not its turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from peerbench.lifetime import die_with_parent
from peerbench.protocol import Hello, Order, Outcome


class RunnerError(Exception):
    """A runner that did not start, or ended before it answered."""


def _lead_a_group() -> None:
    """Begin a process group, and no session: Linux would give that the default priority again."""
    die_with_parent()
    os.setpgrp()


class Runner:
    """A runner in a process group of its own.

    Threads that wait by spinning would take the cores from whoever's turn it is, so the whole group
    is stopped (SIGSTOP) after each answer and continued (SIGCONT) for the next order.
    """

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                preexec_fn=_lead_a_group,  # noqa: PLW1509 - there is one thread
            )
        try:
            self.hello = Hello(**json.loads(self._read()))
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, order: Order) -> Outcome:
        """Let the runner run until it has answered. Raises: RunnerError."""
        self._signal(signal.SIGCONT)
        try:
            self._write(json.dumps(asdict(order)))
            return Outcome(**json.loads(self._read()))
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the runner: its input ends, and after ten seconds everything in its group."""
        self._signal(signal.SIGCONT)
        if self._process.stdin:
            with suppress(OSError):  # an order that a dead runner never read is flushed again
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # everything in the group may have ended by itself
            os.killpg(self._process.pid, number)

    def _write(self, line: str) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            raise self._ended()
        return line

    def _ended(self) -> RunnerError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was said")
        return RunnerError(f"the runner ended: {last}; see {self._log}")
