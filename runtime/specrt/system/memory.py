"""Memory of this machine: what is free, how fast it reads, what goes back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np


def trim_heap() -> None:
    """Give what was freed back to the system, where the C library can.

    glibc keeps freed memory for later allocations: of codelet's 90 MB, 20 to 100 stayed with
    the process after closing. It takes 2 ms, and moves nothing that is in use. So pages on which
    something small still lives stay: 40 kB for each time a bundle is opened, over 160 times, in
    which what is in use grew by 2 kB each, all of it the engine library's.
    """
    trim = _trim()
    if trim is not None:
        trim(ctypes.c_size_t(0))


@cache
def _trim() -> Any:
    """Return the function; looked up once: ctypes creates classes that stay until a collection."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def size(count: float) -> str:
    """Return a number of bytes in GB or MB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


_MEMINFO = Path("/proc/meminfo")

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that can be taken without swapping; None where that is not known.

    The smaller of what the kernel calls available and what the control group leaves. Page cache
    that can be dropped counts as free.
    """
    return min(_limits(meminfo, cgroup), default=None)


def _limits(meminfo: Path, cgroup: Path) -> Iterator[int]:
    for line in _text(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10
    most, taken = _text(cgroup / "memory.max").strip(), _text(cgroup / "memory.current").strip()
    if most.isdigit() and taken.isdigit():
        droppable = [
            int(line.split()[1])
            for line in _text(cgroup / "memory.stat").splitlines()
            if line.startswith("inactive_file ")
        ]
        yield int(most) - int(taken) + sum(droppable)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

_LEAST_BYTES = 256 << 20

_READS = 12


@dataclass(frozen=True)
class Bandwidth:
    """The fastest of some reads of an array much larger than the last cache.

    A floor: NumPy's loop on as many threads may not reach what the memory can give.
    """

    bytes_per_second: float
    array_bytes: int
    threads: int
    reads: int

    def __str__(self) -> str:
        """Return a sentence on what was measured, and how."""
        return (
            f"{self.bytes_per_second / 1e9:.1f} GB/s of memory read, at least: the fastest of "
            f"{self.reads} reads of {size(self.array_bytes)} in NumPy by {self.threads} "
            f"thread{'s' if self.threads > 1 else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {**asdict(self), "bytes_per_second": round(self.bytes_per_second)}


def measure_bandwidth(
    threads: int, array_bytes: int | None = None, reads: int = _READS
) -> Bandwidth:
    """Read an array some times over, each thread a part of it, and keep the fastest time.

    The fastest, because whatever else runs can only slow a read down. A reduction by bitwise or
    does least to each word that it reads, and NumPy lets other threads run meanwhile.
    """
    words = (array_bytes or _array_bytes()) // 8
    parts = np.array_split(np.ones(words, np.uint64), threads)  # written, so that pages exist
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(reads):
            began = perf_counter_ns()
            list(pool.map(np.bitwise_or.reduce, parts))
            times.append(perf_counter_ns() - began)
    return Bandwidth(words * 8 / (min(times) / 1e9), words * 8, threads, reads)


def _array_bytes() -> int:
    """Return four times the last cache, within an eighth of what memory is free."""
    free = available_bytes()
    wanted = max(_LEAST_BYTES, 4 * last_cache_bytes())
    return wanted if free is None else max(1 << 20, min(wanted, free // 8))


def last_cache_bytes(caches: Path = _CACHES) -> int:
    """Return the size of the largest cache a core reads through; 0 where the system hides it."""
    units = {"K": 10, "M": 20, "G": 30}
    largest = 0
    for file in caches.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        if text[:-1].isdigit() and text[-1] in units:
            largest = max(largest, int(text[:-1]) << units[text[-1]])
    return largest
