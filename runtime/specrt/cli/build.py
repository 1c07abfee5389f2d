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

from specrt.bundle import BUILD_ROOT, read_manifest
from specrt.cli.options import print_notices, progress
from specrt.engine.backends import backend_named, notices
from specrt.errors import BuildError, how_to_install, shortage
from specrt.system.memory import size
from specrt.tuning.tuning_record import FILE_NAME, Tuning, read_record

if TYPE_CHECKING:
    from specrt_export.recipe import Recipe

_TUNING_S = 600


@click.command("build")
@click.argument("recipes", metavar="RECIPE...", nargs=-1, required=True,
                type=click.Path(path_type=Path))  # fmt: skip
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
    help="Do not measure pass costs; gamma auto then begins with assumed ones.",
)
@click.option("--if-stale", is_flag=True, help="Do nothing when the bundle is up to date.")
@click.option(
    "--dry-run", is_flag=True, help="Build nothing; say what memory it takes and what limits it."
)
@click.option("--bandwidth", type=float, help="With --dry-run: GB/s of the memory it will run in.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
def command(
    recipes: tuple[Path, ...], backend: str | None, out: Path | None, no_tune: bool,
    if_stale: bool, dry_run: bool, bandwidth: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Build the bundle of each RECIPE (default place: engines/build/NAME)."""
    if not dry_run and (as_json or bandwidth is not None):
        raise click.UsageError("--bandwidth and --json belong to --dry-run; add it")
    if out is not None and len(recipes) > 1:
        raise click.UsageError(f"--out is the place of one bundle, and {len(recipes)} are named")
    for recipe in recipes:
        _one(recipe, backend, out, no_tune, if_stale, dry_run, bandwidth, as_json)


def _one(
    recipe: Path, backend: str | None, out: Path | None, no_tune: bool, if_stale: bool,
    dry_run: bool, bandwidth: float | None, as_json: bool,
) -> None:  # fmt: skip
    """Build the bundle of one recipe, or say what it takes."""
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
            f"building needs {error.name}; install it with `{how_to_install('build')}`"
        ) from None
    place = out or BUILD_ROOT / _folder(recipe, plan, backend)
    fresh = if_stale and builder.is_fresh(plan, place)
    reason = None if no_tune else _tuned_elsewhere(plan, place)
    # One whose build was interrupted while costs were measured is whole, but for them.
    if fresh and (no_tune or reason is not None or (place / FILE_NAME).exists()):
        print(f"{place} is up to date")
        return
    began = time.monotonic()
    with progress(f"build {plan.name}") as show:
        if not fresh:
            builder.build(plan, place, lambda stage, share: show(share, stage))
        if not no_tune and reason is None:
            show(0.98, "measure costs")
            _, reason = tune_quickly(place)
    slower = [] if fresh else notices(read_manifest(place))
    print_notices([*slower, *([reason] if reason else [])])
    total = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    took = time.monotonic() - began
    print(f"built {place} ({size(total)}) in {took:.1f} s; look at it: specrt inspect {place}")


def _estimate(plan: Recipe, bandwidth: float | None, as_json: bool) -> None:
    """Print what a recipe takes, and the tokens per second that memory allows."""
    from specrt.system.memory import available_bytes, measure_bandwidth
    from specrt_export.estimate import estimate
    from specrt_export.recipe import COMPILERS

    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise click.UsageError(f"--bandwidth is {bandwidth}; expected GB/s, more than 0")
    found = estimate(plan)
    here = COMPILERS[plan.backend_of("target")].on_cpu
    speed = bandwidth * 1e9 if bandwidth else None
    told = f"{bandwidth:.1f} GB/s of memory, as given" if bandwidth else ""
    if speed is None and here:
        measured = measure_bandwidth(len(os.sched_getaffinity(0)))
        speed, told = measured.bytes_per_second, str(measured)
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
        f"{told};\nat that rate up to {rates[0]:.1f} tokens/s in plain decoding, {rates[1]:.1f} "
        "with all positions filled; a round checks its draft in one step"
    )


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
        reason = "; ".join(filter(None, (str(error), shortage(error))))
    return None, f"{bundle} is not tuned: {reason or 'tuning ended without a message'}"


def _folder(path: Path, plan: Recipe, backend: str | None) -> str:
    """Return the name of the bundle's folder; --backend adds the backend where it differs."""
    from specrt_export.recipe import read_recipe

    own = backend is None or read_recipe(path).engine.backend == plan.engine.backend
    return plan.name if own else f"{plan.name}-{plan.engine.backend}"
