"""`specrt tune`: what passes cost on this machine, and which defaults are best for a bundle."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import click

from specrt.bundle import DEFAULT_BUNDLE, Bundle, Manifest, read_manifest
from specrt.cli.terminal import chart
from specrt.engine.backends import backend_named
from specrt.engine.protocol import Engine
from specrt.errors import BundleError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma
from specrt.system import this_machine
from specrt.text import read_prompts
from specrt.tuning.pass_timer import measure_costs
from specrt.tuning.sweep import check_prompts, plan_effort, spread, sweep
from specrt.tuning.tuning_record import FORMAT, Tuning, check_writable, read_tuning, write_tuning

_QUICK_S, _THOROUGH_S = 1.0, 8.0


@click.command("tune")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option(
    "--prompts",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="JSONL file to find the best defaults on; may be repeated.  "
    "[default: none, costs alone are measured]",
)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--quick", is_flag=True, help="Measure for seconds instead of a minute or two.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    owns_process: bool,
    bundle: Path,
    files: tuple[Path, ...],
    threads: int | None,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure what passes cost here, find the best drafter and gamma, keep both in BUNDLE.

    They hold for this machine, this number of threads and this build of the bundle; anywhere
    else they are ignored with a notice.
    """
    manifest = read_manifest(bundle)
    check_writable(bundle)
    texts = [prompt.text for file in files for prompt in read_prompts(file)]
    with load(bundle, threads=threads, owns_process=owns_process, prompt_cache=False) as generator:
        if generator.models.absent is not None:
            raise BundleError(f"{generator.models.absent}; free memory, and tune again")
        tuning = _measure(generator, _blank(manifest, threads, owns_process), texts, quick)
    if not texts:
        tuning = _keep_defaults(bundle, tuning)
    place = write_tuning(bundle, tuning)
    if as_json:
        print(json.dumps(public(tuning)))
        return
    show(tuning, manifest.batch)
    print(verdict(tuning, manifest))
    print(f"written to {place}")


def _keep_defaults(bundle: Path, tuning: Tuning) -> Tuning:
    """Carry over what prompts showed before, where that still holds: only costs are new."""
    before, _ = read_tuning(Bundle.open(bundle), tuning.threads)
    if before is None:
        return tuning
    return replace(
        tuning,
        fixed_gamma=before.fixed_gamma,
        drafter=before.drafter,
        settings=before.settings,
    )


def _blank(manifest: Manifest, threads: int | None, owns_process: bool) -> Tuning:
    """Return a record of where and when, without what."""
    return Tuning(
        format=FORMAT,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        source=manifest.source,
        machine=this_machine(backend_named(manifest.backend).library()),
        threads=threads or len(os.sched_getaffinity(0)),
        pools=1 if owns_process else 2,
        verify_ns=(),
        draft_ns=(),
        outside_ns=0,
        fixed_gamma=None,
        drafter="",
        settings=(),
    )


def _measure(generator: Generator, tuning: Tuning, texts: list[str], quick: bool) -> Tuning:
    """Fill in how the target must run, costs, and the best defaults where there are prompts."""
    models, tokenizer = generator.models, generator.tokenizer
    prompts = [tokenizer.encode(text) for text in texts]
    if prompts:
        check_prompts(prompts, models.target.max_length)
    budget_s = _QUICK_S if quick else _THOROUGH_S
    pad_to_even = _needs_even_widths(models.target)
    costs = measure_costs(models, tokenizer, budget_s=budget_s, progress=_progress("costs"))
    notices = [getattr(engine, "notices", ()) for engine in (models.target, models.draft)]
    for notice in dict.fromkeys(chain(*notices)):
        print(f"note: {notice}", file=sys.stderr)
    tuning = replace(
        tuning,
        verify_ns=tuple(map(round, costs.verify_ns)),
        draft_ns=tuple(map(round, costs.draft_ns)),
        outside_ns=round(costs.outside_ns),
        pad_to_even=pad_to_even,
    )
    if not prompts or len(models.gammas) < 2:
        return tuning
    effort = plan_effort(models, costs, len(prompts), quick=quick)
    settled = replace(models, measure=lambda _: costs)
    used = spread(prompts, effort.prompts)
    contest = sweep(settled, tokenizer, used, effort, _progress("settings"))
    best = contest.best()
    gamma = None if best.gamma == AUTO else best.gamma
    settings = contest.settings()
    return replace(tuning, fixed_gamma=gamma, drafter=best.drafter, settings=settings)


def _needs_even_widths(target: Engine) -> bool:
    """Measure whether the target's rows have the same bits only in passes of an even width."""
    if not getattr(target, "pad_single_token", False):
        return False
    from specrt.engine.ort_packed import settle_padding

    return settle_padding(target)


def _progress(what: str) -> Callable[[float], None]:
    def say(done: float) -> None:
        end = "\n" if done >= 1 else ""
        print(f"\rmeasuring {what} {done:4.0%}", end=end, file=sys.stderr, flush=True)

    return say if sys.stderr.isatty() else lambda done: None


def public(tuning: Tuning) -> dict[str, Any]:
    """Return a tuning as plain JSON types, with the rates that follow from its counts."""
    rows = [
        {
            **asdict(row),
            "gamma": row.gamma,
            "tokens_per_second": round(row.tokens_per_second, 2),
            "acceptance_rate": round(row.acceptance_rate, 4),
            "tokens_per_round": round(row.tokens_per_round, 4),
        }
        for row in tuning.settings
    ]
    return {**asdict(tuning), "gamma": tuning.gamma, "settings": rows}


def show(tuning: Tuning, rows: int = 1) -> None:
    """Print costs, of several rows too, and what every setting came to, as tables and bars."""
    from rich.console import Console

    machine, console = tuning.machine, Console()
    print(f"{machine.cpu}, {tuning.threads} threads, {machine.library}")
    console.print(_cost_table(tuning))
    if len(tuning.verify_ns) > len(tuning.draft_ns):
        console.print(_shared_table(tuning, rows))
    print(f"outside the engines: {tuning.outside_ns / 1e3:.0f} us a round")
    if tuning.settings:
        console.print(_settings_table(tuning), "")
        bars = [(row.drafter, f"{row.gamma}", row.tokens_per_second) for row in tuning.settings]
        print("tokens/s over gamma")
        print(chart(bars))


def _cost_table(tuning: Tuning) -> Any:
    costs = tuning.costs
    rows = [
        (
            f"{gamma}",
            f"{costs.draft(gamma) / 1e6:.2f}",
            f"{costs.verify(gamma) / 1e6:.2f}",
            f"{costs.round_ns(gamma) / 1e6:.2f}",
            f"{costs.round_ns(gamma) / costs.plain_ns:.2f}",
        )
        for gamma in range(len(tuning.draft_ns))
    ]
    return _table(("gamma", "draft ms", "verify ms", "round ms", "plain steps"), rows)


def _shared_table(tuning: Tuning, rows: int) -> Any:
    """Make a table of what rows that share passes cost, at gamma 0 and at the largest."""
    costs, most = tuning.costs, len(tuning.draft_ns) - 1
    found = [
        (f"{n}", *(f"{costs.verify(n * (g + 1) - 1) / 1e6:.2f}" for g in (0, most)))
        for n in range(1, rows + 1)
    ]
    return _table(("rows", "verify ms at gamma 0", f"at gamma {most}"), found)


def _settings_table(tuning: Tuning) -> Any:
    """Make a table of drafters over gammas: tokens per second, and how many times plain that is."""
    plain, *rest = tuning.settings
    drafters = list(dict.fromkeys(row.drafter for row in rest))
    cells: dict[Gamma, dict[str, str]] = {}
    for row in rest:
        gain = row.tokens_per_second / plain.tokens_per_second
        cell = f"{row.tokens_per_second:.0f} ({gain:.2f}x)"
        cells.setdefault(row.gamma, {})[row.drafter] = cell
    rows = [("0", *[f"{plain.tokens_per_second:.0f} (1.00x)"] * len(drafters))]
    rows += [(f"{g}", *(found.get(d, "") for d in drafters)) for g, found in cells.items()]
    return _table(("gamma", *drafters), rows)


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def verdict(tuning: Tuning, manifest: Manifest) -> str:
    """Say in words what the defaults are now."""
    if not tuning.settings:
        return "costs alone were measured; --prompts FILE also finds the best drafter and gamma"
    plain = tuning.settings[0].tokens_per_second
    best = next(
        row.tokens_per_second
        for row in tuning.settings
        if (row.drafter, row.gamma) == (tuning.drafter, tuning.gamma)
    )
    text = (
        f"best: drafter {tuning.drafter}, gamma {tuning.gamma}: {best / plain:.2f} times plain "
        f"decoding ({best:.0f} against {plain:.0f} tokens/s)"
    )
    if manifest.gamma is not None and manifest.gamma != tuning.gamma:
        text += f"; the recipe names gamma {manifest.gamma}, which stays the default"
    return text
