"""`specrt align`: trains a draft on traces of its target, and tells what that is worth."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrt.bundle import BUILD_ROOT, FILE_NAME, Bundle
from specrt.cli.options import progress, table
from specrt.doctor import check_exporter
from specrt.errors import BuildError, how_to_install
from specrt.tuning.tuning_record import read_tuning

if TYPE_CHECKING:
    from specrt_export.align.alignment import Outcome
    from specrt_export.align.prediction import MeasuredCosts, Prediction
    from specrt_export.plan.build_plan import BuildPlan

SLOWER = 1
"""Exit status where the new draft would make decoding no faster."""

_LEAST_ENTRIES = 16


@click.command("align")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--traces", type=click.Path(file_okay=False, path_type=Path), required=True,
              help="Folder that `specrt collect` wrote.")  # fmt: skip
@click.option("--kind", type=click.Choice(("draft", "head", "layers")), default="draft",
              show_default=True,
              help="draft goes on training the recipe's draft model; head its EAGLE-3 head, or a "
              "new one; layers makes a draft model of some of the target's own layers.",
              )  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True,
              help="Folder of the checkpoint, for `checkpoint` in [draft].")  # fmt: skip
@click.option("--bundle", type=click.Path(path_type=Path),
              help="Bundle of the recipe, tuned on this machine, for what passes cost.  [default: "
              "engines/build/NAME, if there]")  # fmt: skip
@click.option("--trim-vocab", "entries", metavar="N",
              help="Keep the draft's likeliest entries alone, as 2k; faster, and never wrong.",
              )  # fmt: skip
@click.option("--depth", type=click.IntRange(min=1), default=None,
              help="With --kind layers: how many.  [default: a quarter of the target's]",
              )  # fmt: skip
@click.option("--reads", metavar="N,N,N",
              help="With --kind head: the target's layers whose inputs a new head reads.  "
              "[default: an early, a middle and a late one]")  # fmt: skip
@click.option("--drafter", type=click.Choice(("model", "cascade")), default="model",
              show_default=True,
              help="What the draft is for: model, to draft every round; cascade, to draft what "
              "lookup leaves. It is trained and judged for that.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(min=0), default=30.0, show_default=True,
              help="How long to train; 0 trains nothing.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1),
              help="Train so many steps instead of minutes.")  # fmt: skip
@click.option("--loss", type=click.Choice(("lk_hybrid", "kl", "tv", "nla")), default="lk_hybrid",
              show_default=True, help="What training makes small; docs/align.md.")  # fmt: skip
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True, max=1),
              default=1e-3, show_default=True, help="At its peak.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True,
              help="Of the order of texts and of new weights.")  # fmt: skip
def command(
    recipe: Path,
    traces: Path,
    kind: str,
    out: Path,
    bundle: Path | None,
    entries: str | None,
    depth: int | None,
    reads: str | None,
    drafter: str,
    minutes: float,
    steps: int | None,
    loss: str,
    learning_rate: float,
    seed: int,
) -> int:
    """Train a draft for the target of RECIPE on traces of what that wrote.

    A tenth of the texts is held out; what the draft before and the new one are worth on them is
    printed, by domain. A draft that would be no faster is not written (exit status 1). A run that
    was stopped goes on where it was when the same command is given again.
    """
    kept = _entries(entries)
    read = _numbers(reads)
    with _installed():
        from specrt_export.align.alignment import RECORD, Alignment, AlignmentOptions
        from specrt_export.align.trainer import TrainingOptions
        from specrt_export.plan.build_plan import resolve
        from specrt_export.recipe.recipe import read_recipe

        _check_place(out, RECORD)
        named = read_recipe(recipe)
        plan = resolve(replace(named, seeks_head=False), BUILD_ROOT / named.name)
        costs, whose = _costs(plan, bundle)
        training = TrainingOptions(loss, minutes, steps or 0, learning_rate, seed=seed)
        options = AlignmentOptions(kind, depth or 0, read, kept,
            drafter, training,
        )  # fmt: skip
        alignment = Alignment(plan, traces, options, costs, out.with_name(f"{out.name}.state"))
        index = alignment.index
        print(
            f"{traces}: {index.texts} answers, {index.tokens} tokens of {index.name}; "
            f"{len(alignment.held)} are held out",
            flush=True,
        )
        with progress(f"align {plan.name}") as show:
            source, outcome = alignment.run(show)
        _show(outcome, whose)
        if not outcome.faster:
            print(
                f"not written: {outcome.after[0].speed:.1f} is no faster than "
                f"{outcome.before[0].speed:.1f}; the same command with more "
                f"--{'steps' if steps else 'minutes'} goes on"
            )
            return SLOWER
        alignment.write(source, outcome, out)
    there = json.dumps(os.path.relpath(out.resolve(), recipe.parent.resolve()), ensure_ascii=False)
    print(f"wrote {out}; build with it: `checkpoint = {there}` in [draft] of {recipe}")
    return 0


@contextmanager
def _installed() -> Iterator[None]:
    """Refuse, before any work, what lacks a library that training needs.

    Raises: BuildError.
    """
    remedy = how_to_install("align")
    if find_spec("matplotlib") is None:
        raise BuildError(f"aligning needs matplotlib; install it with `{remedy}`")
    check_exporter()
    try:
        yield
    except ImportError as error:
        raise BuildError(f"aligning needs {error.name}; install it with `{remedy}`") from None


def _check_place(out: Path, record: str) -> None:
    """Refuse a place that holds anything but an earlier draft of this command.

    Raises: BuildError.
    """
    replaceable = out.is_dir() and ((out / record).is_file() or not any(out.iterdir()))
    if os.path.lexists(out) and (out.is_symlink() or not replaceable):
        raise BuildError(
            f"{out} is there and no draft that `specrt align` wrote; name another folder with "
            "--out, or remove it"
        )
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise BuildError(f"{above} may not be written to; name another folder with --out")


def _entries(text: str | None) -> int:
    """Read a number of entries, such as 2k for 2,048; 0 for none."""
    if text is None:
        return 0
    number, factor = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not number.isdecimal() or int(number) * factor < _LEAST_ENTRIES:
        raise click.UsageError(
            f"--trim-vocab is {text!r}; expected a number of entries, {_LEAST_ENTRIES} or more, "
            "such as 2000 or 2k"
        )
    return int(number) * factor


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise click.UsageError(f"--reads is {text!r}; expected numbers of layers, as 2,12,21")
    return tuple(map(int, parts))


def _costs(plan: BuildPlan, named: Path | None) -> tuple[MeasuredCosts | None, str]:
    """Return what passes cost here, and whose they are.

    Raises: BundleError, BuildError for a bundle that was named and tells none.
    """
    place = named or plan.out
    if named is None and not (place / FILE_NAME).is_file():
        return None, "steps of the target; no bundle tells what passes cost here"
    bundle = Bundle.open(place)
    tuning, ignored = read_tuning(bundle, len(os.sched_getaffinity(0)))
    if tuning is None:
        reason = ignored or f"{place} is not tuned; run `specrt tune {place}`"
        if named is not None:
            raise BuildError(reason)
        return None, f"steps of the target ({reason})"
    from specrt_export.align.prediction import MeasuredCosts

    weights = bundle.manifest.target.parameters
    return MeasuredCosts(tuning.costs, weights), f"tokens/s, by the costs of {place}"


def _show(outcome: Outcome, whose: str) -> None:
    """Print what there was and what there is, by domain."""
    before = {one.domain: one for one in outcome.before}
    rows = []
    for after in outcome.after:
        domain = after.domain or "all"
        rows.append([domain, str(after.texts), "before", *_cells(before[after.domain])])
        rows.append(["", "", "after", *_cells(after)])
    most = max(len(one.accepted) for one in (*outcome.before, *outcome.after))
    positions = [f"token {at + 1}" for at in range(most)]
    columns = ["domain", "texts", "", *positions, "a round", "speed", "gamma"]
    rows = [_filled(row, len(columns)) for row in rows]
    print(table(columns, rows, left=1))
    print(
        "token N: accepted, of all rounds; a round: tokens of one at the gamma that is fastest; "
        f"speed: {whose}"
    )


def _cells(one: Prediction) -> list[str]:
    rates = [f"{share:.2f}" for share in one.accepted]
    return [*rates, f"{one.tokens_per_round[one.gamma]:.2f}", f"{one.speed:.4g}", str(one.gamma)]


def _filled(row: Sequence[str], columns: int) -> list[str]:
    """Return a row in which a draft of fewer positions has empty cells after them."""
    return [*row[:-3], *[""] * (columns - len(row)), *row[-3:]]
