"""From a row of logits to a distribution, and from a distribution to a token. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from specrt.engine import Output, candidates_of
from specrt.errors import EngineError
from specrt.noise import Noise, Purpose
from specrt.nucleus import nucleus, nucleus_of, weigh
from specrt.params import SamplingParams
from specrt.typical import typical


@dataclass(frozen=True)
class Distribution:
    """The tokens that may come next, and how likely each is.

    Shapes: ids [K] int64, ascending; probs [K] f64, positive, summing to 1.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Return the probability of one token, 0 where it is not among the candidates."""
        at = int(np.searchsorted(self.ids, token))
        found = at < len(self.ids) and self.ids[at] == token
        return float(self.probs[at]) if found else 0.0

    def draw(self, noise: Noise, purpose: Purpose, position: int) -> int:
        """Draw a token by the Gumbel-max trick, with noise that depends on the position only.

        The largest log p + Gumbel is the smallest exponential / p, which takes fewer logarithms.
        Source: Gumbel 1954; Daliri et al. 2024, arXiv:2408.07978 (shared noise in drafting).
        """
        waits = noise.exponential(purpose, position, self.ids)
        waits /= self.probs
        return int(self.ids[waits.argmin()])


def residual(target: Distribution, draft: Distribution | None, token: int) -> Distribution:
    """Return norm(max(0, p - q)); a draft of None put all its mass on `token`.

    Where p and q are equal nothing is left, and the target itself is returned.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1.
    """
    left = target.probs.copy()
    if draft is None:
        left[target.ids == token] = 0.0
    else:
        at = np.minimum(np.searchsorted(draft.ids, target.ids), len(draft.ids) - 1)
        left -= np.where(draft.ids[at] == target.ids, draft.probs[at], 0.0)
    keep = left > 0.0
    if not keep.any():
        return target
    return Distribution(target.ids[keep], left[keep] / left[keep].sum())


def distribution_of(
    output: Output,
    row: int,
    params: SamplingParams,
    reach: float = inf,
    vocabulary: int | None = None,
) -> Distribution:
    """Return what may follow a row of a pass: from the engine's candidates where they tell it.

    Then no logits are read, and the distribution is that of the whole row, bit for bit; unless
    `reach` is asked for, with which candidates always do. Ids from `vocabulary` on are left out.
    Raises: EngineError when a logit is not a number.
    """
    candidates = candidates_of(output)
    if candidates is not None:
        if output.argmax[0, row] < 0:  # candidates do not show a NaN somewhere in the row
            raise not_a_number()
        scores, ids = candidates[0][0, row], candidates[1][0, row]
        if vocabulary is not None:
            known = ids < vocabulary
            scores, ids = scores[known], ids[known]
        if len(ids) and (reach < inf or _tell_all(scores, params)):
            order = ids.argsort()
            found = process(scores[order], params, reach)
            return Distribution(ids[order][found.ids], found.probs)
    return process(output.logits[0, row, :vocabulary], params, reach)


def _tell_all(falling: NDArray[np.float32], params: SamplingParams) -> bool:
    """Tell whether every token that `process` would keep is among the best, and ends up the same.

    So it is where the k-th best is above the last one: all that top-k keeps is there, ties
    included, and what comes after looks at those alone. So it is, too, where the last one weighs
    less than min-p asks for, or nothing: no token behind it weighs more. Only top-p without top-k
    adds up the whole row.
    """
    last, k = float(falling[-1]), params.top_k
    if 0 < k < len(falling) and last < falling[k - 1]:
        return True
    if params.top_p < 1.0:
        return False
    peak = float(falling[0])
    # Not by the weights: beside rounding, and where they are denormal, order does not hold.
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
