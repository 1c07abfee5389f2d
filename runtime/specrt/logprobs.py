"""Log-probabilities of tokens: what the target's own scores say, before anything edits them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.sampling import not_a_number

LEAST = -9999.0
"""What JSON, which knows no infinity, says of a token that the model rules out."""
_BLOCK = 1 << 20
"""Scores that are turned into f64 at a time."""


class Logprob(NamedTuple):
    """What the target thought of one token; the names are vLLM's."""

    logprob: float
    """Natural logarithm of its probability: -inf where the score is."""
    rank: int
    """1 for the likeliest; of equal scores the lower id comes first."""
    decoded_token: str
    """The text of the token alone; empty for special tokens."""

    def to_json(self) -> dict[str, Any]:
        """Return the public JSON object."""
        return {**self._asdict(), "logprob": max(self.logprob, LEAST)}


Entry = dict[int, Logprob]
"""What is told of one position: the token that came, then the others among the likeliest."""


class Ranked(NamedTuple):
    """What rows of scores say of one token each, and of the K likeliest.

    Shapes: ids and logprobs [N, 1 + K], the token asked about first, the likeliest falling behind
        it; ranks [N], those of the tokens asked about.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int64]

    def entries(self, count: int, text: Callable[[int], str]) -> list[Entry]:
        """Return what the first `count` rows say; `text` decodes a token."""
        rows = zip(self.ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        found = []
        for (token, *others), (own, *falling), rank in [*rows][:count]:
            entry = {token: Logprob(own, rank, text(token))}
            for place, (other, logprob) in enumerate(zip(others, falling, strict=True), 1):
                if other != token:
                    entry[other] = Logprob(logprob, place, text(other))
            found.append(entry)
        return found


def ranked(logits: NDArray[np.float32], tokens: Sequence[int], k: int) -> Ranked:
    """Return what each row says of the token that came after it, and of the k likeliest.

    Shapes: logits [N, V] f32, one token for each row.
    Raises: EngineError when scores are not numbers.
    """
    chosen = np.asarray(tokens, np.int64)
    peaks = logits.max(-1).astype(np.float64)
    if not np.isfinite(peaks).all():  # a NaN anywhere is the maximum
        raise not_a_number()
    best = [_likeliest(row, float(peak), k) for row, peak in zip(logits, peaks, strict=True)]
    ids = np.column_stack((chosen, np.reshape(best, (len(chosen), -1)).astype(np.int64)))
    scores = np.take_along_axis(logits, ids, -1).astype(np.float64)
    logprobs = (scores - peaks[:, None]) - np.log(_masses(logits, peaks))[:, None]
    return Ranked(ids, logprobs, _ranks(logits, chosen))


def joined(parts: Sequence[Ranked]) -> Ranked:
    """Return the rows of several parts, in their order; of none, no rows."""
    if not parts:
        return Ranked(np.empty((0, 1), np.int64), np.empty((0, 1)), np.empty(0, np.int64))
    return Ranked(*map(np.concatenate, zip(*parts, strict=True)))


def _masses(logits: NDArray[np.float32], peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of exp(score - peak) of each row."""
    at_once = max(1, _BLOCK // logits.shape[-1])
    masses = np.empty(len(logits))
    for first in range(0, len(logits), at_once):
        rows = slice(first, first + at_once)
        weights = logits[rows].astype(np.float64)
        weights -= peaks[rows, None]
        masses[rows] = np.exp(weights, out=weights).sum(-1)
    return masses


def _ranks(logits: NDArray[np.float32], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 1 plus how many tokens come before the chosen one of each row."""
    scores = np.take_along_axis(logits, chosen[:, None], -1)
    before = np.count_nonzero(logits > scores, -1)
    equals = [np.count_nonzero(row[:t] == row[t]) for row, t in zip(logits, chosen, strict=True)]
    ranks: NDArray[np.int64] = 1 + before + np.asarray(equals, np.int64)
    return ranks


def _likeliest(row: NDArray[np.float32], peak: float, k: int) -> NDArray[np.int64]:
    """Return the ids of the k best scores, falling; of equal ones the lower id comes first."""
    k = min(k, len(row))
    if k == 0:
        return np.empty(0, np.int64)
    width, near = 4.0, np.flatnonzero(row >= peak - 4.0)
    while len(near) < k:  # in doubling steps down from the peak: a partition of all is slower
        width *= 2.0
        near = np.flatnonzero(row >= peak - width) if width < 1e3 else np.arange(len(row))
    scores = row[near]
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    near = near[scores >= least]
    ids: NDArray[np.int64] = near[np.argsort(-row[near], kind="stable")[:k]]
    return ids
