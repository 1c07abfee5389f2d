"""`specrt build`: builds a bundle from a recipe, and tunes it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrt.bundle import BUILD_ROOT
from specrt.cli.options import progress
from specrt.engine.backends import backend_named
from specrt.errors import BuildError
from specrt.tuning.tuning_record import FILE_NAME, Tuning, read_record

if TYPE_CHECKING:
    from specrt_export.recipe import Recipe

_TUNING_S = 600


@click.command("build")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    help="Build for ort-cpu, ort-cuda, tensorrt or tensorrt-rtx instead of the recipe's backend, "
    "into engines/build/NAME-BACKEND where they differ; auto: the fastest that works here.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder of the bundle.  [default: engines/build/NAME]",
)
@click.option(
    "--no-tune",
    is_flag=True,
    help="Do not measure pass costs; they are measured where the bundle runs.",
)
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
    place = out or BUILD_ROOT / _folder(recipe, plan, backend)
    if if_stale and builder.is_fresh(plan, place):
        print(f"{place} is up to date")
        return
    began = time.monotonic()
    notes: list[str] = []
    with progress(f"build {plan.name}") as show:

        def follow(stage: str, share: float) -> None:
            if stage.startswith(_WARNING):
                notes.append(stage.removeprefix(_WARNING))
            else:
                show(share, stage)

        builder.build(plan, place, follow)
        if not no_tune:
            reason = _tuned_elsewhere(plan, place)
            if reason is None:
                show(0.98, "measure costs")
                _, reason = tune_quickly(place)
            notes += [reason] if reason else []
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    size = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    took = time.monotonic() - began
    print(
        f"built {place} ({size / 1e6:.1f} MB) in {took:.1f} s; look at it: specrt inspect {place}"
    )


def _estimate(plan: Recipe, bandwidth: float | None, as_json: bool) -> None:
    """Print what a recipe takes, and the tokens per second that memory allows."""
    from specrt.system import available_bytes, measure_bandwidth
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

_WARNING = "warning: "
"""Begins a stage of a build that is no stage but something to know."""


def _tuned_elsewhere(plan: Recipe, place: Path) -> str | None:
    """Return why a bundle is not tuned here: its engines need what this machine lacks."""
    lacks = filter(None, (backend_named(plan.backend_of(role)).missing() for role in plan.sources))
    missing = next(lacks, None)
    if missing is None:
        return None
    return f"not tuned here ({missing}); run `specrt tune {place}` where it will run"


def tune_quickly(bundle: Path) -> tuple[Tuning | None, str | None]:
    """Tune a bundle in a process of its own, and return the tuning, or why there is none.

    In a process of its own the engines have the threads that a user's will have, and a failure
    does not end the build. Never raises; leaves no half-written file.
    """
    command = [sys.executable, "-m", "specrt", "tune", "--quick", "--json", "--", str(bundle)]
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TUNING_S, check=False
        )
        if process.returncode == 0:
            return read_record(bundle / FILE_NAME), None
        message = process.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        reason = "".join(message).removeprefix("specrt: ")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    return None, f"{bundle} is not tuned: {reason or 'tuning ended without a message'}"


def _folder(path: Path, plan: Recipe, backend: str | None) -> str:
    """Return the name of the bundle's folder; --backend adds the backend where it differs."""
    from specrt_export.recipe import read_recipe

    own = backend is None or read_recipe(path).engine.backend == plan.engine.backend
    return plan.name if own else f"{plan.name}-{plan.engine.backend}"
