"""Plans of real models, made as a recipe makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lower.lowering import NEW, Lowering, lowered
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, EngineRecord, read_engine_record
from specrt.engine.tensorrt.library import Library
from specrt_export.compile.network import profiles
from specrt_export.lower.lazy_tensor import ENGINE

PREFILL, GAMMAS = 32, (1, 4)
PROFILES = profiles("draft", PREFILL, ())
CANDIDATES = 16


@dataclass(frozen=True)
class Planned:
    """A plan with its record, and the graph it was made of."""

    folder: Path
    role: str

    @property
    def record(self) -> EngineRecord:
        return read_engine_record(self.folder / FILE_NAME)

    @property
    def plan(self) -> Path:
        return self.folder / PLAN

    @property
    def graph(self) -> Path:
        return self.folder / "made" / "lowered" / ENGINE


def make(
    source: tuple[Path, Path], role: str, precision: str, folder: Path, library: Library,
    version: str = NEW, **options: Any,
) -> Planned:  # fmt: skip
    """Quantize, lower and compile a model into a folder that is not there."""
    folder.mkdir(parents=True)
    how = Lowering("tensorrt", precision, version=version, **options)
    case = lowered(*source, folder / "made", how, role, prefill=PREFILL, gammas=GAMMAS)
    compiler = how.compiler(library, prefill=PREFILL, gammas=GAMMAS)
    compiler.compile(case.lowered, folder, folder / "previous", nothing)
    return Planned(folder, role)


def nothing(stage: str, done: float) -> None:
    """Tell nobody how far a build is."""
