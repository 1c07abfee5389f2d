"""How far to draft, given costs and chances: an optimal stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

NEVER = 2.0
"""A reach that no token has."""


class Plan(NamedTuple):
    """Where a round stops.

    The reach of a token is the chance that it and all before it are kept.
    """

    gamma: int
    """The best number of tokens to draft where all look alike."""
    rate: float
    """Tokens per nanosecond that this comes to: what a nanosecond is worth."""
    keep: list[float]
    """At index k, the reach the k-th token needs to be verified."""
    more: list[float]
    """At index k, the reach needed after k tokens to draft another."""


class Prices(NamedTuple):
    """What a round costs by the number of its drafted tokens.

    Units: nanoseconds.
    """

    verify: Sequence[float]
    draft: Sequence[float]
    total: Sequence[float]
    wider: Sequence[float]
    """At index k, what verifying one token more than k adds."""
    step: Sequence[float]
    """At index k, what drafting one token more than k adds."""
    landings: Sequence[int]
    """At index k, how far a draft that goes beyond k tokens is best planned: see `landings`."""

    @classmethod
    def of(cls, verify: Sequence[float], draft: Sequence[float], outside: float) -> Prices:
        """Return the prices of engines with these costs."""
        total = [v + d + outside for v, d in zip(verify, draft, strict=True)]
        wider = [after - before for before, after in pairwise(verify)]
        step = [after - before for before, after in pairwise(draft)]
        return cls(verify, draft, total, wider, step, landings(total))


def landings(total: Sequence[float]) -> list[int]:
    """Return, for each gamma, the next one on the lower convex hull of the costs.

    Where widths cost in stairs, as the profiles of some engines do, one more token may cost a
    whole stair, and only the end of the stair is worth climbing to.
    """
    hull: list[int] = []
    for i, cost in enumerate(total):
        while len(hull) > 1:
            low, high = hull[-2:]
            if (total[high] - total[low]) * (i - low) < (cost - total[low]) * (high - low):
                break
            hull.pop()
        hull.append(i)
    return [high for low, high in pairwise(hull) for _ in range(low, high)]


def plan(
    prices: Prices,
    chances: Sequence[float],
    surest: Sequence[float],
    share: float,
    rate: float,
) -> Plan:
    """Plan a round.

    `chances` are those of a token at each place, `surest` those of the surest tokens there, which
    are a `share` of all. `rate` is what there is to beat: tokens per nanosecond without drafting.
    A token is worth the time the best round takes to emit one. Drafting another costs a draft step
    and, where it is kept, a wider verify pass; it pays when its chance times the reach so far is
    worth more, either whatever it turns out to be, or if it is kept only when it is sure. Since
    the reach only falls, looking one token ahead is optimal where every width costs as much more
    as the one before (the monotone case); where it does not, the next landing is tried too.
    Source: Chow, Robbins and Siegmund 1971, Great Expectations, chapter 3.
    """
    gamma, rate = _best(prices.total, chances, rate)
    keep, more = [0.0], []
    spans = _spans(prices.landings, chances)
    steps = zip(prices.wider, prices.step, chances, surest, prices.landings, strict=True)
    for k, (wider, step, chance, sure, end) in enumerate(steps):
        least = wider
        enough = min((wider + step) / chance, (wider + step / share) / sure)
        if end > k + 1:
            climb = prices.total[end] - prices.total[k]
            enough = min(enough, climb / spans[k])
            least = min(least, (climb - step) * chance / spans[k])
        more.append(enough * rate)
        keep.append(least * rate)
    more.append(NEVER)
    return Plan(gamma, rate, keep, more)


def _best(total: Sequence[float], chances: Sequence[float], rate: float) -> tuple[int, float]:
    """Return the gamma that emits most tokens per nanosecond, and how many it does."""
    gamma = 0
    tokens = reach = 1.0
    for k, chance in enumerate(chances, 1):
        reach *= chance
        tokens += reach
        if tokens > rate * total[k]:
            gamma, rate = k, tokens / total[k]
    return gamma, rate


def _spans(ends: Sequence[int], chances: Sequence[float]) -> list[float]:
    """Return, at index k, the tokens expected between k and its landing, given k are kept."""
    spans = list(chances)
    for k in range(len(chances) - 2, -1, -1):
        if ends[k] > k + 1:
            spans[k] *= 1.0 + spans[k + 1]
    return spans
