"""Heads: small drafts that read, next to each token, the features that the target left before it.

Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.engine.protocol import (
    CudaGraphs,
    Engine,
    EngineTraits,
    Feed,
    Output,
    PackedEngine,
    RowsEngine,
    cuda_graphs,
)
from specrt.errors import EngineError


class HeadEngine:
    """A head next to its target, fed with tokens at their own positions as any draft is.

    A token x at position t is paired with the feature of position t - 1, which the target computed
    when it read the text up to there; the pair stands at position t - 1 of the head's own KV
    buffers. A recursive feed, of a token that the head drafted itself, is paired with what the
    head's last pass of that row left instead. The first token of a text has no pair.

    Features are read where the target's engine keeps them, so that rounds without the head, long
    prompts and rollback need nothing else.
    Shapes: `features` is [batch, max_length, width] f32, the target's own memory.
    """

    def __init__(
        self, engine: PackedEngine, features: NDArray[np.float32], *, remembers: bool = True
    ) -> None:
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.close = engine.close
        self.max_rows = engine.max_rows
        self.traits = EngineTraits(scored=engine.traits.scored, remembers=remembers)
        self.engine = engine
        """What it runs, over pairs."""
        self.features = features
        self._states = np.zeros((engine.batch, 1, features.shape[-1]), np.float32)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass of one row; see `Engine.forward`.

        Raises: EngineError on an engine of several rows, which `forward_rows` serves.
        """
        return self.forward_rows((feed_of(self, tokens, start, rows),))[0]

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        outputs: Sequence[Any] = self.engine.forward_rows([self._paired(feed) for feed in feeds])
        for feed, output in zip(feeds, outputs, strict=True):
            self._states[feed.row, 0] = output.state[0, -1]
        return outputs

    def _paired(self, feed: Feed) -> Feed:
        pair = paired(feed)
        if pair.recursive:
            return pair._replace(hidden=self._states[pair.row])
        end = pair.start + len(pair.tokens)
        return pair._replace(hidden=self.features[pair.row, pair.start : end])

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy what was fed of the first `length` tokens to another row."""
        self.engine.copy_row(source, to, max(0, length - 1))


def paired(feed: Feed) -> Feed:
    """Return a feed of tokens as one of their pairs, at the positions of a head's KV buffers.

    Raises: EngineError for a recursive feed of several tokens.
    """
    tokens, start = feed.tokens, feed.start
    if feed.recursive:
        if len(tokens) != 1:
            raise EngineError(f"a recursive feed has {len(tokens)} tokens; expected 1")
        return feed._replace(start=start - 1)
    if start == 0 and len(tokens) > 1:
        tokens, start = tokens[1:], 1
    # A first token that comes alone stands where the second one will, until that is fed.
    first = max(0, start - 1)
    return feed._replace(tokens=tokens, start=first, rows=min(feed.rows, len(tokens)))


def feed_of(head: Engine, tokens: ArrayLike, start: ArrayLike, rows: int | None) -> Feed:
    """Return what the one row of a head is fed.

    Raises: EngineError on a head of several rows.
    """
    fed = np.asarray(tokens, np.int64)
    if head.batch != 1 or fed.ndim != 2 or len(fed) != 1:
        raise EngineError(
            f"tokens of shape {list(fed.shape)} were fed to a head of {head.batch} rows; "
            "expected [1, width] on one row, and forward_rows on several"
        )
    own = fed[0].tolist()
    return Feed(0, own, int(np.asarray(start).item()), rows or len(own))


class TrimmedOutput:
    """The output of a draft that scores some entries of the vocabulary, as if it scored all."""

    def __init__(self, output: Output, entries: NDArray[np.int32], vocabulary: int) -> None:
        self._output = output
        self._entries = entries
        self._vocabulary = vocabulary
        self.argmax, self.confidence = output.argmax, output.confidence

    @property
    def logits(self) -> NDArray[np.float32]:
        """See `Output`; minus infinity where nothing is scored."""
        scored = self._output.logits
        logits = np.full((*scored.shape[:-1], self._vocabulary), -np.inf, np.float32)
        logits[..., self._entries] = scored
        return logits

    @property
    def candidates(self) -> None:
        """None: what is likeliest is in `logits`."""
        return None


class TrimmedEngine:
    """A draft whose last projection has some entries of the vocabulary only.

    Its graph returns ids of the target's vocabulary as `argmax`; `entries` are the ids that its
    logits are of.
    Shapes: entries [scored] int32.
    """

    def __init__(self, engine: Engine, entries: NDArray[np.int32]) -> None:
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.max_rows = engine.max_rows
        self.traits = replace(engine.traits, scored=None)
        self.close = engine.close
        self.engine = engine
        """What it runs; ids in its `argmax` are the target's."""
        self._entries = entries

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """See `cuda_graphs`."""
        return cuda_graphs(self.engine)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass; see `Engine.forward`."""
        return self._told(self.engine.forward(tokens, start, rows))

    def _told(self, output: Output) -> Output:
        return TrimmedOutput(output, self._entries, self.geometry.vocab_size)


class TrimmedRows(TrimmedEngine):
    """The same of an engine that is fed rows, and copies them where that one does."""

    def __init__(self, engine: Engine, rows: RowsEngine, entries: NDArray[np.int32]) -> None:
        super().__init__(engine, entries)
        self._forward_rows = rows.forward_rows
        if isinstance(engine, PackedEngine):
            self.copy_row = engine.copy_row

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        return [self._told(output) for output in self._forward_rows(feeds)]


def trimmed(engine: Engine, entries: NDArray[np.int32]) -> Engine:
    """Return an engine of some entries of the vocabulary as one of all."""
    if isinstance(engine, RowsEngine):
        return TrimmedRows(engine, engine, entries)
    return TrimmedEngine(engine, entries)
