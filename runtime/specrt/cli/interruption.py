"""Ctrl-C while an answer comes: noted first, obeyed at once when it is pressed again."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interruption:
    """Notes the first Ctrl-C, so that a round is never cut in the middle; the second one raises.

    Does nothing when it is not `wanted`, and outside the main thread, where no signal arrives.
    """

    def __init__(self, wanted: bool) -> None:
        self.came = False
        self._wanted = wanted and threading.current_thread() is threading.main_thread()
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if self._wanted:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._wanted:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, _: int, __: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True
