"""`specrt bench`: tokens per second of each gamma and drafter, against plain decoding."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from specrt.bench.batch import (
    check_rows,
    measure_structure,
    measure_throughput,
    structure_table,
    throughput_table,
)
from specrt.bench.lossless import Comparison, compare_outputs, plain_margin
from specrt.bench.measure import (
    Environment,
    Samples,
    footprint,
    measure,
    resident_bytes,
    target_precision,
)
from specrt.bench.report import ALL, BenchReport, Summary, Table, check_plot, draw, report
from specrt.bench.samples import Configuration, configurations
from specrt.bundle import DEFAULT_BUNDLE, Manifest, read_manifest
from specrt.cli.options import parse_gammas, read_structured, structured
from specrt.constraints import KINDS
from specrt.engine.backends import backend_of
from specrt.errors import RequestError, did_you_mean
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.target import VERIFIERS
from specrt.system import measure_bandwidth
from specrt.text import Prompt, first_of_each, of_categories, read_prompts

SHARED_PROMPTS = 24
"""Prompts measured where no limit is given, shared by the classes: about a minute for codelet."""

FEW_GAMMAS = (2, 4)
"""Fixed gammas measured beside plain decoding and auto where none are named."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured; None and nothing leave it to the bundle."""

    prompts: Sequence[Prompt]
    gammas: Sequence[Gamma] | None
    drafters: Sequence[str]
    params: SamplingParams
    repeats: int


def choose(files: Sequence[Path], categories: Sequence[str], limit: int | None) -> list[Prompt]:
    """Return the prompts to measure; one without a category takes the name of its file.

    Raises: RequestError for prompts that cannot be read, and a class called as all of them.
    """
    read = [(file, prompt) for file in files for prompt in read_prompts(file)]
    named = [replace(p, category=p.category or file.stem) for file, p in read]
    wanted = of_categories(named, categories)
    classes = {p.category for p in wanted}
    if ALL in classes and len(classes) > 1:
        place = next(p.place for p in wanted if p.category == ALL)
        raise RequestError(
            f"{place} is of category {ALL!r}, as all classes together are called; give it another "
            "`category`, or its file another name"
        )
    each = limit or max(1, SHARED_PROMPTS // len(classes))
    return first_of_each(wanted, each)


def parse_drafters(given: Sequence[str]) -> list[str]:
    """Read names of drafters, several in one separated by commas.

    Raises: RequestError for an unknown one.
    """
    names = [name.strip() for text in given for name in text.split(",")]
    for name in names:
        if name not in DRAFTERS:
            raise RequestError(f"--drafter is {name!r}{did_you_mean(name, DRAFTERS)}")
    return list(dict.fromkeys(names))


def resolve(
    generator: Generator, gammas: Sequence[Gamma] | None, drafters: Sequence[str]
) -> list[Configuration]:
    """Return what to compare, every configuration one that this bundle can run.

    Raises: RequestError for a gamma that was not built, or a drafter that is not there.
    """
    if gammas is None:
        built = generator.models.gammas
        gammas = [0, *(g for g in FEW_GAMMAS if g in built), AUTO]
    if not drafters:
        drafters = [generator.stream([0]).completion.speculation.drafter]
    for gamma in gammas:
        for drafter in drafters:
            generator.stream([0], gamma=gamma, drafter=drafter)  # refuses; nothing runs yet
    return configurations(gammas, drafters)


def encode(
    generator: Generator, prompts: Sequence[Prompt], params: SamplingParams
) -> list[list[int]]:
    """Return the token ids of every prompt.

    Raises: RequestError naming a prompt that is empty, or too long for what is to follow it.
    """
    context = generator.models.target.max_length
    encoded = []
    for prompt in prompts:
        ids = generator.tokenizer.encode(prompt.text)
        if not ids:
            raise RequestError(f"{prompt.place} has a prompt of no tokens; give it some text")
        if len(ids) + params.max_tokens > context + 1:
            raise RequestError(
                f"{prompt.place}: a prompt of {len(ids)} tokens and {params.max_tokens} more do "
                f"not fit the context of {context}; lower --max-tokens or shorten the prompt"
            )
        encoded.append(ids)
    return encoded


def progress(done: float) -> None:
    """Show how much was measured, where somebody looks."""
    if sys.stderr.isatty():
        end = "\n" if done >= 1 else ""
        print(f"\rmeasuring {done:4.0%}", end=end, file=sys.stderr, flush=True)


def crowd(
    generator: Generator, asked: Asked, rows: Sequence[int], setting: Environment, markdown: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure several completions at once, and print what that came to."""
    check_rows(generator, rows)
    if len(asked.prompts) < max(rows):
        raise RequestError(
            f"{len(asked.prompts)} prompts cannot keep {max(rows)} rows busy; give as many "
            "prompts as rows, or more"
        )
    gammas, drafter = asked.gammas or [0, AUTO], one_drafter(generator, asked, "--rows")
    found = measure_throughput(
        generator, encode(generator, asked.prompts, asked.params), rows, gammas, asked.params,
        repeats=asked.repeats, drafter=drafter, progress=progress,
    )  # fmt: skip
    title = f"{len(asked.prompts)} prompts, read and completed so many at once"
    _print(setting, throughput_table(found, title), markdown, as_json)
    print(json.dumps({**setting.to_json(), "throughput": [t.to_json() for t in found]}))


def structure(
    generator: Generator, asked: Asked, setting: Environment, markdown: bool, as_json: bool
) -> None:
    """Measure what keeping to a structure costs, and print it."""
    gammas, drafter = asked.gammas or [0, 4, AUTO], one_drafter(generator, asked, "a structure")
    found = measure_structure(
        generator, encode(generator, asked.prompts, asked.params), gammas, asked.params,
        repeats=asked.repeats, drafter=drafter, progress=progress,
    )  # fmt: skip
    title = f"{len(asked.prompts)} prompts, freely and within the structure"
    _print(setting, structure_table(found, title), markdown, as_json)
    print(json.dumps({**setting.to_json(), "structure": [cost.to_json() for cost in found]}))


def one_drafter(generator: Generator, asked: Asked, what: str) -> str | None:
    """Return the drafter that was named, if one was, after every check of gammas and drafter.

    Raises: RequestError.
    """
    if len(asked.drafters) > 1:
        raise RequestError(f"{what} is measured with one drafter, not {len(asked.drafters)}")
    resolve(generator, asked.gammas, asked.drafters)
    return asked.drafters[0] if asked.drafters else None


def _print(setting: Environment, table: Table, markdown: bool, as_json: bool) -> None:
    if not as_json:
        print(setting, table.to_markdown() if markdown else table.to_text(), sep="\n\n")
        print()


def parse_rows(text: str) -> list[int]:
    """Read numbers of rows, as 1,2,4.

    Raises: RequestError for anything else.
    """
    try:
        rows = sorted({int(part) for part in text.split(",")})
    except ValueError:
        rows = []
    if not rows or rows[0] < 1:
        raise RequestError(f"--rows is {text!r}; expected numbers of 1 or more, as 1,2,4")
    return rows


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--prompts", "files", type=click.Path(path_type=Path), required=True, multiple=True,
              help="JSONL file; may be repeated.")  # fmt: skip
@click.option("--category", "categories", multiple=True,
              help="Measure only prompts of this category; may be repeated.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Most prompts of each category.  "
              f"[default: {SHARED_PROMPTS} in all]")  # fmt: skip
@click.option("--gammas", help="Gammas to measure, as 0,2,4,auto.  [default: 0,2,4,auto]")
@click.option("--drafter", "drafters", multiple=True,
              help=f"Who drafts: {', '.join(DRAFTERS)}; several as a,b or repeated.  "
              "[default: the bundle's]")  # fmt: skip
@click.option("--rows", help="Completions at once to measure, as 1,2,4: tokens per second of all "
              "together, on a bundle built for as many.")  # fmt: skip
@structured
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", default=1.0, help="Keep the fewest tokens that reach this probability.")
@click.option("--min-p", default=0.0, help="Keep tokens this likely relative to the likeliest.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same text.")
@click.option("--verifier", type=click.Choice(list(VERIFIERS)), default="match", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw tokens/s over gamma here.")
@click.option("--markdown", is_flag=True, help="Print Markdown tables, as for a README.")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
@click.pass_obj
def command(
    owns_process: bool, /, bundle: Path, files: Sequence[Path], categories: Sequence[str],
    limit: int | None, gammas: str | None, drafters: Sequence[str], repeats: int,
    threads: int | None, plot: Path | None, markdown: bool, as_json: bool, rows: str | None,
    **sampling: Any,
) -> int:  # fmt: skip
    """Measure BUNDLE on files of prompts; the last line is JSON.

    Every prompt is completed at every gamma by every drafter back to back, plain decoding among
    them, so that a machine that slows down slows them alike. Exit status 1 when outputs differ
    from plain decoding and rounding does not explain it: no speed is reported then.
    """
    if as_json and markdown:
        raise RequestError("--json and --markdown are two forms of one answer; give one of them")
    if plot is not None:
        check_plot(plot)
    sampling |= read_structured(sampling)
    kept = any(sampling[kind] is not None for kind in KINDS)
    if sum((plot is not None, rows is not None, kept)) > 1:
        raise RequestError(
            "--plot draws gammas, --rows measures rows, and a structure what it costs; give one "
            "of them"
        )
    asked = Asked(
        choose(files, categories, limit),
        parse_gammas(gammas) if gammas is not None else None,
        parse_drafters(drafters),
        SamplingParams.of(ignore_eos=not kept, **sampling),
        repeats,
    )
    at_once = None if rows is None else parse_rows(rows)
    cores = threads or len(os.sched_getaffinity(0))
    before, manifest = resident_bytes(), read_manifest(bundle)
    setting = Environment.of(bundle, manifest, asked.params, cores, repeats)
    with load(bundle, threads=threads, owns_process=owns_process) as generator:
        for notice in generator.notices:
            print(f"note: {notice}", file=sys.stderr)
        if at_once is not None:
            crowd(generator, asked, at_once, setting, markdown, as_json)
            return 0
        if kept:
            structure(generator, asked, setting, markdown, as_json)
            return 0
        found = answer(generator, manifest, asked)
        taken = footprint(manifest, before, generator.models.draft is not None)
    if found.outputs.unexplained:
        remedy = f"run `specrt verify {bundle} --prompts {files[0]}`"
        print(f"specrt: {found.outputs}, so no speed is reported; {remedy}", file=sys.stderr)
        return 1
    show(Summary(setting, found, taken, measure_bandwidth(cores)), markdown, as_json)
    if plot is not None:
        draw(found, plot, str(setting))
    return 0


def show(summary: Summary, markdown: bool, as_json: bool) -> None:
    """Print tables for people, unless only JSON is wanted, and then one line of it."""
    if not as_json:
        print(summary.to_markdown() if markdown else summary.to_text(), end="\n\n")
    print(json.dumps(summary.to_json()))


def answer(generator: Generator, manifest: Manifest, asked: Asked) -> BenchReport:
    """Measure, and hold outputs to plain decoding before any figure is made of it."""
    compared = resolve(generator, asked.gammas, asked.drafters)
    params = asked.params
    ids = encode(generator, asked.prompts, params)
    samples = measure(
        generator, ids, compared, params, repeats=asked.repeats, progress=progress
    )  # fmt: skip
    outputs = compared_outputs(generator, manifest, ids, samples, params)
    categories = [p.category for p in asked.prompts]
    return report(samples, categories, outputs, manifest.target.weight_bytes)


def compared_outputs(
    generator: Generator,
    manifest: Manifest,
    prompts: Sequence[list[int]],
    samples: Samples,
    params: SamplingParams,
) -> Comparison:
    """Hold every output to plain decoding; of a greedy one that differs, tell the margin."""
    if VERIFIERS[params.verifier].needs_distributions and not params.greedy:
        return Comparison(0, untold="the rejection rule keeps the distribution, not the text")

    def margin(number: int, plain: Sequence[int]) -> float:
        return plain_margin(generator, [*prompts[number], *plain])

    promised = backend_of(manifest, manifest.target).exact
    told = margin if params.greedy else None
    return compare_outputs(samples, told, target_precision(manifest), promised)
