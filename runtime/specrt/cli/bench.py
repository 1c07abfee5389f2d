"""`specrt bench`: tokens per second of each gamma and drafter, compared with plain decoding."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

import click

from specrt.bench.batch import (
    check_rows,
    constraint_table,
    measure_constraint,
    measure_throughput,
    throughput_table,
)
from specrt.bench.lossless import Comparison, compare_outputs, plain_margin
from specrt.bench.measure import Configuration, Samples, configurations, measure
from specrt.bench.report import (
    ALL,
    CAPTION,
    COLUMNS,
    BenchReport,
    Environment,
    Summary,
    footprint,
    report,
    resident_bytes,
    table_rows,
    target_precision,
)
from specrt.bundle import Manifest, read_manifest
from specrt.cli.cache import bundle_argument
from specrt.cli.options import (
    InputFile,
    constraint_options,
    parse_gammas,
    print_notices,
    progress,
    read_constraint,
    table,
)
from specrt.constraints import KINDS
from specrt.engine.backends import backend_named, backend_of
from specrt.errors import BuildError, RequestError, did_you_mean, how_to_install
from specrt.generator import Generator
from specrt.loading import load
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.target import VERIFIERS
from specrt.system.memory import measure_bandwidth
from specrt.text.prompt_file import PromptRecord, first_of_each, of_categories, read_prompts

DEFAULT_PROMPTS = 24
"""Prompts measured without --limit, over all classes: about a minute for codelet."""

DEFAULT_GAMMAS = (2, 4)
"""Fixed gammas measured next to plain decoding and auto without --gammas."""

DEFAULT_REPEATS, DEFAULT_LAPS = 3, 15

LONGEST_LINE = 100
"""Characters of a line of the verdict."""

WITH_KERNELS = {"bundle", "draft", "kernels", "repeats", "threads", "markdown", "as_json"}
"""Options that --kernels leaves a meaning."""


@dataclass(frozen=True)
class BenchRequest:
    """What to measure; the bundle decides on gammas that are None and drafters that are empty."""

    prompts: Sequence[PromptRecord]
    gammas: Sequence[Gamma] | None
    drafters: Sequence[str]
    params: SamplingParams
    repeats: int


def choose(
    files: Sequence[Path], categories: Sequence[str], limit: int | None
) -> list[PromptRecord]:
    """Return the prompts to measure; one without a category takes the name of its file.

    Raises: RequestError for prompts that cannot be read, and for a category named `all`.
    """
    if not files:
        raise RequestError("bench has no --prompts; give a JSONL file of prompts, or --kernels")
    pairs = [(file, prompt) for file in files for prompt in read_prompts(file)]
    named = [replace(p, category=p.category or file.stem) for file, p in pairs]
    wanted = of_categories(named, categories)
    classes = {p.category for p in wanted}
    if ALL in classes and len(classes) > 1:
        place = next(p.place for p in wanted if p.category == ALL)
        raise RequestError(
            f"{place} is of category {ALL!r}, the name of all categories together; give it another "
            "`category`, or its file another name"
        )
    each = limit or max(1, DEFAULT_PROMPTS // len(classes))
    return first_of_each(wanted, each)


def parse_drafters(values: Sequence[str]) -> list[str]:
    """Read names of drafters, several in one separated by commas.

    Raises: RequestError for an unknown one.
    """
    names = [name.strip() for text in values for name in text.split(",")]
    for name in names:
        if name not in DRAFTERS:
            raise RequestError(f"--drafter is {name!r}{did_you_mean(name, DRAFTERS)}")
    return list(dict.fromkeys(names))


def resolve(
    generator: Generator, gammas: Sequence[Gamma] | None, drafters: Sequence[str]
) -> list[Configuration]:
    """Return the configurations to compare, all of which this bundle can run.

    Raises: RequestError for a gamma that was not built, or a drafter that is not there.
    """
    if gammas is None:
        built = generator.models.gammas
        gammas = [0, *(g for g in DEFAULT_GAMMAS if g in built), AUTO]
    if not drafters:
        drafters = [generator.stream([0]).completion.speculation.drafter]
    for gamma in gammas:
        for drafter in drafters:
            generator.stream([0], gamma=gamma, drafter=drafter)  # refuses; nothing runs yet
    return configurations(gammas, drafters)


def encode(
    generator: Generator, prompts: Sequence[PromptRecord], params: SamplingParams
) -> list[list[int]]:
    """Return the token ids of every prompt.

    Raises: RequestError naming a prompt that is empty, or too long for what is to follow it.
    """
    context = generator.models.target.max_length
    encoded = []
    for prompt in prompts:
        try:
            ids = generator.reader.tokens(prompt.text)
        except RequestError as error:
            raise RequestError(f"{prompt.place}: {error}") from error
        begin = generator.reader.first_tokens(ids)
        if len(begin) + params.max_tokens > context + 1:
            raise RequestError(
                f"{prompt.place}: a prompt of {len(begin)} tokens and {params.max_tokens} more do "
                f"not fit the context of {context}; lower --max-tokens or shorten the prompt"
            )
        encoded.append(ids)
    return encoded


def bench_rows(
    generator: Generator, request: BenchRequest, rows: Sequence[int], show: Callable[[float], None]
) -> Measured:
    """Measure several completions at once."""
    check_rows(generator, rows)
    if len(request.prompts) < max(rows):
        raise RequestError(
            f"{len(request.prompts)} prompts cannot keep {max(rows)} rows busy; give as many "
            "prompts as rows, or more"
        )
    measured = measure_throughput(
        generator,
        encode(generator, request.prompts, request.params),
        rows,
        request.gammas or [0, AUTO],
        request.params,
        repeats=request.repeats,
        drafter=one_drafter(generator, request, "--rows"),
        progress=show,
    )
    title = f"{count_of(request)}, prefill included; ratios are medians over repeats"
    facts = {"throughput": [each.to_json() for each in measured]}
    return Measured(*throughput_table(measured), title, facts)


def bench_constraint(
    generator: Generator, request: BenchRequest, show: Callable[[float], None]
) -> Measured:
    """Measure what constrained decoding costs."""
    measured = measure_constraint(
        generator,
        encode(generator, request.prompts, request.params),
        request.gammas or [0, 4, AUTO],
        request.params,
        repeats=request.repeats,
        drafter=one_drafter(generator, request, "a constraint"),
        progress=show,
    )
    title = f"{count_of(request)}, free and constrained; the ratio is the median over pairs"
    facts = {"structure": [cost.to_json() for cost in measured]}
    return Measured(*constraint_table(measured), title, facts)


def count_of(request: BenchRequest) -> str:
    """Return the number of prompts in words."""
    return f"{len(request.prompts)} prompt{'' if len(request.prompts) == 1 else 's'}"


@dataclass(frozen=True)
class Measured:
    """A table, the line above it, and the same facts for JSON."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str
    facts: dict[str, Any]

    def show(self, setting: Environment, markdown: bool, as_json: bool) -> None:
        """Print the table, or the same as JSON."""
        if as_json:
            print(json.dumps({**setting.to_json(), **self.facts}))
            return
        print(wrapped(str(setting)), wrapped(self.title), sep="\n\n", end="\n\n")
        print(table(self.columns, self.rows, markdown=markdown))


def wrapped(text: str) -> str:
    """Return a sentence in lines that fit a terminal, those after the first indented."""
    width = min(get_terminal_size().columns, LONGEST_LINE)
    return fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def one_drafter(generator: Generator, request: BenchRequest, what: str) -> str | None:
    """Return the drafter that was named, if any, once gammas and drafter are checked.

    Raises: RequestError for several drafters, and those of `resolve`.
    """
    if len(request.drafters) > 1:
        raise RequestError(f"{what} is measured with one drafter, not {len(request.drafters)}")
    resolve(generator, request.gammas, request.drafters)
    return request.drafters[0] if request.drafters else None


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
@bundle_argument
@click.option("--prompts", "files", type=InputFile(), multiple=True,
              help='JSONL file of prompts, as {"prompt": "TEXT"}; may be repeated.')  # fmt: skip
@click.option("--kernels", is_flag=True, help="Measure no text, but the products and the attention "
              "of the CPU kernels at every width, against what this machine can do. Takes no other "
              "options but --repeats, --threads, --markdown and --json.")  # fmt: skip
@click.option("--category", "categories", multiple=True,
              help="Measure only prompts of this category; may be repeated.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), help="Measure at most N prompts of "
              f"each category.  [default: {DEFAULT_PROMPTS} in all]")  # fmt: skip
@click.option("--gammas", help="Gammas to measure, as 0,2,4,auto.  [default: 0,2,4,auto]")
@click.option("--drafter", "drafters", multiple=True,
              help=f"What drafts: {', '.join(DRAFTERS)}; several as a,b or repeated.  "
              "[default: the bundle's]")  # fmt: skip
@click.option("--rows", help="Measure so many completions at once, as 1,2,4: tokens per second of "
              "all together. The bundle must be built for as many.")  # fmt: skip
@constraint_options
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True,
              help="Tokens of each completion.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1),
              help="Completions of each prompt at each configuration, and laps of --kernels.  "
              f"[default: {DEFAULT_REPEATS}; {DEFAULT_LAPS} laps]")  # fmt: skip
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", default=0, help="Keep the k most likely tokens; 0 keeps all.")
@click.option("--top-p", default=1.0, help="Keep the likeliest tokens that reach this probability.")
@click.option(
    "--min-p", default=0.0, help="Drop tokens less likely than this share of the likeliest."
)
@click.option("--seed", default=0, show_default=True, help="Same seed, same text.")
@click.option(
    "--verifier",
    type=click.Choice(list(VERIFIERS)),
    default=SamplingParams.verifier,
    show_default=True,
    help="How drafts are checked: see `specrt generate --help`.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Cores to use.  [default: all]")
@click.option("--markdown", is_flag=True, help="Print the table in Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.pass_context
def command(
    context: click.Context, /, bundle: Path, files: Sequence[Path], categories: Sequence[str],
    limit: int | None, gammas: str | None, drafters: Sequence[str], repeats: int | None,
    threads: int | None, markdown: bool, as_json: bool, rows: str | None, kernels: bool,
    **sampling: Any,
) -> int:  # fmt: skip
    """Measure the speed of BUNDLE on files of prompts.

    Each prompt is completed at every gamma by every drafter back to back, plain decoding among
    them, so that a machine that slows down slows all of them. Where outputs differ from plain
    decoding and rounding does not explain it, no speed is reported and the exit status is 1.
    Ctrl-C ends it with the table of what was measured, and status 130.
    """
    if as_json and markdown:
        raise RequestError("--json and --markdown exclude each other; give one of them")
    cores, owns_process = threads or len(os.sched_getaffinity(0)), bool(context.obj)
    if kernels:
        refuse_texts(context)
        bench_kernels(bundle, cores, repeats or DEFAULT_LAPS, owns_process, markdown, as_json)
        return 0
    repeats = repeats or DEFAULT_REPEATS
    sampling |= read_constraint(sampling)
    constrained = any(sampling[kind] is not None for kind in KINDS)
    if rows is not None and constrained:
        raise RequestError("--rows and a constraint are measured apart; give one of them")
    request = BenchRequest(
        choose(files, categories, limit),
        parse_gammas(gammas) if gammas is not None else None,
        parse_drafters(drafters),
        SamplingParams.of(**sampling),
        repeats,
    )
    at_once = None if rows is None else parse_rows(rows)
    before, manifest = resident_bytes(), read_manifest(bundle)
    # After its end the text of a source says nothing.
    endless = not constrained and manifest.target.encoder is None
    request = replace(request, params=replace(request.params, ignore_eos=endless))
    setting = Environment.of(bundle, manifest, request.params, cores, repeats)
    with load(bundle, threads=threads, owns_process=owns_process, text_memory_bytes=0) as generator:
        print_notices(generator.notices)
        generator.reader.require_text()
        with progress("bench", steady=True) as line:
            shares = [0.0]

            def show(share: float) -> None:
                shares.append(share)
                line(share, "")

            if at_once is not None:
                measured = bench_rows(generator, request, at_once, show)
            elif constrained:
                measured = bench_constraint(generator, request, show)
            else:
                result = compare_configurations(generator, manifest, request, show)
        memory = footprint(manifest, before, generator.models.draft is not None)
    status = 0
    if shares[-1] < 1:
        print(f"note: interrupted, with {shares[-1]:.0%} done", file=sys.stderr)
        status = 130
    if at_once is not None or constrained:
        measured.show(setting, markdown, as_json)
        return status
    if result.outputs.unexplained:
        remedy = f"run `specrt verify {bundle} --prompts {files[0]}`"
        print(f"specrt: {result.outputs}, so no speed is reported; {remedy}", file=sys.stderr)
        return 1
    print_summary(Summary(setting, result, memory, measure_bandwidth(cores)), markdown, as_json)
    return status


def refuse_texts(context: click.Context) -> None:
    """Refuse options that --kernels gives no meaning.

    Raises: RequestError naming one.
    """
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name not in WITH_KERNELS and source is click.core.ParameterSource.COMMANDLINE:
            raise RequestError(
                f"--kernels measures no text, and {option.opts[0]} is about texts; give one of them"
            )


def bench_kernels(
    bundle: Path, threads: int, laps: int, owns_process: bool, markdown: bool, as_json: bool
) -> None:
    """Measure the CPU kernels, and print the table, or the same as JSON."""
    try:
        from specrt_export.check.roofline import measure_kernels
    except ImportError as error:
        raise BuildError(
            f"measuring the kernels needs {error.name}; install it with `{how_to_install('build')}`"
        ) from None
    if owns_process:  # or the sessions' threads, which spin, stand in each other's way
        backend_named("ort-cpu").share_threads(threads)
    with progress("bench", steady=True) as line:
        found = measure_kernels(bundle, threads, laps=laps, progress=lambda share: line(share, ""))
    if as_json:
        print(json.dumps(found.to_json()))
        return
    print(found, end="\n\n")
    columns, rows = found.table()
    print(table(columns, rows, markdown=markdown))


def print_summary(summary: Summary, markdown: bool, as_json: bool) -> None:
    """Print table and verdict, or the same as JSON."""
    if as_json:
        print(json.dumps(summary.to_json()))
        return
    print(wrapped(str(summary.setting)), end="\n\n")
    print(table(COLUMNS, table_rows(summary.report), left=1, markdown=markdown))
    print(f"\n{wrapped(CAPTION)}\n")
    for text in summary.sentences:
        print(f"- {text}" if markdown else wrapped(text))


def compare_configurations(
    generator: Generator, manifest: Manifest, request: BenchRequest, show: Callable[[float], None]
) -> BenchReport:
    """Measure every configuration, and compare outputs with plain decoding."""
    params = request.params
    compared = resolve(generator, request.gammas, request.drafters)
    ids = encode(generator, request.prompts, params)
    samples = measure(generator, ids, compared, params, repeats=request.repeats, progress=show)
    outputs = compared_outputs(generator, manifest, ids, samples, params)
    categories = [p.category for p in request.prompts]
    return report(samples, categories, outputs, manifest.target.weight_bytes)


def compared_outputs(
    generator: Generator,
    manifest: Manifest,
    prompts: Sequence[list[int]],
    samples: Samples,
    params: SamplingParams,
) -> Comparison:
    """Compare every output with plain decoding, with the margin of a greedy one that differs."""
    if VERIFIERS[params.verifier].needs_distributions and not params.greedy:
        return Comparison(0, reason=f"{params.verifier} keeps the distribution, not the text")

    def margin(number: int, plain: Sequence[int]) -> float:
        return plain_margin(generator, prompts[number], plain)

    exact = backend_of(manifest, manifest.target).exact
    precision = target_precision(manifest)
    return compare_outputs(samples, margin if params.greedy else None, precision, exact)
