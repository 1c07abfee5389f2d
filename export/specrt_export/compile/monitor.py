"""Progress of a build, the ways to stop it, and what was built."""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from specrt.engine.tensorrt.engine_record import KV_LENGTH, Compiled, Kernel, Profile
from specrt.engine.tensorrt.library import Message
from specrt.errors import BuildError

Progress = Callable[[str, float], None]

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

    So do SIGTERM and SIGHUP where they have handlers, which are called once the build has stopped.
    Python runs the handler at the library's next message or step: it builds without the GIL. In a
    thread that is not the main one signals cannot be handled, and none are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    came: set[int] = set()

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        came.add(number)
        watch.interrupt()

    handled = [s for s in (signal.SIGTERM, signal.SIGHUP) if callable(signal.getsignal(s))]
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, *handled)}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in handled:
            if number in came:
                signal.raise_signal(number)


_KERNEL = re.compile(
    r"^Name: (.*?)_myl(\d+)_\d+, LayerType: (\w+), .*?TacticName: ([^,]*?), StreamId", re.M
)


_CONSTRUCTING = re.compile(r"Constructing optimization profile number (\d+) ")


_ACTIVATION = re.compile(r"Total Activation Memory: (\d+) bytes")


_WEIGHTS = re.compile(r"Total Weights Memory: (\d+) bytes")


_NO_KERNELS = ("shape_call", "signal", "wait")
"""Kinds of entries that launch nothing: sizes, and order between streams."""


_STUB = "__myelin_CASK_STUB"
"""The tactic of products that are chosen on the device; their name says what they are."""


_MASK_AT = 32


_CAPABILITIES = {0x01: "7.5", 0x02: "8.0", 0x04: "8.6", 0x08: "8.9", 0x10: "12.0", 0x20: "12.1"}
"""Bits of the mask in the head of a plan of tensorrt-rtx (seen with 1.7.1)."""


_NAME_MOST = 120


_MESSAGES_MOST = 16


def compiled(messages: Iterable[Message], profiles: Iterable[Profile]) -> tuple[Compiled, ...]:
    """Return what became of each profile; without kernels where the library listed none."""
    listed = list(messages)
    kernels: dict[int, Counter[tuple[str, str]]] = {}
    for number, name, kind in _kernels(listed):
        kernels.setdefault(number, Counter())[name, kind] += 1
    activation = dict(_activation(listed))
    return tuple(
        Compiled(
            profile.name,
            activation.get(number, 0),
            tuple(
                Kernel(name, kind, count)
                for (name, kind), count in kernels.get(number, Counter()).items()
            ),
        )
        for number, profile in enumerate(profiles)
    )


def _kernels(messages: Iterable[Message]) -> Iterator[tuple[int, str, str]]:
    for message in messages:
        if "TacticName: " not in message.text:
            continue
        for name, number, kind, tactic in _KERNEL.findall(message.text):
            if kind not in _NO_KERNELS:
                yield int(number), _label(name, tactic), kind


def _label(name: str, tactic: str) -> str:
    """Return a name that is the same for the same kernel in another layer or another build."""
    if tactic and tactic != _STUB:
        return re.sub(r"_0x[0-9a-f]+", "", tactic)[:_NAME_MOST]
    plain = re.sub(r" \[profile \d+\]|_U\d+", "", name)
    return re.sub(r"\d+", "#", plain)[:_NAME_MOST]


def _activation(messages: Iterable[Message]) -> Iterator[tuple[int, int]]:
    number = 0
    for message in messages:
        begun, total = _CONSTRUCTING.search(message.text), _ACTIVATION.search(message.text)
        number = int(begun[1]) if begun else number
        if total:
            yield number, int(total[1])


def weight_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes of weights that the plan takes on the device; 0 where it was not said."""
    matches = (_WEIGHTS.search(message.text) for message in messages)
    return max((int(match[1]) for match in matches if match), default=0)


_ALWAYS = ("has Int64 binding", f"Input Tensor {KV_LENGTH} is unused")
"""Of warnings that say what is meant to be so."""


def highlights(messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the library's distinct warnings, but for those that say what is always so."""
    lines = dict.fromkeys(
        printable(message.text)
        for message in messages
        if message.severity == "warning" and not any(part in message.text for part in _ALWAYS)
    )
    return tuple(lines)[:_MESSAGES_MOST]


def printable(text: str, most: int = 240) -> str:
    """Return the first line of a message, as a record can hold it."""
    line = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(mark if mark.isprintable() else " " for mark in line.strip())[:most]


@dataclass(frozen=True)
class Header:
    """What the first bytes of a plan say."""

    magic: bytes
    capabilities: tuple[str, ...]
    """Those a plan of tensorrt-rtx is for; empty for other plans."""


def read_header(head: bytes) -> Header:
    """Read the first bytes of a plan, 64 of them or more."""
    magic = head[:4]
    if magic != b"vtrt" or len(head) <= _MASK_AT:
        return Header(magic, ())
    mask = head[_MASK_AT]
    return Header(magic, tuple(name for bit, name in _CAPABILITIES.items() if mask & bit))
