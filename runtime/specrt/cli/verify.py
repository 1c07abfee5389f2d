"""`specrt verify`: proof, on your prompts, that speculation changes no token."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.gammas import parse_gammas
from specrt.errors import RequestError
from specrt.loading import load
from specrt.lossless import FP32_TOLERANCE, Report, compare
from specrt.prompts import read_prompts


@click.command("verify")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL file.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--gammas", help="Gammas to compare with plain decoding.  [default: all built]")
@click.option("--tolerance", default=FP32_TOLERANCE, show_default=True,
              help="Margin, in logits, up to which a divergence counts as a near-tie.")  # fmt: skip
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(
    owns_process: bool,
    bundle: Path,
    prompts: Path,
    max_tokens: int,
    gammas: str | None,
    tolerance: float,
    threads: int | None,
    as_json: bool,
) -> int:
    """Compare greedy output at every gamma with plain decoding, token for token.

    Exit status 1 when a divergence is larger than rounding explains.
    """
    texts = [p.text for p in read_prompts(prompts)]
    with load(bundle, threads=threads, owns_process=owns_process) as generator:
        asked = parse_gammas(gammas) if gammas is not None else list(generator.models.gammas)
        compared = [g for g in asked if g]
        if not compared:
            raise RequestError(
                "there is nothing to compare: no gamma above 0 is built or asked for"
            )
        report = Report()
        for report in compare(generator, texts, compared, max_tokens, tolerance):
            if sys.stderr.isatty():
                print(f"\r{report.prompts}/{len(texts)} prompts", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _show(report, compared)
    return 1 if report.unexplained else 0


def _show(report: Report, gammas: list[int]) -> None:
    for d in report.divergences:
        verdict = "a near-tie" if d.explained else "NOT EXPLAINED by rounding"
        print(
            f"prompt {d.prompt}, gamma {d.gamma}, token {d.position}: plain {d.plain_token}, "
            f"speculative {d.speculative_token}; the plain margin is {d.margin:.2e}: {verdict}"
        )
    names = ", ".join(map(str, gammas))
    head = f"{report.tokens} tokens of {report.prompts} prompts at gamma {names}: "
    if not report.divergences:
        print(head + "identical to plain decoding")
    else:
        print(head + f"{len(report.divergences)} divergences, {report.unexplained} unexplained")
