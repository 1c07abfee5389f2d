"""Builds recipes as `specrt build` does."""

from __future__ import annotations

from pathlib import Path

from specrt_export import builder
from specrt_export.compile.compiler import Progress
from specrt_export.plan.build_plan import resolve
from specrt_export.recipe.recipe import Recipe


def build(recipe: Recipe, out: Path, progress: Progress = lambda stage, done: None) -> None:
    builder.build(resolve(recipe, out), progress)


def is_fresh(recipe: Recipe, out: Path) -> bool:
    return resolve(recipe, out).is_fresh()
