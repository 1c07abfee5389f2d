"""Where the tokens of several rows lie in one sequence, and what attention reads of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from specrt.engine import Engine, Tokens, check_bounds
from specrt.errors import EngineError


class Part(NamedTuple):
    """What one row takes part in a pass with: its tokens, and how many of the last are scored."""

    row: int
    width: int
    rows: int


@dataclass(frozen=True)
class Packing:
    """The places of one pass's tokens; the same for every pass of the same parts.

    Shapes: T tokens, with those that only fill up; A places of attention; R rows scored.
    """

    parts: tuple[Part, ...]
    begins: tuple[int, ...]
    """Of each part, the place of its first token."""
    widths: Tokens
    """Places of attention of each row, [B]."""
    spread: Tokens
    """The token that each place of attention reads, [A]; row by row."""
    kept: Tokens
    """The place of attention that each token takes, [T]."""
    idle: tuple[bool, ...]
    """Of each row, whether it takes no part."""
    rows: Tokens
    """The tokens scored, [R]; part by part, then one more where their number must be even."""


def pack(batch: int, parts: tuple[Part, ...], places: int, even: bool) -> Packing:
    """Lay the tokens of some rows side by side, in the order of the parts.

    Every row has at least so many `places` of attention, and a pass so many tokens; `even` makes
    the number of tokens even, and that of the rows scored. Places beyond a row's tokens read its
    last one again, those of a row that takes no part any. Tokens and rows scored that are missing
    are nobody's, behind all others.
    """
    begins = (0, *accumulate(part.width for part in parts))
    tokens = max(begins[-1], places)
    tokens += even and tokens % 2
    read: list[list[int]] = [[0] * places for _ in range(batch)]
    for part, begin in zip(parts, begins, strict=False):
        own = [*range(begin, begin + part.width)]
        read[part.row] = own + own[-1:] * (places - part.width)
    kept = np.zeros(tokens, np.int64)
    first = (0, *accumulate(map(len, read)))
    for part, begin in zip(parts, begins, strict=False):
        kept[begin : begin + part.width] = first[part.row] + np.arange(part.width)
    ends = [begin + part.width for part, begin in zip(parts, begins, strict=False)]
    rows = [t for part, end in zip(parts, ends, strict=True) for t in range(end - part.rows, end)]
    return Packing(
        parts,
        begins[:-1],
        widths=np.array([len(own) for own in read], np.int64),
        spread=np.array([t for own in read for t in own], np.int64),
        kept=kept,
        idle=tuple(row not in {part.row for part in parts} for row in range(batch)),
        rows=np.array(rows + [0] * (even and len(rows) % 2), np.int64),
    )


def check_parts(engine: Engine, parts: tuple[Part, ...]) -> None:
    """Refuse parts that no pass can have.

    Raises: EngineError.
    """
    rows = [part.row for part in parts]
    if not rows or len(set(rows)) < len(rows) or not set(rows) <= {*range(engine.batch)}:
        raise EngineError(
            f"a pass was asked of rows {rows}; expected some of 0 to {engine.batch - 1}, each once"
        )
    for part in parts:
        check_bounds(engine, part.width, 0, 0)
        if not 1 <= part.rows <= part.width:
            raise EngineError(
                f"{part.rows} positions of row {part.row} were to be scored in a pass of "
                f"{part.width} tokens; expected 1 to {part.width}"
            )
