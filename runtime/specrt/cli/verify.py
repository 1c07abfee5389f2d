"""`specrt verify`: proof, on your prompts, that speculation changes no token."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from specrt.bench.lossless import FP32_TOLERANCE, LosslessReport, compare, default_drafter
from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.options import parse_gammas
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma
from specrt.speculation.drafters import available_drafters
from specrt.text import read_prompts


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL file.")
@click.option("--limit", type=click.IntRange(min=1), help="How many prompts, from the first.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--gammas", help="Gammas to compare with plain decoding.  [default: all built, and auto]"
)
@click.option("--drafter", type=click.Choice(available_drafters(has_model=True)),
              help="What drafts.  [default: the draft model, or lookup without one]")  # fmt: skip
@click.option("--tolerance", default=FP32_TOLERANCE, show_default=True,
              help="Margin, in logits, up to which a divergence counts as a near-tie.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    owns_process: bool,
    bundle: Path,
    prompts: Path,
    limit: int | None,
    max_tokens: int,
    gammas: str | None,
    drafter: str | None,
    tolerance: float,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare greedy output at every gamma with plain decoding, token for token.

    Exit status 1 when a divergence is larger than rounding explains, 2 when nothing was drafted.
    """
    texts = [p.text for p in read_prompts(prompts)[:limit]]
    with load(bundle, threads=threads, owns_process=owns_process) as generator:
        for notice in generator.notices:
            print(f"note: {notice}", file=sys.stderr)
        compared = _above_0(gammas, generator)
        drafter = drafter or default_drafter(generator)
        report = _compare(generator, texts, compared, max_tokens, tolerance, drafter)
    if not report.drafted and not report.unexplained:
        raise RequestError(
            f"drafter {drafter!r} drafted nothing at gamma {_listed(compared)}, so nothing was "
            "verified; give longer prompts, more --max-tokens, or another --drafter"
        )
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _show(report, compared)
    return 1 if report.unexplained else 0


def _above_0(gammas: str | None, generator: Generator) -> list[Gamma]:
    """Return the gammas to hold to plain decoding."""
    built = generator.models.gammas
    asked: list[Gamma] = [*built, AUTO] if len(built) > 1 else []
    compared = [g for g in (asked if gammas is None else parse_gammas(gammas)) if g]
    if not compared:
        raise RequestError("there is nothing to compare: no gamma above 0 is built or asked for")
    return compared


def _compare(generator: Generator, texts: list[str], *how: Any) -> LosslessReport:
    """Compare, and tell a person who waits how far it is."""
    report, watched = LosslessReport(), sys.stderr.isatty()
    for report in compare(generator, texts, *how):
        if watched:
            print(f"\r{report.prompts}/{len(texts)} prompts", end="", file=sys.stderr)
    if watched:
        print(file=sys.stderr)
    return report


def _listed(gammas: list[Gamma]) -> str:
    return ", ".join(map(str, gammas))


def _show(report: LosslessReport, gammas: list[Gamma]) -> None:
    for d in report.divergences:
        verdict = "a near-tie" if d.explained else "NOT EXPLAINED by rounding"
        print(
            f"prompt {d.prompt}, gamma {d.gamma}, token {d.position}: plain {d.plain_token}, "
            f"speculative {d.speculative_token}; the plain margin is {d.margin:.2e}: {verdict}"
        )
    head = f"{report.tokens} tokens of {report.prompts} prompts at gamma {_listed(gammas)}: "
    if not report.divergences:
        print(head + "identical to plain decoding")
    else:
        print(head + f"{len(report.divergences)} divergences, {report.unexplained} unexplained")
