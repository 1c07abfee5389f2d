"""Where a run works, and what it was asked for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from specrt.system.gpu import Survey, survey

ROOT = Path(__file__).resolve().parents[3]
HERE = ROOT / "benchmarks" / "gpu"
CODELET = ROOT / "engines" / "codelet"
PROMPTS = ROOT / "benchmarks" / "prompts" / "code.jsonl"
WORK = ROOT / "engines" / "build" / "gpu-check"
"""Ignored by git, so that plans stay there from run to run."""
RESULTS = ROOT / "benchmarks" / "results"
SIZES = ("1B", "8B")
PRECISIONS = ("fp16", "int8", "fp8")
GAMMAS = (1, 2, 3, 4, 5, 6, 7, 8)
MAX_LENGTH, PREFILL = 2048, 256


@dataclass(frozen=True)
class Place:
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
    """How often each contender of an interleaved measurement has its turn."""
    experiment: str = "1B"
    """The size that the questions about lowering are answered with; `codelet` for itself."""
    capabilities: tuple[str, ...] = ()
    """Compute capabilities that plans of TensorRT for RTX are built for; its choice when empty."""
    rehearse: bool = False
    """Whether the checks of engines run over plans in NumPy, which come with the tests."""

    @property
    def aside(self) -> Path:
        """Where what is gone after a build lies meanwhile."""
        return self.scratch or self.work

    @property
    def found(self) -> Survey:
        """What the driver tells of this machine."""
        return survey()

    @property
    def has_gpu(self) -> bool:
        """Whether a GPU answers."""
        return not self.found.problem


def import_tools() -> None:
    """Let `inflate` and `growth` be imported: they are scripts, in no package."""
    tools = str(ROOT / "tools")
    if tools not in sys.path:
        sys.path.insert(0, tools)
