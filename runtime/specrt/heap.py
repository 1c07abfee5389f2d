"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give what was freed back to the system, where the C library can.

    glibc keeps freed memory for the next who allocates: of codelet's 90 MB, 20 to 100 stayed with
    the process after closing. It takes 2 ms, and moves nothing that is in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
