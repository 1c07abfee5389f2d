"""The nucleus of a row of logits: the fewest most likely tokens whose mass reaches top-p.

Source: Holtzman et al. 2020, arXiv:1904.09751.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MARGIN = 1e-4
"""By how much the mass of candidates must exceed top-p; sums in f32 are good to 1e-6."""
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
    with np.errstate(over="ignore"):  # beside a tiny temperature all but the peak is -inf
        weights /= temperature
    return np.exp(weights, out=weights)


def nucleus(weights: Weights, mass: float) -> NDArray[np.bool_]:
    """Mark the fewest largest weights that sum to `mass`; at least one."""
    return _largest(weights, _count(np.sort(weights)[::-1], mass))


def nucleus_of(
    logits: NDArray[np.float32], peak: float, temperature: float, top_p: float
) -> tuple[Ids, Weights]:
    """Return the nucleus of a whole vocabulary, ids ascending, and the weight of each token.

    One pass in f32 over the vocabulary finds the mass of all tokens and the few that matter, which
    are weighed again in f64.
    Shapes: logits [V] f32, the largest being `peak` -> [K], [K].
    """
    rough = _rough(logits, peak, temperature)
    total = float(rough.sum())
    ids, mass = _candidates(rough, total, top_p)
    weights = weigh(logits[ids], peak, temperature)
    mask = nucleus(weights, top_p * (float(weights.sum()) + max(0.0, total - mass)))
    return ids[mask], weights[mask]


def _rough(logits: NDArray[np.float32], peak: float, temperature: float) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # what is that far below the peak weighs nothing
        scaled = logits - np.float32(peak)
        scaled *= np.float32(1.0 / min(max(temperature, COLDEST), HOTTEST))
    rough: NDArray[np.float32] = np.exp(scaled, out=scaled)
    return rough


def _candidates(rough: NDArray[np.float32], total: float, top_p: float) -> tuple[Ids, float]:
    """Return tokens that the nucleus is among, and what they weigh together.

    Tokens below (1 - top_p) / V hold less than 1 - top_p together, so that the others always
    suffice; mostly far fewer do.
    """
    least = (1.0 - top_p) / len(rough) * 0.999
    share = (1.0 - top_p) / 256
    while True:
        share = max(share, least)
        ids = np.flatnonzero(rough >= np.float32(share * total))
        mass = float(rough[ids].sum(dtype=np.float64))
        if share == least or mass >= (top_p + MARGIN) * total:
            return ids, mass
        share /= 16


def _count(falling: Weights, mass: float) -> int:
    """Return how many of the weights, the largest first, it takes to reach a mass."""
    before = np.cumsum(falling) - falling
    return max(1, int(np.count_nonzero(before < mass)))


def _largest(weights: Weights, count: int) -> NDArray[np.bool_]:
    """Mark the `count` largest weights; of those that tie with the last, the first."""
    # Values, not indices: NumPy sorts those ten times as fast.
    last = np.partition(weights, len(weights) - count)[len(weights) - count]
    mask: NDArray[np.bool_] = weights > last
    ties = np.flatnonzero(weights == last)
    mask[ties[: count - int(np.count_nonzero(mask))]] = True
    return mask
