"""How far a quantized model is from the one it was made from, on a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Engine, Feed, PackedEngine
from specrt.geometry import Geometry
from specrt.manifest import Quality
from specrt_export.portable import GraphRun, Logits, Tokens

PASS_BYTES = 64 << 20
"""Logits of one pass; a larger vocabulary is scored in narrower passes."""

_ROWS = 16


class Scorer(Protocol):
    """A model that is fed one text at a time, from its beginning on."""

    geometry: Geometry

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        """Feed tokens [S] at `start`; return the logits [S, V] after each."""


class GraphScorer:
    """A portable graph as a scorer."""

    def __init__(self, run: GraphRun, length: int) -> None:
        self.geometry = run.geometry
        self._run = run
        self._length = length

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        """See `Scorer`."""
        if start == 0:
            self._run.reset(batch=1, length=self._length)
        logits: Logits = self._run(tokens[None], [start], range(len(tokens)))[0][0]
        return logits


class EngineScorer:
    """A compiled engine as a scorer; of an engine of several rows that packs them, the first."""

    def __init__(self, engine: Engine) -> None:
        self.geometry = engine.geometry
        self._engine = engine

    def __call__(self, tokens: Tokens, start: int) -> Logits:
        """See `Scorer`."""
        if isinstance(self._engine, PackedEngine):
            feed = Feed(0, tokens.tolist(), start, len(tokens))
            logits: Logits = self._engine.forward_rows([feed])[0].logits[0]
            return logits.copy()
        batch = self._engine.batch  # other engines run all rows, here with the same tokens
        # Every row has logits of its own, so as many passes keep their memory the same.
        width = -(-len(tokens) // batch)
        rows = []
        for at in range(0, len(tokens), width):
            piece = np.broadcast_to(tokens[at : at + width], (batch, len(tokens[at : at + width])))
            rows.append(self._engine.forward(piece, [start + at] * batch).logits[0].copy())
        return np.concatenate(rows)


def measure(reference: Scorer, quantized: Scorer, pieces: Sequence[Tokens]) -> Quality:
    """Score pieces with both models, position by position.

    `kl` is the mean over positions of the sum of p·log(p / q), in nats; p is the reference's
    distribution. `top1` is the share of positions where both have the same likeliest token.
    """
    divergence, agreed, tokens = 0.0, 0, 0
    for piece in pieces:
        for one, other in _both(reference, quantized, piece):
            divergence += float(divergences(one, other).sum())
            agreed += int((one.argmax(-1) == other.argmax(-1)).sum())
            tokens += len(one)
    return Quality(kl=max(0.0, divergence / tokens), top1=agreed / tokens, tokens=tokens)


def _both(reference: Scorer, quantized: Scorer, piece: Tokens) -> Iterator[tuple[Logits, Logits]]:
    """Yield a few rows of logits of both models at a time, until the piece is through."""
    vocab = reference.geometry.vocab_size
    piece = piece[piece < vocab]
    # A power of two divides most pieces: an engine binds memory anew for each width it meets.
    width = 1 << max(0, (PASS_BYTES // (4 * vocab)).bit_length() - 1)
    for start in range(0, len(piece), width):
        part = piece[start : start + width]
        one, other = reference(part, start), quantized(part, start)
        for row in range(0, len(part), _ROWS):
            yield one[row : row + _ROWS], other[row : row + _ROWS]


def divergences(one: Logits, other: Logits) -> NDArray[np.float64]:
    """Return the KL divergence of each row [R, V] of logits, in nats; infinite for no numbers."""
    first, second = _log_softmax(one), _log_softmax(other)
    weight = np.exp(first)
    with np.errstate(invalid="ignore"):  # -inf in both, of a token that cannot be
        found = np.where(weight != 0, weight * (first - second), 0.0).sum(-1)
    return np.where(np.isnan(found), np.inf, found)


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted
