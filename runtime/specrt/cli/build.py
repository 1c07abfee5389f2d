"""`specrt build`: from a recipe to a bundle, with a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrt.bundle import BUILD_ROOT
from specrt.engine.backends import TENSORRT
from specrt.errors import BuildError
from specrt.system.gpu import survey

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
@click.option(
    "--dry-run", is_flag=True, help="Build nothing; say what memory it takes and what limits it."
)
@click.option("--bandwidth", type=float, help="With --dry-run: GB/s of the memory it will run in.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
def command(
    recipe: Path, backend: str | None, out: Path | None, no_tune: bool, if_stale: bool,
    dry_run: bool, bandwidth: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Build the bundle of RECIPE (default place: engines/build/NAME)."""
    if not dry_run and (as_json or bandwidth is not None):
        raise click.UsageError("--bandwidth and --json belong to --dry-run; add it")
    try:
        # Before all that building needs, which takes a second to import.
        from specrt_export.recipe import read_recipe

        plan = read_recipe(recipe, backend=backend)
        if dry_run:
            _estimate(plan, bandwidth, as_json)
            return
        from specrt_export import builder
    except ImportError as error:
        raise BuildError(
            f'building needs {error.name}; install it with `pip install "specrt[build]"`'
        ) from None
    from specrt.tuning.pass_timer import tune_quickly

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


def _estimate(plan: Recipe, bandwidth: float | None, as_json: bool) -> None:
    """Print what a recipe takes, and the tokens per second that memory allows."""
    from specrt.system.machine import available_bytes, measure_bandwidth
    from specrt_export.estimate import estimate, size
    from specrt_export.recipe import COMPILERS

    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise click.UsageError(f"--bandwidth is {bandwidth}; expected GB/s, more than 0")
    found = estimate(plan)
    here = COMPILERS[plan.backend_of("target")].on_cpu
    speed, how = (bandwidth * 1e9 if bandwidth else None), "as given"
    if speed is None and here:
        measured = measure_bandwidth(len(os.sched_getaffinity(0)), reads=_READS)
        speed, how = measured.bytes_per_second, "measured here"
    rates = [found.tokens_per_second(speed, full=full) for full in (False, True)] if speed else []
    free = available_bytes() if here else None
    if as_json:
        limits = dict(zip(("tokens_per_second", "full_tokens_per_second"), rates, strict=False))
        facts = {"bandwidth": speed, "available_bytes": free, **limits}
        print(json.dumps({**found.to_json(), **facts}))
        return
    print(*found.lines(), sep="\n")
    if free is not None:
        word = "fits" if found.total_bytes <= free else "does not fit"
        print(f"{word}: {size(free)} of this machine's memory are free")
    if not speed:
        print("--bandwidth GB/s of the GPU's memory adds the tokens per second that it allows")
        return
    print(
        f"{speed / 1e9:.1f} GB/s of memory, {how}: at most {rates[0]:.1f} tokens/s in plain "
        f"decoding,\n{rates[1]:.1f} with all positions filled; a round checks its draft in one step"
    )


_READS = 4


def _runs_elsewhere(plan: Recipe, place: Path) -> str | None:
    """Say that plans are tuned where they run, if that is not here."""
    backends = {plan.backend_of(role) for role in plan.sources}.intersection(TENSORRT)
    if not backends or not survey().problem:
        return None
    return f"not tuned, as there is no GPU here; run `specrt tune {place}` where it will run"


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
