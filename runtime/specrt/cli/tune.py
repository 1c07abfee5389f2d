"""`specrt tune`: measures pass costs on this machine, and the best defaults of a bundle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from specrt.bundle import Bundle, Manifest, read_manifest
from specrt.cli.cache import bundle_argument
from specrt.cli.options import InputFile, print_notices, progress, table
from specrt.engine.backends import backend_named
from specrt.errors import BundleError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO
from specrt.records import LONGEST_TEXT
from specrt.system.machine import this_machine
from specrt.text.prompt_file import read_prompts
from specrt.tuning.pass_timer import measure_costs
from specrt.tuning.sweep import (
    FEWEST_PROMPTS,
    QUICK_SWEEP_S,
    SWEEP_S,
    check_prompts,
    plan_effort,
    spread,
    sweep,
)
from specrt.tuning.tuning_record import FORMAT, Tuning, check_writable, read_tuning, write_tuning

_QUICK_S, _THOROUGH_S = 1.0, 8.0


@click.command("tune")
@bundle_argument
@click.option(
    "--prompts",
    "files",
    type=InputFile(),
    multiple=True,
    help='JSONL file of prompts, as {"prompt": "TEXT"}, to compare drafters and gammas on; may be '
    "repeated.  [default: none; only costs are measured]",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    help=f"Use at most N of the prompts, spread over all; {FEWEST_PROMPTS} are needed.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--quick", is_flag=True, help="Measure for seconds rather than minutes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    owns_process: bool,
    bundle: Path,
    files: tuple[Path, ...],
    limit: int | None,
    threads: int | None,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure pass costs and find the best drafter and gamma; store them in BUNDLE.

    Costs take seconds, comparing settings on prompts a few minutes, or longer where a target is
    slow or other programs run; the line of progress says how long is left. They hold for this
    machine, this number of threads and this build of the bundle; elsewhere they are ignored, with a
    notice.
    """
    manifest = read_manifest(bundle)
    check_writable(bundle)
    texts = [prompt.text for file in files for prompt in read_prompts(file)]
    texts = spread(texts, min(limit or len(texts), len(texts)))
    with load(
        bundle, threads=threads, owns_process=owns_process, prompt_cache=False, text_memory_bytes=0
    ) as generator:
        if generator.models.absent is not None:
            raise BundleError(f"{generator.models.absent}; free memory, and tune again")
        with progress("tune", steady=True) as show:
            tuning = _measure(
                generator, _blank(manifest, threads, owns_process), texts, quick, show
            )
    if not texts:
        tuning = _with_defaults(bundle, tuning)
    place = write_tuning(bundle, tuning)
    if as_json:
        print(json.dumps(public(tuning)))
        return
    print_tables(tuning, manifest.batch)
    print(verdict(tuning, manifest))
    print(f"written to {place}")


def _with_defaults(bundle: Path, tuning: Tuning) -> Tuning:
    """Add the best defaults of an earlier tuning with prompts, where it still holds."""
    before, _ = read_tuning(Bundle.open(bundle), tuning.threads)
    if before is None:
        return tuning
    return replace(
        tuning, fixed_gamma=before.fixed_gamma, drafter=before.drafter, settings=before.settings
    )


def _blank(manifest: Manifest, threads: int | None, owns_process: bool) -> Tuning:
    """Return a record of place and time, without measurements."""
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


def _measure(
    generator: Generator,
    tuning: Tuning,
    texts: list[str],
    quick: bool,
    show: Callable[[float, str], None],
) -> Tuning:
    """Fill in the costs, and the best defaults where there are prompts."""
    models, tokenizer = generator.models, generator.tokenizer
    if texts:
        generator.reader.require_text("leave --prompts out")
    prompts = [generator.reader.tokens(text) for text in texts]
    if prompts:
        check_prompts([*map(generator.reader.first_tokens, prompts)], models.target.max_length)
    budget_s = _QUICK_S if quick else _THOROUGH_S
    compares = bool(prompts) and len(models.gammas) > 1
    sweep_s = (QUICK_SWEEP_S if quick else SWEEP_S) if compares else 0
    part, stage = budget_s / (budget_s + sweep_s), f"costs, about {budget_s:.0f} s"
    if compares:
        stage += f", then settings, about {sweep_s} s"
    show(0.0, stage)
    costs = measure_costs(
        models, tokenizer, budget_s=budget_s, progress=lambda share: show(part * share, stage)
    )
    graphs = models.cuda_graphs
    print_notices(graphs.refusals if graphs else ())
    tuning = replace(
        tuning,
        verify_ns=tuple(map(round, costs.verify_ns)),
        draft_ns=tuple(map(round, costs.draft_ns)),
        outside_ns=round(costs.outside_ns),
        cuda_graphs=graphs and replace(graphs, refusals=tuple(map(_recorded, graphs.refusals))),
    )
    if not compares:
        return tuning
    effort = plan_effort(models, costs, len(prompts), quick=quick)
    settings = f"{len(effort.candidates)} settings on {effort.prompts} prompts"
    show(part, settings)
    result = sweep(
        replace(models, costs=costs),
        tokenizer,
        spread(prompts, effort.prompts),
        effort,
        lambda share: show(part + (1 - part) * share, settings),
    )
    best = result.best()
    gamma = None if best.gamma == AUTO else best.gamma
    return replace(tuning, fixed_gamma=gamma, drafter=best.drafter, settings=result.settings())


def _recorded(text: str) -> str:
    """Return a sentence as a record may hold it."""
    return "".join(c if c.isprintable() else " " for c in text)[:LONGEST_TEXT]


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


def print_tables(tuning: Tuning, rows: int = 1) -> None:
    """Print the costs, shared passes included, and the rate of every setting."""
    machine, costs, most = tuning.machine, tuning.costs, len(tuning.draft_ns) - 1
    print(f"{machine.cpu}, {tuning.threads} threads, {machine.library}")
    rounds = [
        (
            f"{gamma}",
            f"{costs.draft(gamma) / 1e6:.2f}",
            f"{costs.verify(gamma) / 1e6:.2f}",
            f"{costs.round_ns(gamma) / 1e6:.2f}",
            f"{costs.round_ns(gamma) / costs.plain_ns:.2f}",
        )
        for gamma in range(most + 1)
    ]
    print(table(("gamma", "draft ms", "verify ms", "round ms", "plain steps"), rounds))
    print("plain steps: what a round costs in steps of plain decoding; it pays with more tokens")
    if len(tuning.verify_ns) > len(tuning.draft_ns):
        shared = [
            (f"{n}", *(f"{costs.verify(n * (g + 1) - 1) / 1e6:.2f}" for g in (0, most)))
            for n in range(1, rows + 1)
        ]
        print(table(("rows", "verify ms at gamma 0", f"at gamma {most}"), shared))
    print(f"outside the engines: {tuning.outside_ns / 1e3:.0f} us a round")
    if tuning.settings:
        plain = tuning.settings[0].tokens_per_second
        settings = [
            (
                f"{each.gamma}",
                each.drafter,
                f"{each.tokens_per_second:.0f}",
                f"{each.tokens_per_second / plain:.2f}",
                f"{each.acceptance_rate:.2f}" if each.drafted else "",
            )
            for each in tuning.settings
        ]
        print(table(("gamma", "drafter", "tokens/s", "speedup", "acceptance rate"), settings))


def verdict(tuning: Tuning, manifest: Manifest) -> str:
    """Return in words what the defaults are now."""
    if not tuning.settings:
        return "only costs were measured; --prompts FILE also finds the best drafter and gamma"
    plain = tuning.settings[0].tokens_per_second
    chosen = next(
        row.tokens_per_second
        for row in tuning.settings
        if (row.drafter, row.gamma) == (tuning.drafter, tuning.gamma)
    )
    text = (
        f"best: drafter {tuning.drafter}, gamma {tuning.gamma}: {chosen / plain:.2f} times plain "
        f"decoding ({chosen:.0f} against {plain:.0f} tokens/s)"
    )
    if tuning.gamma == AUTO and any(row.tokens_per_second > chosen for row in tuning.settings):
        text += "; a fixed gamma is taken only where it is clearly faster, on most of the prompts"
    if manifest.gamma is not None and manifest.gamma != tuning.gamma:
        text += f"; the recipe names gamma {manifest.gamma}, which stays the default"
    return text
