"""What tests of the builder share: a build of one profile, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrt.engine.tensorrt.library import Library
from specrt_export.compile.tensorrt.builder_config import PlanOptions
from specrt_export.compile.tensorrt.network import profiles
from specrt_export.compile.tensorrt.plan_builder import PlanReport, build_plan

PROFILES = profiles("target", 32, (1, 4))


def nothing(stage: str, done: float) -> None:
    pass


def make(graph: Path, library: Library, out: Path, **settings: Any) -> PlanReport:
    options = PlanOptions(**settings)
    return build_plan(graph, out, library, PROFILES[1:2], options, nothing)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
