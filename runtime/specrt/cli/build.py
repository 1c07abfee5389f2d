"""`specrt build`: builds a bundle from a recipe, and tunes it."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrt.bundle import BUILD_ROOT, read_manifest
from specrt.cli.names import checkpoint_source, fetch_sources, ready_recipe
from specrt.cli.options import is_checkpoint, print_notices, progress
from specrt.cli.quality_facts import quality_lines
from specrt.doctor import check_exporter
from specrt.engine.backends import backend_named, notices
from specrt.errors import BuildError, RecipeError, SpecrtError, how_to_install, shortage
from specrt.held_file import check_place, read_file, replacing
from specrt.system.memory import size
from specrt.tuning.tuning_record import FILE_NAME, Tuning, read_record

if TYPE_CHECKING:
    from specrt_export.plan.build_plan import BuildPlan
    from specrt_export.recipe.recipe import Recipe

_TUNING_S = 600


@click.command("build")
@click.argument("recipes", metavar="[RECIPE...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--target",
    metavar="CHECKPOINT",
    help="Build without a recipe: a folder, a GGUF file, org/name of the hub, or org/name:Q8_0 for "
    "one GGUF file there.",
)
@click.option(
    "--draft",
    metavar="CHECKPOINT",
    help="With --target: what drafts for it; mtp: the head in its own checkpoint, which is also "
    "found; none: lookup alone.",
)
@click.option(
    "--precision",
    help="With --target: what weights are stored as where checkpoints hold floats: fp32, fp16, "
    "bf16, int8 or int4.  [default: fp32; those of a quantized checkpoint stay as they are]",
)
@click.option(
    "--calibration",
    type=click.Path(),
    metavar="F",
    help="With --precision int8 or int4: a text, or JSON lines with prompts, to measure on.",
)
@click.option(
    "--max-length",
    type=click.IntRange(min=2),
    help="With --target: positions of prompt and completion together.  [default: 2048, or what "
    "both were trained for]",
)
@click.option(
    "--weight-only",
    is_flag=True,
    default=None,
    help="With --target: keep the weights of checkpoints that quantize activations, too, and "
    "compute those in floats.",
)
@click.option(
    "--write-recipe",
    type=click.Path(path_type=Path),
    metavar="F",
    help="With --target: write the recipe that does the same, and build it.",
)
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
    recipes: tuple[Path, ...], target: str | None, backend: str | None, out: Path | None,
    no_tune: bool, if_stale: bool, dry_run: bool, bandwidth: float | None, as_json: bool,
    write_recipe: Path | None, **pair: Any,
) -> None:  # fmt: skip
    """Build the bundle of each RECIPE, or of checkpoints (default place: engines/build/NAME).

    A RECIPE is a file, or the name of a pair that `specrt list` lists.
    """
    recipes = tuple(ready_recipe(str(recipe)) or recipe for recipe in recipes)
    if not dry_run and (as_json or bandwidth is not None):
        raise click.UsageError("--bandwidth and --json belong to --dry-run; add it")
    for name in ("target", "draft", "calibration"):
        if {"target": target, **pair}[name] == "":
            raise click.UsageError(f"--{name} is ''; expected a name, or leave it out")
    asked = {**pair, "write_recipe": write_recipe}
    _check_sources(recipes, target, [name for name, value in asked.items() if value is not None])
    if out is not None and len(recipes) > 1:
        raise click.UsageError(f"--out is the place of one bundle, and {len(recipes)} are named")
    with installed():
        if target is not None:
            from specrt_export.recipe.recipe_tables import EngineOptions

            if not dry_run:
                check_exporter()
            _check_place(write_recipe)
            with named_by_flags(write_recipe):
                named = {**pair, "draft": pair["draft"] and checkpoint_source(pair["draft"])}
                source = checkpoint_source(target)
                plan, text = pair_recipe(source, write_recipe, backend=backend, **named)
            _check_kept(text, write_recipe)
            plans = [(plan, _folder(plan, EngineOptions.backend))]
        else:
            plans = [_read(recipe, backend) for recipe in recipes]
        for plan, name in plans:
            with named_by_flags(write_recipe) if target is not None else nullcontext():
                if dry_run:
                    _estimate(plan, bandwidth, as_json)
                else:
                    _build(plan, out or BUILD_ROOT / name, no_tune, if_stale)
    if target is not None:
        _keep(text, write_recipe, shown=not as_json)


@contextmanager
def installed() -> Iterator[None]:
    """Say how to install what building needs, where that is missing."""
    try:
        yield
    except ImportError as error:
        raise BuildError(
            f"building needs {error.name}; install it with `{how_to_install('build')}`"
        ) from None


_KEYS = (
    r"\b(?:engine|target|draft|quality)\.(backend|precision|max_length|calibration|weight_only)\b"
)
"""What --target writes into a recipe, besides the checkpoints, from options of these names."""


@contextmanager
def named_by_flags(recipe: Path | None, target: str = "--target") -> Iterator[None]:
    """Name in errors the options that were typed, not the keys of the recipe they stand for."""
    from specrt_export.recipe.pair import UNWRITTEN

    models = {"target": target, "draft": "--draft"}
    try:
        yield
    except SpecrtError as error:
        said = str(error).removeprefix(f"{recipe or UNWRITTEN}: ")
        said = re.sub(r"^(target|draft)(?=: )", lambda role: models[role[1]], said)
        said = re.sub(r"\b(target|draft)\.checkpoint\b", lambda role: models[role[1]], said)
        said = re.sub(_KEYS, lambda key: f"--{key[1].replace('_', '-')}", said)
        error.args = (said,)
        raise


def _check_sources(recipes: tuple[Path, ...], target: str | None, of_target: list[str]) -> None:
    """Refuse recipes next to checkpoints, neither of them, and one in place of the other.

    `of_target` are the options given that belong to --target.
    """
    if target is None and of_target:
        option = f"--{of_target[0].replace('_', '-')}"
        instead = "the recipe says it" if recipes else "name a checkpoint with --target"
        raise click.UsageError(f"{option} belongs to --target; {instead}")
    if target is None and not recipes:
        raise click.UsageError("name a RECIPE, or a checkpoint with --target")
    if target is not None and recipes:
        raise click.UsageError(f"{recipes[0]} is a recipe, and --target is given; give one of them")
    for recipe in recipes:
        if is_checkpoint(recipe):
            raise click.UsageError(f"{recipe} is a checkpoint, no recipe; name it with --target")


def pair_recipe(
    target: str, file: Path | None = None, *, draft: str | None = None, backend: str | None = None,
    precision: str | None = None, calibration: str | None = None, max_length: int | None = None,
    weight_only: bool | None = None,
) -> tuple[Recipe, str]:  # fmt: skip
    """Return the recipe of checkpoints, to lie in a file where one is given, and its text.

    Raises: CheckpointError, RecipeError.
    """
    from specrt_export.recipe.pair import CheckpointPair

    pair = CheckpointPair(
        target, draft or "", precision or "", backend or "", max_length or 0, calibration or "",
        bool(weight_only),
    )  # fmt: skip
    return pair.recipe(file)


def _check_place(file: Path | None) -> None:
    """Refuse, before any work, a recipe that cannot be written.

    Raises: BuildError.
    """
    with _writing(file):
        if file is not None:
            check_place(file)


def _check_kept(text: str, file: Path | None) -> None:
    """Refuse, before any work, a file that is there and is not the recipe.

    Raises: BuildError.
    """
    if file is None or not os.path.lexists(file):
        return
    with _writing(file):
        same = read_file(file) == text.encode()
    if not same:
        raise BuildError(
            f"{file} is there and says something else; name another file with --write-recipe, or "
            "remove it"
        )


def _keep(text: str, file: Path | None, *, shown: bool) -> None:
    """Write a recipe; show it where no file is named.

    Raises: BuildError.
    """
    if file is None:
        if shown:
            print(f"# the recipe of this build; --write-recipe FILE keeps it\n{text}", flush=True)
        return
    with _writing(file), replacing(file) as kept:
        kept.write(text.encode())
    print(f"wrote {file}")


@contextmanager
def _writing(file: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"{file} cannot be written ({error.strerror}); name another file with --write-recipe"
        ) from error


def _read(recipe: Path, backend: str | None) -> tuple[Recipe, str]:
    """Return a recipe, and the name of its bundle's folder."""
    from specrt_export.checkpoint.ready_recipes import ready_recipes
    from specrt_export.recipe.recipe import read_recipe

    near = get_close_matches(str(recipe), ready_recipes(), n=1)
    if near and not recipe.exists():
        raise RecipeError(f"{recipe} does not exist; did you mean {near[0]!r}?")
    plan = read_recipe(recipe, backend=backend)
    own = plan if backend is None else read_recipe(recipe)
    return plan, _folder(plan, own.engine.backend)


def _build(plan: Recipe, place: Path, no_tune: bool, if_stale: bool) -> None:
    """Build and tune one bundle, and say so."""
    began = time.monotonic()
    found = build_bundle(plan, place, no_tune=no_tune, if_stale=if_stale)
    if found is None:
        print(f"{place} is up to date")
        return
    print_notices(found)
    total = sum(p.stat().st_size for p in place.rglob("*") if p.is_file())
    took = time.monotonic() - began
    for line in quality_lines(read_manifest(place)):
        print(line)
    print(f"built {place} ({size(total)}) in {took:.1f} s; look at it: specrt inspect {place}")


def build_bundle(
    recipe: Recipe, place: Path, *, no_tune: bool = False, if_stale: bool = False
) -> list[str] | None:
    """Build and tune a bundle; return its notices, or None where it was up to date.

    Raises: SpecrtError; what was there is there then.
    """
    from specrt_export import builder
    from specrt_export.plan.build_plan import resolve

    fetch_sources(recipe)
    plan = resolve(recipe, place)
    fresh = if_stale and plan.is_fresh()
    reason = None if no_tune else _tuned_elsewhere(plan)
    # One whose build was interrupted while costs were measured is whole, but for them.
    if fresh and (no_tune or reason is not None or (place / FILE_NAME).exists()):
        return None
    with progress(f"build {plan.name}") as show:
        if not fresh:
            builder.build(plan, lambda stage, share: show(share, stage))
        if not no_tune and reason is None:
            show(0.98, "measure costs")
            _, reason = tune_quickly(place)
    slower = [] if fresh else notices(read_manifest(place))
    return [*slower, *([reason] if reason else [])]


def _estimate(plan: Recipe, bandwidth: float | None, as_json: bool) -> None:
    """Print what a recipe takes, and the tokens per second that memory allows."""
    from specrt.system.memory import available_bytes, measure_bandwidth
    from specrt_export.estimate.estimate import estimate

    if bandwidth is not None and not 0 < bandwidth < math.inf:
        raise click.UsageError(f"--bandwidth is {bandwidth}; expected GB/s, more than 0")
    found = estimate(plan)
    here = plan.models["target"].spec.on_cpu
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


def _tuned_elsewhere(plan: BuildPlan) -> str | None:
    """Return why a bundle is not tuned here: its engines need what this machine lacks."""
    lacks = filter(None, (backend_named(m.options.backend).missing() for m in plan.models))
    missing = next(lacks, None)
    if missing is None:
        return None
    return f"not tuned here ({missing}); run `specrt tune {plan.out}` where it will run"


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


def _folder(plan: Recipe, usual: str) -> str:
    """Return the name of the bundle's folder; a backend that is not the usual one is added."""
    backend = plan.engine.backend
    return plan.name if backend == usual else f"{plan.name}-{backend}"
