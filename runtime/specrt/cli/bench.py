"""`specrt bench`: tokens per second of each gamma and drafter, against plain decoding."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from specrt.bandwidth import measure_bandwidth
from specrt.bench.footprint import footprint, resident_bytes
from specrt.bench.measure import Samples, measure
from specrt.bench.outputs import Comparison, compare_outputs
from specrt.bench.plot import check_plot, draw
from specrt.bench.report import Report, report
from specrt.bench.setting import Setting, target_precision
from specrt.bench.summary import Summary
from specrt.bundle import DEFAULT_BUNDLE
from specrt.cli.apart import crowd, parse_rows, structure
from specrt.cli.asked import (
    SHARED_PROMPTS,
    Asked,
    choose,
    encode,
    parse_drafters,
    progress,
    resolve,
)
from specrt.cli.gammas import parse_gammas
from specrt.cli.structured import read_structured, structured
from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.loading import load
from specrt.lossless import plain_margin
from specrt.manifest import Manifest, read_manifest
from specrt.models import DRAFTERS
from specrt.params import VERIFIERS, SamplingParams
from specrt.structure import KINDS

PROMISING = ("ort-cpu",)
"""Backends that compute in fp32 whatever the weights are stored as, quantized layers of a target
the same for every width: identical output is promised."""


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
@click.option("--verifier", type=click.Choice(VERIFIERS), default="match", show_default=True)
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
    setting = Setting.of(bundle, manifest, asked.params, cores, repeats)
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


def answer(generator: Generator, manifest: Manifest, asked: Asked) -> Report:
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
    if params.verifier == "rejection" and not params.greedy:
        return Comparison(0, untold="the rejection rule keeps the distribution, not the text")

    def margin(number: int, plain: Sequence[int]) -> float:
        return plain_margin(generator, [*prompts[number], *plain])

    promised = manifest.backend_of(manifest.target) in PROMISING
    told = margin if params.greedy else None
    return compare_outputs(samples, told, target_precision(manifest), promised)
