"""From a row of logits to a distribution, and from a distribution to a token. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt.noise import Noise, Purpose
from specrt.params import SamplingParams


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

        Source: Gumbel 1954; Daliri et al. 2024, arXiv:2408.07978 (shared noise in drafting).
        """
        keys = np.log(self.probs) + noise.gumbel(purpose, position, self.ids)
        return int(self.ids[int(np.argmax(keys))])


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


def process(logits: NDArray[np.float32], params: SamplingParams) -> Distribution:
    """Apply temperature, then top-k, top-p and min-p, in the order transformers applies them.

    Shapes: logits [V] f32, any row of a pass.
    Raises: EngineError when a logit is not a number.
    """
    scores = logits.astype(np.float64)
    peak = float(scores.max())
    if not np.isfinite(peak):  # a NaN anywhere is the maximum
        raise not_a_number()
    with np.errstate(over="ignore"):  # beside a tiny temperature all but the peak is -inf
        scores = (scores - peak) / params.temperature
    ids = _top_k(scores, params.top_k)
    weights = np.exp(scores[ids])
    probs = weights / weights.sum()
    if params.top_p < 1.0:
        ids, probs = _keep(ids, probs, _nucleus(probs, params.top_p))
    if params.min_p > 0.0:
        ids, probs = _keep(ids, probs, probs >= params.min_p * probs.max())
    return Distribution(*_keep(ids, probs, probs > 0.0))


def _keep(
    ids: NDArray[np.int64], probs: NDArray[np.float64], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if mask.all():
        return ids, probs
    return ids[mask], probs[mask] / probs[mask].sum()


def _top_k(scores: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Return the ids of the k best scores and of those that tie with the last, ascending."""
    if k <= 0 or k >= len(scores):
        return np.arange(len(scores))
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.flatnonzero(scores >= threshold)


def _nucleus(probs: NDArray[np.float64], top_p: float) -> NDArray[np.bool_]:
    """Mark the fewest most likely tokens whose mass reaches top_p; at least one.

    Source: Holtzman et al. 2020, arXiv:1904.09751.
    """
    # Tokens below (1 - top_p) / K hold less than 1 - top_p together, so the rest reach top_p
    # without them, and only the rest need sorting: a few dozen of a large vocabulary.
    likely = np.flatnonzero(probs >= (1.0 - top_p) / len(probs))
    order = likely[np.argsort(-probs[likely], kind="stable")]
    before = np.cumsum(probs[order]) - probs[order]
    mask = np.zeros(len(probs), np.bool_)
    mask[order[before < top_p]] = True
    mask[order[0]] = True
    return mask


def require_number(token: int, logit: float) -> None:
    """Refuse the argmax of a row that holds a NaN, an infinity, or only masked tokens.

    The engine gives -1 for a row with a NaN; the best logit tells the rest.
    """
    if token < 0 or not -inf < logit < inf:
        raise not_a_number()


def not_a_number() -> EngineError:
    """Return the error for logits no token may be chosen from."""
    return EngineError(
        "the model returned logits that are not numbers (NaN or infinite); no token was chosen "
        "from them. Check the checkpoint, and the precision if it is below fp32"
    )
