"""Passes of several rows: packed into one sequence, or padded to one width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from specrt.engine.protocol import (
    Candidates,
    Confidence,
    Engine,
    Feed,
    Logits,
    Output,
    PackedEngine,
    Tokens,
    check_bounds,
)
from specrt.engine.protocol import candidates_of as found_candidates
from specrt.errors import EngineError


class RowSlice(NamedTuple):
    """What one row takes part in a pass with: its tokens, and how many of the last are scored."""

    row: int
    width: int
    rows: int


@dataclass(frozen=True)
class Packing:
    """The places of one pass's tokens; the same for every pass of the same parts.

    Shapes: T tokens, with those that only fill up; A places of attention; R rows scored.
    """

    parts: tuple[RowSlice, ...]
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


def pack(batch: int, parts: tuple[RowSlice, ...], places: int, even: bool) -> Packing:
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


def check_parts(engine: Engine, parts: tuple[RowSlice, ...]) -> None:
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


class RowsEngine(Protocol):
    """Whatever runs some rows of a batch in one pass; see `PackedEngine.forward_rows`."""

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass; the outputs are in the order of the feeds, each with batch 1."""


def rows_of(engine: Engine) -> RowsEngine:
    """Return what runs single rows of an engine."""
    if engine.batch == 1:
        return LoneRow(engine)
    return engine if isinstance(engine, PackedEngine) else PaddedRows(engine)


def first_row(engine: Engine) -> Engine:
    """Return the first row of an engine, as an engine of one row."""
    return engine if engine.batch == 1 else FirstRow(engine)


class FirstRow:
    """The first row of an engine of several, by itself; a padded engine's rows all do the same."""

    batch = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.geometry = engine.geometry
        self.max_length, self.max_width = engine.max_length, engine.max_width
        self.close = engine.close

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """See `Engine`."""
        engine, fed, at = self._engine, np.asarray(tokens), int(np.asarray(start).item())
        scored = rows or fed.shape[1]
        if isinstance(engine, PackedEngine):
            return engine.forward_rows((Feed(0, fed[0].tolist(), at, scored),))[0]
        output = engine.forward(np.repeat(fed, engine.batch, 0), [at] * engine.batch, scored)
        return RowOutput(output, 0, 0, scored)


class LoneRow:
    """The one row of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.forward

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """See `RowsEngine`."""
        ((_, tokens, start, rows),) = feeds
        return (self._forward((tokens,), start, rows),)


class PaddedRows:
    """An engine of [B, S] passes, whose rows are filled up to the widest.

    A row that needs less begins earlier: it is fed again what its KV buffers hold already, and the
    same keys are written again. Where its text is too short for that, tokens without meaning
    follow, whose keys are overwritten before they are read. Rows that take no part are fed like
    those that need nothing.

    Short texts beside a wide pass have more rows scored than they ask for. Where an engine scores
    at most `max_rows`, and that is more, the widest goes through by itself.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._most: float = getattr(engine, "max_rows", inf)
        self._held: list[list[int]] = [[] for _ in range(engine.batch)]

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """See `RowsEngine`."""
        texts = list(self._held)
        for row, tokens, start, _ in feeds:
            texts[row] = [*texts[row][:start], *tokens]
        width = max(len(feed.tokens) for feed in feeds)
        begins = [max(0, len(text) - width) for text in texts]
        batch = [
            [*text[begin:], *[0] * (width - len(text))]
            for text, begin in zip(texts, begins, strict=True)
        ]
        ends = [len(texts[feed.row]) - begins[feed.row] for feed in feeds]
        rows = max(width - end + feed.rows for feed, end in zip(feeds, ends, strict=True))
        if rows > self._most and len(feeds) > 1:
            return self._apart(feeds, width)
        output = self._engine.forward(batch, begins, rows)
        self._held = texts  # not before: a pass that failed has written nothing
        return [
            RowOutput(output, feed.row, end - feed.rows - (width - rows), feed.rows)
            for feed, end in zip(feeds, ends, strict=True)
        ]

    def _apart(self, feeds: Sequence[Feed], width: int) -> Sequence[Output]:
        """Run the first of the widest after all the others, whose outputs it must not spoil."""
        at = next(i for i, feed in enumerate(feeds) if len(feed.tokens) == width)
        others = [*feeds[:at], *feeds[at + 1 :]]
        kept: list[Output] = [Kept(output) for output in self.forward_rows(others)]
        kept[at:at] = self.forward_rows([feeds[at]])
        return kept


class Kept:
    """What a pass left behind, out of reach of later ones."""

    def __init__(self, output: Output) -> None:
        self.argmax, self.logits = output.argmax.copy(), output.logits.copy()
        sure, found = output.confidence, found_candidates(output)
        self.confidence = None if sure is None else sure.copy()
        self.candidates = None if found is None else (found[0].copy(), found[1].copy())


class RowOutput:
    """What a pass left behind for one row of several."""

    def __init__(self, output: Output, row: int, first: int, rows: int) -> None:
        self._output = output
        self._at = (slice(row, row + 1), slice(first, first + rows))

    @property
    def argmax(self) -> Tokens:
        """See `Output`."""
        return self._output.argmax[self._at]

    @property
    def logits(self) -> Logits:
        """See `Output`."""
        return self._output.logits[self._at]

    @property
    def confidence(self) -> Confidence | None:
        """See `Output`."""
        known = self._output.confidence
        return None if known is None else known[self._at]

    @property
    def candidates(self) -> Candidates | None:
        """See `Output`."""
        known = found_candidates(self._output)
        return None if known is None else (known[0][self._at], known[1][self._at])
