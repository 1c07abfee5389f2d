"""Progress of a build, and the ways to stop it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from specrt.errors import BuildError

Progress = Callable[[str, float], None]
Handler = Callable[[int, FrameType | None], Any] | int | None

_LONG = "Computing profile costs"
"""The phase that takes nearly all the time: the same number of steps for each profile."""
_BEFORE, _AFTER = 0.05, 0.95
"""Where the long phase begins and ends."""


class CancelledError(BuildError):
    """A build was stopped because its caller asked for it."""


def _never() -> bool:
    return False


@dataclass
class _Phase:
    name: str
    steps: int
    done: int = 0


@dataclass
class Watch:
    """What is known of a build that runs: how far it is, and whether to stop it."""

    progress: Progress
    parts: tuple[str, ...]
    """The names of the profiles, which are compiled one after the other."""
    cancelled: Callable[[], bool] = _never
    interrupted: bool = False
    error: BaseException | None = None
    """What a callback raised: it must not pass through the library, so it waits here."""
    _phases: list[_Phase] = field(default_factory=list)
    _reached: float = 0.0

    def start(self, name: str, steps: int) -> None:
        """Note that a phase begins inside those that run."""
        self._phases.append(_Phase(name, max(1, steps)))
        self._show()

    def step(self, name: str, number: int) -> bool:
        """Note that a step ended; return whether to go on."""
        for phase in reversed(self._phases):
            if phase.name == name:
                phase.done = max(phase.done, number + 1)
                break
        self._show()
        return not self.stopping()

    def finish(self, name: str) -> None:
        """Note that a phase ended, and what was inside it."""
        for at in reversed(range(len(self._phases))):
            if self._phases[at].name == name:
                del self._phases[at]
                break

    def stopping(self) -> bool:
        """Tell whether the build shall stop."""
        if not self.interrupted and self.error is None:
            self._guard(self._ask)
        return self.interrupted or self.error is not None

    def check(self) -> None:
        """Raise what stopped the build.

        Raises: KeyboardInterrupt, CancelledError, or what a callback raised.
        """
        self.stopping()
        if self.interrupted:
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error

    def interrupt(self) -> None:
        """Stop at the end of the step that runs."""
        self.interrupted = True
        self._guard(lambda: self.progress("stopping", self._reached))

    def _ask(self) -> None:
        if self.cancelled():
            raise CancelledError("the build was cancelled; nothing was written")

    def _show(self) -> None:
        stage, reached = self._where()
        self._reached = max(self._reached, min(reached, 1.0))
        if not self.interrupted and self.error is None:
            self._guard(lambda: self.progress(stage, self._reached))

    def _where(self) -> tuple[str, float]:
        for at, phase in enumerate(self._phases):
            if phase.name == _LONG:
                share = _share(self._phases[at:])
                part = min(int(share * len(self.parts)), len(self.parts) - 1)
                stage = f"profile {self.parts[part]} ({part + 1} of {len(self.parts)})"
                return stage, _BEFORE + (_AFTER - _BEFORE) * share
        stage = self._phases[0].name.lower() if self._phases else "build"
        # Before the long phase a step of the outermost ones is short, whatever its number says.
        return stage, _BEFORE * _share(self._phases)

    def _guard(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self.error = self.error or error


def _share(phases: list[_Phase]) -> float:
    """Return the share of the first phase that is done; what is inside counts within its step."""
    share = 0.0
    for phase in reversed(phases):
        share = min(1.0, (phase.done + min(share, 1.0)) / phase.steps)
    return share


def monitor(module: Any, watch: Watch) -> Any:
    """Return the library's progress monitor that reports to a watch; keep it while building."""

    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            watch.start(phase_name, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            watch.finish(phase_name)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return watch.step(phase_name, step)

    return Monitor()


@contextmanager
def interruptible(watch: Watch) -> Iterator[None]:
    """Let Ctrl-C stop a build at the end of a step; a second one ends the process at once.

    Python runs the handler at the library's next message or step: it builds without the GIL. In a
    thread that is not the main one signals cannot be handled, and none are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        watch.interrupt()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        # None: a handler that was not set from Python cannot be put back.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
