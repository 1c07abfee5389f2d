"""How far to draft, given costs and chances: an optimal stopping rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Plan(NamedTuple):
    """Where a round stops.

    The reach of a token is the chance that it and all before it are kept.
    """

    gamma: int
    """The best number of tokens to draft for a drafter whose tokens all look alike."""
    most: int
    """The most worth drafting if its tokens all looked as good as they ever do."""
    keep: tuple[float, ...]
    """At index k, the reach the k-th token needs to be verified."""
    more: tuple[float, ...]
    """At index k, the reach needed after k tokens to draft another."""


def plan(
    verify: Sequence[float],
    draft: Sequence[float],
    outside: float,
    chances: Sequence[float],
    bands: Sequence[Sequence[tuple[float, float]]],
) -> Plan:
    """Plan a round.

    `verify` and `draft` are costs by number of drafted tokens, `chances[i]` the mean chance of
    the token at place i, `bands[i]` pairs (share, chance) of the bands of confidence it may
    fall in, the surest first.
    A token is worth the time that the best policy needs to emit one. Drafting one more costs a
    draft step, and, if it then looks good enough to keep, a wider verify pass. That pays when the
    chances it may turn out to have, times the reach so far, are worth more; and since the reach
    only falls, looking one token ahead is optimal where each width costs no less than the one
    before (the monotone case). Where costs are stairs, longer spans at mean chances are tried too.
    Source: Chow, Robbins and Siegmund 1971, Great Expectations, chapter 3.
    """
    most = len(chances)
    total = [v + d + outside for v, d in zip(verify, draft, strict=True)]
    gamma, price = 0, 1.0 / total[0]
    tokens = reach = 1.0
    for k in range(1, most + 1):
        reach *= chances[k - 1]
        tokens += reach
        if tokens / total[k] > price:
            gamma, price = k, tokens / total[k]
    keep, more = [0.0], []
    for k in range(most):
        ahead = _ahead(verify, draft, chances, k, price)
        wider = price * (verify[k + 1] - verify[k])
        step = price * (draft[k + 1] - draft[k])
        more.append(min(ahead, _glimpse(step, wider, bands[k])))
        keep.append(_retain(verify, draft, chances, k + 1, price))
    more.append(2.0)
    reach, far = 1.0, 0
    while far < most and reach >= more[far]:
        reach *= bands[far][0][1]
        far += 1
    return Plan(gamma, max(far, gamma), tuple(keep), tuple(more))


def _ahead(
    verify: Sequence[float], draft: Sequence[float], chances: Sequence[float], k: int, price: float
) -> float:
    """Return the reach after k tokens at which some number more pays, all verified."""
    best, gained, reach = 2.0, 0.0, 1.0
    for j in range(k + 1, len(chances) + 1):
        reach *= chances[j - 1]
        gained += reach
        cost = price * (verify[j] - verify[k] + draft[j] - draft[k])
        if cost < best * gained:
            best = cost / gained
    return best


def _glimpse(step: float, wider: float, bands: Sequence[tuple[float, float]]) -> float:
    """Return the reach at which one more pays, if it is verified only where it looks good."""
    best, share, good = 2.0, 0.0, 0.0
    for f, chance in bands:
        share += f
        good += f * chance
        cost = step + wider * share
        if cost < best * good:
            best = cost / good
    return best


def _retain(
    verify: Sequence[float], draft: Sequence[float], chances: Sequence[float], k: int, price: float
) -> float:
    """Return the reach of the k-th token at which verifying it pays, alone or with more."""
    best, gained, reach = price * (verify[k] - verify[k - 1]), 1.0, 1.0
    for j in range(k + 1, len(chances) + 1):
        reach *= chances[j - 1]
        gained += reach
        best = min(best, price * (verify[j] - verify[k - 1] + draft[j] - draft[k]) / gained)
    return best
