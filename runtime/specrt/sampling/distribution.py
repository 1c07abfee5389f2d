"""From a row of logits to a distribution, a token, and log-probabilities. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import Output
from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise, Purpose

COLDEST = 1e-25
"""Below this all tokens but the likeliest weigh nothing anyway."""

HOTTEST = 1e37
"""Above this all tokens weigh the same anyway, and f32 would take one over it for 0."""

Ids = NDArray[np.int64]

Weights = NDArray[np.float64]


def weigh(logits: NDArray[np.float32], peak: float, temperature: float) -> Weights:
    """Return exp((logit - peak) / temperature)."""
    # In place: fresh memory costs as much as the arithmetic.
    weights: Weights = np.subtract(logits, peak, dtype=np.float64)
    with np.errstate(over="ignore"):  # next to a tiny temperature all but the peak is -inf
        weights /= temperature
    return np.exp(weights, out=weights)


def nucleus(weights: Weights, mass: float) -> NDArray[np.bool_]:
    """Mark the fewest largest weights that sum to `mass`; at least one."""
    return _largest_first(weights, _count(_before(weights), mass))


def nucleus_of(
    logits: NDArray[np.float32], peak: float, temperature: float, top_p: float
) -> tuple[Ids, Weights]:
    """Return the nucleus of a whole vocabulary, ids ascending, and the weight of each token.

    One pass in f32 leaves out tokens that hold less than 1 - top_p together; the others are weighed
    in f64 and sorted. Where rounding of what the tokens left out weigh could change the nucleus,
    all are weighed in f64.
    Shapes: logits [V] f32, the largest being `peak` -> [K], [K].
    """
    rough = _rough(logits, peak, temperature)
    total = float(rough.sum(dtype=np.float64))
    ids = np.flatnonzero(rough >= np.float32(0.999 * (1.0 - top_p) / len(rough) * total))
    rest = total - float(rough[ids].sum(dtype=np.float64))
    weights = weigh(logits[ids], peak, temperature)
    before, mass = _before(weights), top_p * (float(weights.sum()) + rest)
    if len(ids) < len(logits) and np.abs(before - mass).min() < 1e-4 * rest + 1e-12 * total:
        mass = top_p * float(weigh(logits, peak, temperature).sum())
    mask = _largest_first(weights, _count(before, mass))
    return ids[mask], weights[mask]


def _rough(logits: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is that far below the peak weighs nothing
        scaled = logits - np.float32(peak)
        scaled *= np.float32(1.0 / min(max(temperature, COLDEST), HOTTEST))
    rough: NDArray[np.float32] = np.exp(scaled, out=scaled)
    return rough


def _before(weights: Weights) -> Weights:
    """Return the mass of the weights before each, the largest first."""
    falling = np.sort(weights)[::-1]
    before: Weights = np.cumsum(falling) - falling
    return before


def _count(before: Weights, mass: float) -> int:
    """Return how many tokens it takes to reach a mass, by the mass before each."""
    return max(1, int(np.count_nonzero(before < mass)))


def _largest_first(weights: Weights, count: int) -> NDArray[np.bool_]:
    """Mark the `count` largest weights; of those that tie with the last, the first."""
    # Values, not indices: NumPy sorts those ten times as fast.
    last = np.partition(weights, len(weights) - count)[len(weights) - count]
    mask: NDArray[np.bool_] = weights > last
    ties = np.flatnonzero(weights == last)
    mask[ties[: count - int(np.count_nonzero(mask))]] = True
    return mask


_BINS = 4096

_ULP = 2.0**-52

Numbers = NDArray[np.float64]


def typical(weights: Numbers, mass: float) -> NDArray[np.bool_]:
    """Mark the tokens whose surprise is nearest to what is expected, up to a mass; at least one.

    Tokens as far off as the last one taken are all taken.
    Shapes: weights [K] f64, positive -> [K].
    """
    total = weights.sum()
    probs = weights / total
    away = np.log(weights)
    np.subtract(np.log(total), away, out=away)  # of a share that is too small for a number, too
    away -= (probs * away).sum()
    np.abs(away, out=away)
    limit = _nearby(probs, away, mass)
    mask: NDArray[np.bool_] = away <= (_limit(probs, away, mass) if limit is None else limit)
    return mask


def _limit(probs: Numbers, away: Numbers, mass: float) -> float:
    """Return how far off the last token is that it takes to reach a mass."""
    order = np.argsort(away, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    return float(away[order[max(1, int(np.count_nonzero(before < mass))) - 1]])


def _nearby(probs: Numbers, away: Numbers, mass: float) -> float | None:
    """Return the same, having sorted only tokens about as far off; None where that cannot tell.

    Sorting a whole vocabulary takes 16 times as long as all else. Sums over bins round differently
    from sums in order: where the mass is met to the last bits, order decides.
    """
    farthest = float(away.max())
    if not farthest > 0.0:
        return None
    bins = (away * (_BINS / max(farthest, 1e-9))).astype(np.int32)
    reached = np.cumsum(np.bincount(bins, weights=probs))
    at = int(np.searchsorted(reached, mass))
    doubt = 8 * len(probs) * _ULP
    if at == len(reached) or reached[at] - mass < doubt:
        return None
    members = np.flatnonzero(bins == at)
    members = members[np.argsort(away[members], kind="stable")]
    before = np.cumsum(probs[members]) - probs[members]
    before += reached[at - 1] if at else 0.0
    if np.abs(before - mass).min() < doubt:
        return None
    return float(away[members[max(1, int(np.count_nonzero(before < mass))) - 1]])


@dataclass(frozen=True)
class Distribution:
    """The tokens that may come next, and how likely each is.

    Shapes: ids [K] int64, ascending; probs [K] f64, summing to 1, none negative.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Return the probability of one token, 0 where it is not among the candidates."""
        at = int(np.searchsorted(self.ids, token))
        present = at < len(self.ids) and self.ids[at] == token
        return float(self.probs[at]) if present else 0.0

    def draw(self, noise: Noise, purpose: Purpose, position: int) -> int:
        """Draw a token by the Gumbel-max trick, with noise that depends on the position only.

        The largest log p + Gumbel is the smallest exponential / p, which takes fewer logarithms.
        Source: Gumbel 1954; Daliri et al. 2024, arXiv:2408.07978 (shared noise in drafting).
        """
        waits = noise.exponential(purpose, position, self.ids)
        with np.errstate(
            over="ignore", divide="ignore"
        ):  # what is next to impossible waits for ever
            waits /= self.probs
        return int(self.ids[waits.argmin()])


def residual(
    target: Distribution, draft: Distribution | None, token: int, weight: float = 1.0
) -> Distribution:
    """Return norm(max(0, weight * p - q)); a draft of None put all its mass on `token`.

    Where nothing is left, as of p and q that are equal, the target itself is returned.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; with a weight Sun et al. 2024,
        arXiv:2403.10444, Equation 4.
    """
    left = target.probs * weight
    if draft is None:
        left[target.ids == token] = 0.0
    else:
        shared, probs = _shared(target, draft)
        left[shared] -= probs
    keep = left > 0.0
    if not keep.any():
        return target
    return Distribution(target.ids[keep], left[keep] / left[keep].sum())


def overlap(target: Distribution, draft: Distribution, weight: float) -> float:
    """Return the sum of min(weight * p, q): of a residual the mass is `weight` less this."""
    shared, probs = _shared(target, draft)
    return float(np.minimum(target.probs[shared] * weight, probs).sum())


def _shared(target: Distribution, draft: Distribution) -> tuple[Ids, Weights]:
    """Return where in the target the tokens are that both have, and the draft's share of each."""
    # The draft has the fewer tokens: it leaves out what is unlikely.
    at = np.minimum(np.searchsorted(target.ids, draft.ids), len(target.ids) - 1)
    both = target.ids[at] == draft.ids
    return at[both], draft.probs[both]


def distribution_of(
    output: Output,
    row: int,
    params: SamplingParams,
    reach: float = inf,
    vocabulary: int | None = None,
) -> Distribution:
    """Return what may follow a row of a pass: from the engine's candidates where they are enough.

    Then no logits are read, and the distribution is that of the whole row, bit for bit; with
    `reach`, candidates always do. Ids from `vocabulary` on are left out.
    Raises: EngineError when a logit is not a number.
    """
    candidates = output.candidates
    if candidates is not None:
        if output.argmax[0, row] < 0:  # candidates do not show a NaN somewhere in the row
            raise not_a_number()
        scores, ids = candidates[0][0, row], candidates[1][0, row]
        if vocabulary is not None:
            known = ids < vocabulary
            scores, ids = scores[known], ids[known]
        if len(ids) and (reach < inf or _suffice(scores, params)):
            order = ids.argsort()
            known = process(scores[order], params, reach)
            return Distribution(ids[order][known.ids], known.probs)
    return process(output.logits[0, row, :vocabulary], params, reach)


def _suffice(falling: NDArray[np.float32], params: SamplingParams) -> bool:
    """Tell whether the best scores of a row give the distribution of the whole row.

    They do where the k-th best is above the last one: all that top-k keeps is there, ties included,
    and later filters look at those alone. They also do where the last one weighs less than min-p
    allows, or nothing: no token after it weighs more. Only top-p without top-k sums the whole row.
    """
    last, k = float(falling[-1]), params.top_k
    if 0 < k < len(falling) and last < falling[k - 1]:
        return True
    if params.top_p < 1.0:
        return False
    peak = float(falling[0])
    # Not by the weights: next to rounding, and where they are denormal, order does not hold.
    least = log(params.min_p) - 1e-6 if params.min_p > 1e-300 else -800.0
    return (last - peak) / params.temperature < least


def process(
    logits: NDArray[np.float32], params: SamplingParams, reach: float = inf
) -> Distribution:
    """Apply temperature, then top-k, top-p and min-p, in the order transformers applies them.

    `reach` leaves out tokens that are less likely than exp(-reach) of the likeliest before
    anything else: a draft need not be exact, and it saves looking at the whole vocabulary.
    Shapes: logits [V] f32, any row of a pass.
    Raises: EngineError when a logit is not a number.
    """
    peak = float(logits.max())
    if not np.isfinite(peak):  # a NaN anywhere is the maximum
        raise not_a_number()
    ids = _candidates(logits, peak, params, reach)
    if ids is None and params.top_p < 1.0:
        ids, weights = nucleus_of(logits, peak, params.temperature, params.top_p)
    else:
        weights = weigh(logits if ids is None else logits[ids], peak, params.temperature)
        ids = np.arange(len(logits)) if ids is None else ids
        if params.top_p < 1.0:
            mask = nucleus(weights, params.top_p * float(weights.sum()))
            ids, weights = ids[mask], weights[mask]
    mask = weights > 0.0
    if params.min_p > 0.0:
        mask &= weights >= params.min_p * weights.max()
    if not mask.all():
        ids, weights = ids[mask], weights[mask]
    if params.typical_p < 1.0:
        near = np.flatnonzero(typical(weights, params.typical_p))
        ids, weights = ids[near], weights[near]
    weights /= weights.sum()
    return Distribution(ids, weights)


def _candidates(
    logits: NDArray[np.float32], peak: float, params: SamplingParams, reach: float
) -> NDArray[np.int64] | None:
    """Return the ids that top-k and `reach` leave, ascending; None where they leave all."""
    ids = None
    if reach < inf:
        with np.errstate(over="ignore"):  # where it is so hot, nothing is left out
            least = np.float32(peak - reach * params.temperature)
        ids = np.flatnonzero(logits >= least)
    k = params.top_k
    if 0 < k < (len(logits) if ids is None else len(ids)):
        return _top_k(logits, peak, k) if ids is None else ids[_largest(logits[ids], k)]
    return ids


def _top_k(logits: NDArray[np.float32], peak: float, k: int) -> NDArray[np.int64]:
    """Return the ids of the k largest logits, looking closely only at those near the peak."""
    width = 4.0
    near = np.flatnonzero(logits >= peak - width)
    while len(near) < k:  # in doubling steps down from the peak: a partition of all is slower
        width *= 2.0
        near = np.flatnonzero(logits >= peak - width)
        if width > 1e3:
            near = np.arange(len(logits))
    return near[_largest(logits[near], k)]


def _largest(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return where the k best scores are, and those that tie with the last, ascending."""
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= threshold)


def not_a_number() -> EngineError:
    """Return the error for logits no token may be chosen from."""
    return EngineError(
        "the model returned logits that are not numbers (NaN or infinite); no token was chosen "
        "from them. Check the checkpoint, and the precision if it is below fp32"
    )


LEAST = -9999.0
"""In JSON, which knows no infinity, the log-probability of a token that the model rules out."""

_BLOCK = 1 << 20
"""Scores that are turned into f64 at a time."""


class Logprob(NamedTuple):
    """The probability of one token by the target; the names are vLLM's."""

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
"""By token, of one position: the token of the output, then the others among the likeliest."""


class Ranked(NamedTuple):
    """Log-probabilities and ranks of one token in each row of scores, and of the K likeliest.

    Shapes: ids and logprobs [N, 1 + K], the token of the output first, the likeliest falling behind
        it; ranks [N], those of the tokens of the output.
    """

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int64]

    def entries(self, count: int, text: Callable[[int], str]) -> list[Entry]:
        """Return the first `count` rows as entries; `text` decodes a token."""
        rows = zip(self.ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        entries = []
        for (token, *others), (own, *falling), rank in [*rows][:count]:
            entry = {token: Logprob(own, rank, text(token))}
            for place, (other, logprob) in enumerate(zip(others, falling, strict=True), 1):
                if other != token:
                    entry[other] = Logprob(logprob, place, text(other))
            entries.append(entry)
        return entries


def ranked(logits: NDArray[np.float32], tokens: Sequence[int], k: int) -> Ranked:
    """Rank, in each row, the token that followed it and the k likeliest.

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
