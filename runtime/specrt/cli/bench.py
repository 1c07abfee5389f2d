"""`specrt bench`: tokens per second at each gamma, against plain decoding in the same run."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from statistics import median

import click

from specrt.bench import BenchResult, GammaResult, run_bench
from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.gammas import parse_gammas
from specrt.errors import RequestError
from specrt.generate import Generator, load
from specrt.params import SamplingParams
from specrt.prompts import read_prompts


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="JSONL file.")
@click.option("--gammas", help="Gammas to measure, as 0,2,4.  [default: all built]")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--limit", type=click.IntRange(min=1), help="Use the first so many prompts.")
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
@click.pass_obj
def command(
    owns_process: bool,
    bundle: Path,
    prompts: Path,
    gammas: str | None,
    max_tokens: int,
    repeats: int,
    limit: int | None,
    temperature: float,
    threads: int | None,
    as_json: bool,
) -> int:
    """Measure BUNDLE on a file of prompts; the last line is JSON.

    Exit status 1 when outputs differ from plain decoding: no speed is reported then.
    """
    texts = [p.text for p in read_prompts(prompts)][:limit]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0, temperature=temperature)
    with load(bundle, threads=threads, owns_process=owns_process) as generator:
        asked = parse_gammas(gammas) if gammas is not None else list(generator.models.gammas)
        for gamma in asked:
            generator.check_gamma(gamma)
        ids = [generator.tokenizer.encode(t) for t in texts]
        _check_room(generator, ids, max_tokens)
        result = run_bench(
            generator, ids, asked, max_tokens=max_tokens, repeats=repeats, params=params,
            progress=_progress,
        )  # fmt: skip
    facts = {"bundle": str(bundle), "machine": platform.machine(), "threads": threads}
    if not as_json and result.identical:
        _table(result)
        print(verdict(result))
    if not result.identical:
        print(
            "specrt: outputs differ from plain decoding, so no speed is reported; "
            f"run `specrt verify {bundle} --prompts {prompts}`",
            file=sys.stderr,
        )
        return 1
    print(json.dumps({**facts, **result.to_json()}))
    return 0


def _check_room(generator: Generator, prompts: list[list[int]], max_tokens: int) -> None:
    longest, context = max(map(len, prompts)), generator.models.target.max_length
    if longest + max_tokens > context + 1:
        raise RequestError(
            f"a prompt of {longest} tokens and {max_tokens} more do not fit the context of "
            f"{context}; lower --max-tokens or shorten the prompt"
        )


def _progress(done: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if done >= 1 else ""
        print(f"\rmeasuring {done:4.0%}", end=end, file=sys.stderr, flush=True)


_COLUMNS = (
    "gamma",
    "tokens/s",
    "speedup",
    "spread",
    "acceptance",
    "yield",
    "tokens/round",
    "TTFT ms",
    "ITL ms",
    "draft ms",
    "verify ms",
    "outside us",
)


def _table(result: BenchResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in result.gammas.values():
        table.add_row(*_row(row, result.gammas[0]))
    Console(width=max(120, Console().width)).print(table)


def _row(row: GammaResult, plain: GammaResult) -> list[str]:
    counts, ratios = row.counts, row.speedups(plain)
    drafted = counts.drafted > 0
    return [
        str(row.gamma),
        f"{median(row.tokens_per_second):.0f}",
        f"{median(ratios):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
        f"{counts.acceptance_rate:.3f}" if drafted else "",
        f"{counts.draft_yield:.3f}" if drafted else "",
        f"{counts.tokens_per_round:.2f}",
        f"{median(row.ttft_ms):.1f}",
        f"{median(row.itl_ms):.2f}",
        f"{median(row.draft_ms):.2f}" if drafted else "",
        f"{median(row.verify_ms):.2f}",
        f"{median(row.outside_us):.0f}",
    ]


def verdict(result: BenchResult) -> str:
    """Say in words what was found."""
    plain = result.gammas[0]
    drafting = [r for r in result.gammas.values() if r.gamma]
    text = f"{result.repetition:.0%} of the plain output repeats an earlier run of 16 tokens"
    if not drafting:
        return text
    best = max(drafting, key=lambda r: median(r.speedups(plain)))
    gain = median(best.speedups(plain))
    plain_ms = median(plain.verify_ms)
    share = median(best.draft_ms) / best.gamma / plain_ms
    cost = median(best.verify_ms) / plain_ms
    said = f"gamma {best.gamma} is {gain:.2f}x plain decoding" if gain > 1 else (
        f"speculation does not pay here: the best, gamma {best.gamma}, is {gain:.2f}x plain"
    )  # fmt: skip
    return (
        f"{said}; a drafted token costs {share:.0%} of a plain step and verifying "
        f"{best.gamma + 1} tokens {cost:.2f} steps. Outputs identical; {text}."
    )
