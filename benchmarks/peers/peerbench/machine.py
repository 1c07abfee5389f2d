"""What a result says about the machine it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> dict[str, object]:
    """Return processor, cores that may be used, memory and system."""
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "family": _field(Path("/proc/cpuinfo"), "cpu family"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _field(path: Path, name: str) -> str:
    if not path.exists():
        return ""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
