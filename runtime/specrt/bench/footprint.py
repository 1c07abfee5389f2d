"""How much memory this process takes, against what its weights and caches need."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrt.manifest import Manifest

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Footprint:
    """The memory of a process that opened a bundle. Units: bytes."""

    before: int
    """Resident before the bundle was opened: the interpreter and its libraries so far."""
    peak: int
    """Most that was resident at once."""
    weights: int
    caches: int
    """KV buffers with every position filled; those never written take no memory."""

    @property
    def ratio(self) -> float:
        """Peak over weights and caches; interpreter and libraries count against it."""
        return self.peak / (self.weights + self.caches)

    @property
    def opened_ratio(self) -> float:
        """What opening and running added, over weights and caches."""
        return (self.peak - self.before) / (self.weights + self.caches)

    def __str__(self) -> str:
        """Return a sentence."""
        mib = 1 << 20
        return (
            f"peak memory {self.peak / mib:.0f} MiB, {self.before / mib:.0f} of them there before "
            f"the bundle was opened; weights {self.weights / mib:.0f} and caches "
            f"{self.caches / mib:.0f}: {self.ratio:.2f} times them, {self.opened_ratio:.2f} "
            "without what was there"
        )

    def to_json(self) -> dict[str, Any]:
        """Return bytes and ratios."""
        return {
            "before_bytes": self.before,
            "peak_bytes": self.peak,
            "weight_bytes": self.weights,
            "kv_bytes": self.caches,
            "ratio": round(self.ratio, 4),
            "opened_ratio": round(self.opened_ratio, 4),
        }


def footprint(manifest: Manifest, before: int, has_draft: bool) -> Footprint:
    """Return the memory taken so far, for a bundle whose draft may have stayed closed."""
    models = [manifest.target, *([manifest.draft] if manifest.draft and has_draft else [])]
    caches = (
        m.geometry.kv_bytes(manifest.batch, manifest.max_length, m.kv_item_bytes) for m in models
    )
    return Footprint(before, peak_bytes(), sum(m.weight_bytes for m in models), sum(caches))


def resident_bytes(status: Path = _STATUS) -> int:
    """Return the bytes of this process in memory now; its peak where the system does not tell."""
    return _told("VmRSS", status) or peak_bytes(status)


def peak_bytes(status: Path = _STATUS) -> int:
    """Return the most bytes this process had in memory at once."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _told("VmHWM", status) or kib << 10


def _told(name: str, status: Path) -> int:
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    sizes = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0][1]) << 10 if sizes else 0
