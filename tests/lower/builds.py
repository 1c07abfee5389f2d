"""What tests of the builder share: a build of one profile, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrt.engine.tensorrt.library import Library
from specrt_export.compile.network import profiles
from specrt_export.compile.plan_builder import PlanReport, build_plan
from specrt_export.recipe import PlanOptions

PROFILES = profiles("target", 32, (1, 4))


def nothing(stage: str, done: float) -> None:
    pass


def make(graph: Path, library: Library, out: Path, **settings: Any) -> PlanReport:
    options = PlanOptions(**settings)
    return build_plan(graph, out, library, PROFILES[1:2], options, nothing)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
