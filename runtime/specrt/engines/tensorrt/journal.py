"""What TensorRT says while it works: one journal per library, and blocks that listen to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SEVERITIES = ("internal error", "error", "warning", "info", "verbose")
"""Of TensorRT's messages, the worst first, numbered as TensorRT numbers them."""
_WORST = 2
_KEPT = 32
_LONGEST = 400


@dataclass(frozen=True)
class Message:
    """One message of TensorRT."""

    severity: str
    """One of `SEVERITIES`."""
    text: str

    @property
    def is_error(self) -> bool:
        """Whether something failed."""
        return self.severity in SEVERITIES[:_WORST]


@dataclass
class Log:
    """The messages of a block, in order."""

    messages: list[Message] = field(default_factory=list)

    @property
    def first_error(self) -> str:
        """The first line of the first message that something failed; empty where none did."""
        return next((first_line(m.text) for m in self.messages if m.is_error), "")


class Journal:
    """Where all messages of one library go: to the blocks that listen, and errors are kept.

    TensorRT keeps the first logger it sees and calls it from threads of its own.
    """

    def __init__(self) -> None:
        self._errors: deque[Message] = deque(maxlen=_KEPT)
        self._listening: tuple[Log, ...] = ()

    def write(self, severity: int, text: str) -> None:
        """Take one message."""
        message = Message(SEVERITIES[min(max(severity, 0), len(SEVERITIES) - 1)], text)
        if message.is_error:
            self._errors.append(message)
        for log in self._listening:
            log.messages.append(message)

    def drain(self) -> str:
        """Return the first line of the oldest error since the last call, and forget all."""
        log = Log(list(self._errors))
        self._errors.clear()
        return log.first_error

    @contextmanager
    def listen(self) -> Iterator[Log]:
        """Collect the messages of a block."""
        log = Log()
        self._errors.clear()
        self._listening = (*self._listening, log)
        try:
            yield log
        finally:
            self._listening = tuple(other for other in self._listening if other is not log)


def first_line(text: str) -> str:
    """Return the first line of a message, cut where it is very long."""
    lines = text.strip().splitlines()
    return lines[0][:_LONGEST] if lines else ""
