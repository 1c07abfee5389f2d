"""How much memory this process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes that can be taken without swapping; None where the system does not tell.

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
