"""`specrt verify`: checks, on your prompts, that speculation changes no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specrt.bench.lossless import FP32_TOLERANCE, LosslessReport, compare, default_drafter
from specrt.cli.cache import bundle_argument
from specrt.cli.options import InputFile, parse_gammas, print_notices, progress
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma
from specrt.speculation.drafters import available_drafters
from specrt.text.prompt_file import read_prompts


@click.command("verify")
@bundle_argument
@click.option("--prompts", type=InputFile(), required=True,
              help='JSONL file of prompts, as {"prompt": "TEXT"}.')  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Use only the first N prompts.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True,
              help="Tokens of each completion.")  # fmt: skip
@click.option(
    "--gammas", help="Gammas to compare with plain decoding.  [default: all built, and auto]"
)
@click.option("--drafter", type=click.Choice(available_drafters(has_model=True)),
              help="What drafts.  [default: the bundle's own]")  # fmt: skip
@click.option("--tolerance", default=FP32_TOLERANCE, show_default=True,
              help="Logits between the plain pass's best two tokens up to which a divergence "
              "counts as a near-tie that rounding decided.")  # fmt: skip
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

    The exit status is 1 where rounding does not explain a divergence, 2 where nothing was drafted.
    """
    texts = [p.text for p in read_prompts(prompts)[:limit]]
    with load(bundle, threads=threads, owns_process=owns_process, text_memory_bytes=0) as generator:
        print_notices(generator.notices)
        generator.reader.require_text()
        compared = _drafting(gammas, generator)
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
        _print_report(report, compared)
    return 1 if report.unexplained else 0


def _drafting(gammas: str | None, generator: Generator) -> list[Gamma]:
    """Return the gammas to compare with plain decoding."""
    built = generator.models.gammas
    every: list[Gamma] = [*built, AUTO] if len(built) > 1 else []
    compared = [g for g in (every if gammas is None else parse_gammas(gammas)) if g]
    if not compared:
        raise RequestError(
            "there is nothing to compare: no gamma above 0 was built, or named in --gammas"
        )
    return compared


def _compare(generator: Generator, texts: list[str], *options: Any) -> LosslessReport:
    """Compare every prompt, showing progress."""
    report = LosslessReport()
    with progress("verify", steady=True) as show:
        for report in compare(generator, texts, *options):
            show(report.prompts / len(texts), "")
    return report


def _listed(gammas: list[Gamma]) -> str:
    return ", ".join(map(str, gammas))


def _print_report(report: LosslessReport, gammas: list[Gamma]) -> None:
    for d in report.divergences:
        verdict = "a near-tie" if d.explained else "NOT EXPLAINED by rounding"
        print(
            f"prompt {d.prompt}, gamma {d.gamma}, token {d.position}: plain {d.plain_token}, "
            f"speculative {d.speculative_token}; the plain margin is {d.margin:.2e}: {verdict}"
        )
    prompts = "1 prompt" if report.prompts == 1 else f"{report.prompts} prompts"
    head = f"{report.tokens} tokens, {prompts} at each gamma of {_listed(gammas)}: "
    if not report.divergences:
        print(head + "identical to plain decoding")
    else:
        print(head + f"{len(report.divergences)} divergences, {report.unexplained} unexplained")
