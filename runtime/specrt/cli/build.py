"""`specrt build`: from a recipe to a bundle, with a progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrt.bundle import BUILD_ROOT
from specrt.engine.backends import backend_named
from specrt.errors import BuildError
from specrt.tuning.pass_timer import tune_quickly

if TYPE_CHECKING:
    from specrt_export.recipe import Recipe


@click.command("build")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    help="Build for ort-cpu, ort-cuda, tensorrt or tensorrt-rtx instead of what the recipe says, "
    "into engines/build/NAME-BACKEND where that differs; auto: the fastest that works here.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the bundle.")
@click.option("--no-tune", is_flag=True, help="Leave the costs to be measured where it runs.")
@click.option("--if-stale", is_flag=True, help="Do nothing when the bundle is up to date.")
def command(
    recipe: Path, backend: str | None, out: Path | None, no_tune: bool, if_stale: bool
) -> None:
    """Build the bundle of RECIPE (default place: engines/build/NAME)."""
    try:
        from specrt_export import bundle_builder as builder
        from specrt_export.recipe import read_recipe
    except ImportError as error:
        raise BuildError(
            f'building needs {error.name}; install it with `pip install "specrt[build]"`'
        ) from None
    plan = read_recipe(recipe, backend=backend)
    place = out or BUILD_ROOT / _folder(recipe, plan, backend)
    if if_stale and builder.is_fresh(plan, place):
        print(f"{place} is up to date")
        return
    began = time.monotonic()
    with progress_bar(f"build {plan.name}") as progress:
        builder.build(plan, place, progress)
        reason = None
        if not no_tune and (reason := _runs_elsewhere(plan, place)) is None:
            progress("measure costs", 0.98)
            _, reason = tune_quickly(place)
        progress("done", 1.0)
    if reason is not None:
        print(f"note: {reason}", file=sys.stderr)
    size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    took = time.monotonic() - began
    print(
        f"built {place} ({size / 1e6:.1f} MB) in {took:.1f} s; look at it: specrt inspect {place}"
    )


def _runs_elsewhere(plan: Recipe, place: Path) -> str | None:
    """Say that engines are tuned where they run, if that is not here."""
    lacks = filter(None, (backend_named(plan.backend_of(role)).missing() for role in plan.sources))
    missing = next(lacks, None)
    if missing is None:
        return None
    return f"not tuned here ({missing}); run `specrt tune {place}` where it will run"


def _lines(title: str) -> Callable[[str, float], None]:
    """Return a function that prints each stage once, when it begins."""
    seen: set[str] = set()

    def show(stage: str, done: float) -> None:
        if stage not in seen:
            # In one piece: Ctrl-C shows a stage from between the halves of another line.
            sys.stderr.write(f"{title}: {stage}\n")
        seen.add(stage)

    return show


def _folder(path: Path, plan: Recipe, backend: str | None) -> str:
    """Return the name of a bundle's folder: one for another backend than the recipe's is apart."""
    from specrt_export.recipe import read_recipe

    own = backend is None or read_recipe(path).engine.backend == plan.engine.backend
    return plan.name if own else f"{plan.name}-{plan.engine.backend}"


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """Give a function that shows the stage that runs and the share that is done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn(title),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, done: bar.update(task, description=stage, completed=done)
