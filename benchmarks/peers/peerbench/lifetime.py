"""Child processes that do not outlive whoever started them, stopped or not."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Ask Linux, between fork and exec, for SIGKILL when the parent ends.

    A child that was stopped cannot notice that its input ended.
    """
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
