"""Processes forked from the test's own, in which doubles are what they are here."""

from __future__ import annotations

import os
import subprocess
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path


class Forked:
    """A child process; its time is up as soon as it says that it hangs."""

    def __init__(self, pid: int, hangs: Path | None) -> None:
        self.pid, self._hangs = pid, hangs
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            if timeout is not None and self._hangs is not None and self._hangs.exists():
                raise subprocess.TimeoutExpired("forked", timeout)
            time.sleep(0.002)
        return code


def fork(work: Callable[[], None], hangs: Path | None = None) -> Forked:
    """Run work in a child, which leads a process group of its own as those of a run do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child runs nothing but this thread
        pid = os.fork()
    os.setpgid(pid, pid or os.getpid())  # here and there: whoever comes first
    if pid:
        return Forked(pid, hangs)
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
