"""Toy decoders of encoder-decoders: what follows a text depends on the source of its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import Source
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.text.tokenizer import Tokenizer
from support.rows import PackedTable
from support.toy import TableEngine, near

START = (256,)
COSTS = Costs((100.0, *(105.0 + 5 * i for i in range(40))), tuple(10.0 * g for g in range(9)))


class SourceTable(TableEngine):
    """One row, whose logits depend on its source and its text.

    With `copies` the source's next token is the likeliest, as in a summary that leaves nothing out.
    """

    copies = False
    source: NDArray[np.int64] | None = None

    def row(self, seen: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `TableEngine`."""
        assert self.source is not None, "a row was read before it had a source"
        logits = super().row(np.concatenate([self.source, seen]))
        at = len(seen) - 1
        if self.copies and at < len(self.source):
            logits = logits.copy()
            logits[self.source[at]] = np.abs(logits).max() + 1
        return logits


class ConditionedTable(PackedTable):
    """Rows with sources. A draft `beside` its target reads what that left, and must come second."""

    def __init__(
        self, rows: Sequence[SourceTable], beside: ConditionedTable | None = None,
        max_source: int = 64,
    ) -> None:  # fmt: skip
        super().__init__(rows)
        self.rows: Sequence[SourceTable] = rows
        self.max_source = max_source
        self.conditioned: list[tuple[int, list[int]]] = []
        """Every row that read a source, and the source."""
        self._beside = beside

    def condition(self, row: int, source: Source) -> None:
        """See `ConditionedEngine`."""
        if not 0 < source.shape[-1] <= self.max_source:
            raise EngineError(f"a source of {source.shape[-1]} positions; expected 1 to 64")
        # Of features, numbers that stand for them.
        ids = source if source.ndim == 1 else np.abs(source * 100).astype(np.int64).ravel()
        if self._beside is not None:
            left = self._beside.rows[row].source
            assert left is not None, "the target reads a source first"
            np.testing.assert_array_equal(left, ids)
        self.conditioned.append((row, ids.tolist()))
        self.rows[row].source = np.array(ids, np.int64)
        self.rows[row].buffer[:] = -1

    def copy_row(self, source: int, to: int, length: int) -> None:
        """See `PackedEngine`."""
        super().copy_row(source, to, length)
        self.rows[to].source = self.rows[source].source


def conditioned(
    engine: TableEngine, batch: int, *, beside: ConditionedTable | None = None,
    max_source: int = 64, copies: bool = False,
) -> ConditionedTable:  # fmt: skip
    """Return rows of an engine, each with a source."""
    rows = []
    for _ in range(batch):
        made = SourceTable(
            vocab=engine.geometry.vocab_size, max_length=engine.max_length,
            max_width=engine.max_width, memory=engine.memory,
        )  # fmt: skip
        made.table, made.copies = engine.table, copies
        rows.append(made)
    return ConditionedTable(rows, beside, max_source)


def conditioned_models(
    vocab: int, batch: int, *, copies: bool = False, scale: float = 3.0, **options: Any
) -> Models:
    """Return a pair that shares an encoder."""
    target = TableEngine(4, vocab=vocab, max_length=128, max_width=16, scale=scale)
    one = conditioned(target, batch, copies=copies)
    other = conditioned(near(target, 5, 0.7), batch, beside=one, copies=copies)
    options = {"costs": COSTS, "decoder_start": START, **options}
    return Models(one, other, tuple(range(9)), 4, **options)


def reader(tokenizer: Tokenizer, batch: int = 1, *, prompt_cache: bool = True,
           **options: Any) -> Generator:  # fmt: skip
    """Return a generator whose prompts are sources."""
    models = conditioned_models(tokenizer.size, batch, **options)
    return Generator(models, tokenizer, prompt_cache=prompt_cache)


def greedy_text(made: Generator, source: Sequence[int], new: int) -> list[int]:
    """Return the greedy text of a source, looked up without any engine or loop."""
    target: Any = made.models.target
    row = SourceTable(vocab=target.geometry.vocab_size, max_length=target.max_length)
    row.table, row.copies = target.rows[0].table, target.rows[0].copies
    row.source, text = np.array(source, np.int64), list(made.models.decoder_start)
    for _ in range(new):
        text.append(int(row.row(np.array(text)).argmax()))
    return text[len(made.models.decoder_start) :]
