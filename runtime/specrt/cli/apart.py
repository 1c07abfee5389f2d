"""The two other things that `specrt bench` measures: rows at once, and what a structure costs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specrt.bench.setting import Setting
from specrt.bench.structure import measure_structure, structure_table
from specrt.bench.table import Table
from specrt.bench.throughput import check_rows, measure_throughput, throughput_table
from specrt.cli.asked import Asked, encode, progress, resolve
from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.models import AUTO


def crowd(
    generator: Generator, asked: Asked, rows: Sequence[int], setting: Setting, markdown: bool,
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
    generator: Generator, asked: Asked, setting: Setting, markdown: bool, as_json: bool
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


def _print(setting: Setting, table: Table, markdown: bool, as_json: bool) -> None:
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
