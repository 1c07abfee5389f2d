"""Where a run works, and what it was started with."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu"
CODELET = ROOT / "engines" / "codelet"
PROMPTS = ROOT / "benchmarks" / "prompts" / "code.jsonl"
WORK = ROOT / "engines" / "build" / "gpu-check"
"""Ignored by git; bundles, plans and results stay there from run to run."""
SITE = "site"
"""Folder of packages below that one, for a device without a network."""
SOURCES = ("runtime", "export", "tools")
ATTENTION: dict[str, dict[str, Any]] = {
    "grouped": {"grouped_queries": True}, "lengths": {"kv_lengths": (640,)}
}  # fmt: skip
"""Bundles of codelet that differ in how attention reads, by what they set in `[tensorrt]`."""
HEAD = "head"
"""The bundle of codelet's target with a random head."""
SIZES = ("1B", "8B")
PRECISIONS = ("fp16", "int8", "fp8")


@dataclass(frozen=True)
class RunSettings:
    """Folders and sizes of one run."""

    work: Path = WORK
    scratch: Path | None = None
    """Where lowered weights lie while a plan is built; `work` when None."""
    sizes: tuple[str, ...] = SIZES
    precisions: tuple[str, ...] = PRECISIONS
    gammas: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    capabilities: tuple[str, ...] = ()
    """What plans of tensorrt-rtx are built for; all that the library knows when empty."""
    prompts: int = 6
    """How many are completed in each verification and benchmark."""
    tokens: int = 96
    """How many follow each."""
    laps: int = 15
    """How often each candidate of an interleaved measurement runs."""
    copied_bytes: int = 2 << 30
    """How much is copied to measure the bandwidth of the GPU's memory."""

    def opened(self, way: str) -> RunSettings:
        """Return these with the capability that plans of tensorrt-rtx were seen to open with."""
        return replace(self, capabilities=() if way in ("", "any") else (way,))


def environment(work: Path) -> dict[str, str]:
    """Return the environment of a step: this repository, carried packages, NVIDIA's libraries.

    ONNX Runtime looks for CUDA's libraries in its own package only, and then where the loader does.
    """
    packages = [*(str(ROOT / name) for name in SOURCES), str(work / SITE)]
    places = [Path(path) for path in dict.fromkeys([*packages, *sys.path]) if path]
    libraries = [str(found) for place in places for found in sorted(place.glob("nvidia/*/lib"))]
    added = {"PYTHONPATH": packages, "LD_LIBRARY_PATH": libraries}
    own = {name: [os.environ[name]] if os.environ.get(name) else [] for name in added}
    return os.environ | {n: os.pathsep.join([*added[n], *own[n]]) for n in added}
