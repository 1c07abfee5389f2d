"""Where a run works, and what it was started with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "benchmarks" / "gpu"
CODELET = ROOT / "engines" / "codelet"
PROMPTS = ROOT / "benchmarks" / "prompts" / "code.jsonl"
RESULTS = ROOT / "benchmarks" / "results"
WORK = ROOT / "engines" / "build" / "gpu-check"
"""Ignored by git; bundles and plans stay there from run to run."""
SIZES = ("1B", "8B")
PRECISIONS = ("fp16", "int8", "fp8")
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
MAX_LENGTH, PREFILL = 2048, 256


@dataclass(frozen=True)
class RunSettings:
    """Folders and sizes of one run."""

    work: Path = WORK
    scratch: Path | None = None
    """Where lowered weights lie while a plan is built; beside the plans when None."""
    sizes: tuple[str, ...] = SIZES
    precisions: tuple[str, ...] = PRECISIONS
    gammas: tuple[int, ...] = GAMMAS
    prompts: int = 6
    """How many are completed in each verification and benchmark."""
    tokens: int = 96
    """How many follow each."""
    laps: int = 15
    """How often each candidate of an interleaved measurement runs."""
    copied_bytes: int = 2 << 30
    """How much is copied to measure the bandwidth of the GPU's memory."""

    @property
    def weights_folder(self) -> Path:
        """Where weights lie that are needed only while a plan is built."""
        return self.scratch or self.work


def add_source() -> None:
    """Let specrt and its scripts be imported from this repository, installed or not."""
    for folder in ("tools", "export", "runtime"):
        path = str(ROOT / folder)
        if path not in sys.path:
            sys.path.insert(0, path)
