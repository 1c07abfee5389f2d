"""Heads that draft a block in one pass, on ONNX Runtime with the CPU kernels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.ort_engine import (
    OrtEngine,
    RowScores,
    bind_input,
    bind_output,
    check_rows,
    run_bound,
    widths,
)
from specrt.engine.protocol import CLOSED, MOST_OF_BLOCK, BlockShape, Feed, check_bounds
from specrt.errors import EngineError

NO_SIZES = -1, 0, 0, 0

BLOCK = "specrt.block"
"""The entry of a graph's metadata that says what its blocks are, as JSON; see `BlockShape`."""


def read_block(session: Any, vocabulary: int) -> BlockShape:
    """Read what an engine's graph says of its blocks.

    Raises: EngineError for what no block of the engine can have.
    """
    told = session.get_modelmeta().custom_metadata_map.get(BLOCK, "")
    try:
        block = BlockShape(**json.loads(told))
    except (ValueError, TypeError, RecursionError):
        block = BlockShape(0, 0, 0)
    *numbers, chained = block
    asks = any(port.name == "previous" for port in session.get_inputs())
    if (
        any(type(number) is not int for number in numbers)
        or not 1 <= block.drafts <= block.block_size <= MOST_OF_BLOCK
        or not 0 <= block.mask_token_id < vocabulary
        or chained is not asks
    ):
        raise EngineError(
            f"the engine reads a context and says {short(told)} of its blocks; expected up to "
            f"{MOST_OF_BLOCK} positions, a mask token below {vocabulary}, no more drafts than "
            f"positions, and chained {asks}: build the bundle again"
        )
    return block


class OrtBlockEngine(OrtEngine):
    """A block head next to its target, fed with tokens at their own positions as any draft is.

    A pass of tokens at `start` writes keys and values of what the target left at the positions of
    all but the last one; the last one, and mask tokens after it, are the block. So `rows` is how
    many tokens are drafted, and a pass counts as many positions as it was fed, less one: those of
    the block are junk, which the next pass writes over.

    A block whose tokens are `chained` is scored for its first one, the others as if no token were
    before them. A recursive feed of a drafted token at its own position returns the scores of the
    next one: those that the row's last block left, and what the Markov head adds.

    Features are read where the target's engine keeps them, as `HeadEngine` does.
    Shapes: `target_features` is [batch, max_length, width] f32, the target's own memory.
    """

    def __init__(
        self, session: Any, weights: tuple[Any, ...], spec: EngineSpec,
        target_features: NDArray[np.float32],
    ) -> None:  # fmt: skip
        super().__init__(session, weights, spec)
        batch, max_width = self.batch, self.max_width
        self.block = read_block(session, self.geometry.vocab_size)
        self.traits = replace(self.traits, block=self.block)
        self.target_features = target_features
        tokens = batch * (max_width - 1 + self.block.block_size)
        self._tokens, self._slots, self._positions, self._rows = np.zeros((4, tokens), np.int64)
        self._numbers = np.arange(max(tokens, self.max_length))
        width = target_features.shape[-1]
        self._context = np.zeros((1, batch * max_width, width), np.float32)
        self._sizes = NO_SIZES
        """Of the pass that is bound: positions of contexts and of blocks, scored rows, and tokens
        that a Markov head reads."""
        self._previous = np.zeros((1, batch), np.int64)
        self._added = _markov_memory(session, batch) if self.block.chained else {}
        """What the Markov head adds for each of its tokens, by output."""
        self._left: dict[int, tuple[int, RowScores]] = {}
        """By row, where the last block began, and its scores as the states alone have them."""

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> RowScores:
        """Run one pass of one row; see `Engine.forward`.

        Raises: EngineError on an engine of several rows, which `forward_rows` serves.
        """
        fed = np.asarray(tokens, np.int64)
        if self.batch != 1 or fed.ndim != 2 or len(fed) != 1:
            raise EngineError(
                f"tokens of shape {list(fed.shape)} were fed to a head of {self.batch} rows; "
                "expected [1, width] on one row, and forward_rows on several"
            )
        feed = Feed(0, fed[0].tolist(), int(np.asarray(start).item()), rows or self.block.drafts)
        return self.forward_rows((feed,))[0]

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[RowScores, ...]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`.

        Contexts of all rows come first in it, then their blocks.
        """
        check_rows(self, feeds)
        blocks = [feed for feed in feeds if not feed.recursive]
        for feed in feeds:
            (self._check_recursive if feed.recursive else self._check)(feed)
        scored, previous = self._run_blocks(blocks, feeds), iter(range(len(feeds)))
        if not self.block.chained:
            return tuple(scored)
        found, begun = [], iter(scored)
        for feed in feeds:
            if not feed.recursive:
                begin, scores = feed.start + len(feed.tokens) - 1, next(begun)
                self._left[feed.row] = begin, _copied(scores)
            begin, scores = self._left[feed.row]
            place = 0 if not feed.recursive else feed.start - begin
            found.append(self._chained(scores, place, feed, next(previous)))
        return tuple(found)

    def _run_blocks(self, blocks: Sequence[Feed], feeds: Sequence[Feed]) -> list[RowScores]:
        """Run the blocks, and the Markov head over the last token of each feed."""
        size, place = self.block.block_size, 0
        if self.block.chained:
            self._previous[0, : len(feeds)] = [feed.tokens[-1] for feed in feeds]
        for feed in blocks:
            end, start = place + len(feed.tokens) - 1, feed.start
            left = self.target_features[feed.row, start : start + end - place]
            self._context[0, place:end] = left
            self._place(feed.row, start, place, end)
            place = end
        context, scored = place, 0
        for number, feed in enumerate(blocks):
            begin, last = number * size, scored + feed.rows
            self._tokens[begin : begin + size] = self.block.mask_token_id
            self._tokens[begin] = feed.tokens[-1]
            self._place(feed.row, feed.start + len(feed.tokens) - 1, place, place + size)
            self._rows[scored:last] = self._numbers[begin : begin + feed.rows]
            place, scored = place + size, last
        sizes = context, place - context, scored, len(feeds) if self.block.chained else 0
        if self._sizes != sizes:
            self._bind_block(*sizes)
        run_bound(self._session, self._binding, place)
        ends = np.cumsum([feed.rows for feed in blocks]).tolist()
        return [self._scored(end - feed.rows, end) for feed, end in zip(blocks, ends, strict=True)]

    def _chained(self, left: RowScores, place: int, feed: Feed, number: int) -> RowScores:
        """Return scores with what the Markov head adds at `place`.

        Of a block all are returned, of a recursive feed those of `place` alone.
        """
        argmax, logits, confidence, _ = left
        row = logits[0, place] + self._added["markov"][0, number]
        best = int(row.argmax())
        if not np.isfinite(row[best]):
            best = -1
        if confidence is not None and "markov_confidence" in self._added:
            confidence = _probability(confidence, self._added["markov_confidence"][0, number])
        if feed.recursive:
            sure = None if confidence is None else confidence[:, place : place + 1]
            return RowScores(np.array([[best]]), row[None, None], sure)
        argmax, logits = argmax.copy(), logits.copy()
        argmax[0, 0], logits[0, 0] = best, row
        return RowScores(argmax, logits, confidence)

    def _check(self, feed: Feed) -> None:
        """Refuse a feed that no pass can have.

        Raises: EngineError.
        """
        width, size = len(feed.tokens), self.block.block_size
        check_bounds(self, width, feed.start, feed.start)
        if not 1 <= feed.rows <= self.block.drafts:
            raise EngineError(
                f"{feed.rows} tokens of row {feed.row} were to be drafted by a head that drafts up "
                f"to {self.block.drafts} in a pass"
            )
        if feed.start + width - 1 + size > self.max_length:
            raise EngineError(
                f"a block of {size} positions at {feed.start + width - 1} would be written in a KV "
                f"buffer that has 0 to {self.max_length - 1}"
            )

    def _check_recursive(self, feed: Feed) -> None:
        """Refuse a feed after no block.

        Raises: EngineError.
        """
        begin, scores = self._left.get(feed.row, (0, None))
        scored = 0 if scores is None else scores.argmax.shape[1]
        if len(feed.tokens) != 1 or feed.rows != 1 or not 0 < feed.start - begin < scored:
            raise EngineError(
                f"a recursive feed of {len(feed.tokens)} tokens at {feed.start} is not after the "
                f"last block of row {feed.row}, which scored {scored} tokens from {begin} on"
            )

    def _place(self, row: int, start: int, first: int, last: int) -> None:
        """Say whose tokens `first` to `last` of the pass are, and that they stand from `start`."""
        self._slots[first:last] = row
        self._positions[first:last] = self._numbers[start : start + last - first]

    def _bind_block(self, context: int, blocks: int, scored: int, previous: int) -> None:
        """Bind what has another size than in the pass before; KV buffers are bound once."""
        if self._session is None:
            raise EngineError(CLOSED)
        if self._binding is None:
            binding = self._session.io_binding()
            for name, cache in self._caches.items():
                bind_input(binding, name, cache)
                bind_output(binding, f"present_{name}", cache)
            self._binding = binding  # with all of them, or an interruption leaves some out
        self._sizes = NO_SIZES  # an interruption leaves it half bound
        if not self._scores or self._scores["argmax"].shape[1] < scored:
            self._reserve_scores(scored)
        self._bind_input("input_ids", self._tokens[None], blocks)
        self._bind_input("slots", self._slots, context + blocks)
        self._bind_input("positions", self._positions, context + blocks)
        self._bind_input("rows", self._rows, scored)
        value = self._value("context", self._context[:, :context], context)
        self._binding.bind_ortvalue_input("context", value)
        for name, memory in self._scores.items():
            value = self._value(name, memory[:, :scored], scored)
            self._binding.bind_ortvalue_output(name, value)
        if self.block.chained:
            self._bind_input("previous", self._previous, previous)
            for name, memory in self._added.items():
                value = self._value(name, memory[:, :previous], previous)
                self._binding.bind_ortvalue_output(name, value)
        self._sizes = context, blocks, scored, previous

    def close(self) -> None:
        """Drop the session, the binding and the KV buffers."""
        super().close()
        self._sizes = NO_SIZES
        self._left.clear()


def _markov_memory(session: Any, batch: int) -> dict[str, NDArray[np.float32]]:
    """Return the memory of what a Markov head adds: [1, batch, entries], and [1, batch]."""
    entries, outputs = widths(session.get_outputs())["logits"], session.get_outputs()
    names = {output.name for output in outputs}
    memory = {"markov": np.zeros((1, batch, entries), np.float32)}
    if "markov_confidence" in names:
        memory["markov_confidence"] = np.zeros((1, batch), np.float32)
    return memory


def _copied(scores: RowScores) -> RowScores:
    """Return scores in memory of their own: other rows have passes before they are read."""
    confidence = None if scores.confidence is None else scores.confidence.copy()
    return RowScores(scores.argmax.copy(), scores.logits.copy(), confidence)


def _probability(odds: NDArray[np.float32], more: float) -> NDArray[np.float32]:
    """Return the probabilities of log odds to which some more are added."""
    # Beyond that the exponential of a float has no number, and the chance is 0 or 1.
    sure = np.clip(odds + np.float32(more), -80, 80)
    chances: NDArray[np.float32] = 1.0 / (1.0 + np.exp(-sure))
    return chances
