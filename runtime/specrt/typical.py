"""The typical set of a distribution: the tokens that surprise about as much as is expected.

Source: Meister et al. 2022, arXiv:2202.00666.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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

    Sorting a whole vocabulary takes 16 times as long as all else. Adding up in bins rounds
    otherwise than adding up in order: where the mass is met to the last bits, order decides.
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
