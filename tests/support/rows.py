"""Toy engines of several rows: one that wants them equally wide, and one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import ArrayLike

from specrt.engine.protocol import Feed
from support.toy import TableEngine, TableOutput


class PackedTable:
    """Rows that are toy engines of their own, run one after the other."""

    def __init__(self, rows: Sequence[TableEngine]) -> None:
        self.rows = rows
        self.geometry = rows[0].geometry
        self.batch = len(rows)
        self.max_length, self.max_width = rows[0].max_length, rows[0].max_width
        self.max_rows, self.traits = rows[0].max_rows, rows[0].traits
        self.passes: list[list[Feed]] = []

    def forward_rows(self, feeds: Sequence[Feed]) -> list[TableOutput]:
        """See `PackedEngine`."""
        assert len({feed.row for feed in feeds}) == len(feeds)
        self.passes.append([Feed(f.row, list(f.tokens), f.start, f.rows) for f in feeds])
        return [self.rows[f.row].forward((f.tokens,), f.start, f.rows) for f in feeds]

    def copy_row(self, source: int, to: int, length: int) -> None:
        """See `PackedEngine`."""
        assert (self.rows[source].buffer[0, :length] >= 0).all(), "copied what is not there"
        self.rows[to].buffer[0, :length] = self.rows[source].buffer[0, :length]

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Any:
        """See `Engine`; nobody asks it of several rows."""
        raise AssertionError("a packed engine was padded")

    def close(self) -> None:
        """Close the rows."""
        for row in self.rows:
            row.close()


def packed(engine: TableEngine, batch: int) -> PackedTable:
    """Return several rows of an engine."""
    return PackedTable([_like(engine, 1) for _ in range(batch)])


def padded(engine: TableEngine, batch: int) -> TableEngine:
    """Return an engine of several rows that wants them equally wide."""
    return _like(engine, batch)


def _like(engine: TableEngine, batch: int) -> TableEngine:
    made = TableEngine(
        vocab=engine.geometry.vocab_size,
        memory=engine.memory,
        batch=batch,
        max_length=engine.max_length,
        max_width=engine.max_width,
        corrupt=engine.corrupt,
    )
    made.table = engine.table
    return made
