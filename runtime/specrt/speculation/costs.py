"""What passes cost on one machine, and how far to draft at that price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from typing import NamedTuple

from specrt.errors import BundleError


@dataclass(frozen=True)
class Costs:
    """What target and draft passes cost on one machine.

    Units: nanoseconds.
    Raises: BundleError for costs that no machine has.
    """

    verify_ns: tuple[float, ...]
    """At index g, a target pass of width g + 1; at 0 a plain step. Where several rows share passes
    it goes on to their widths."""
    draft_ns: tuple[float, ...]
    """At index g, drafting g tokens in a row; at 0 nothing."""
    outside_ns: float = 0.0
    """Per round, outside the engines."""

    def __post_init__(self) -> None:
        known = (*self.verify_ns, *self.draft_ns, self.outside_ns)
        sound = self.verify_ns and self.draft_ns and all(map(math.isfinite, known))
        if not sound or min(self.verify_ns) <= 0 or min(known) < 0 or self.draft_ns[0] != 0:
            raise BundleError(
                f"the costs are verify {self.verify_ns}, draft {self.draft_ns}, outside "
                f"{self.outside_ns}; expected nanoseconds from gamma 0 on, drafting none of which "
                "costs nothing; run `specrt tune` again"
            )

    @property
    def plain_ns(self) -> float:
        """A round that drafts nothing."""
        return self.round_ns(0)

    def verify(self, gamma: int) -> float:
        """Return what verifying `gamma` drafted tokens costs, measured or on the line through."""
        return _along(self.verify_ns, gamma)

    def draft(self, gamma: int) -> float:
        """Return what drafting `gamma` tokens costs, measured or on the line through."""
        return _along(self.draft_ns, gamma)

    def round_ns(self, gamma: int) -> float:
        """Return what a round that drafts `gamma` tokens costs."""
        return self.draft(gamma) + self.verify(gamma) + self.outside_ns

    def scaled(self, verify: float = 1.0, draft: float = 1.0) -> Costs:
        """Return the costs of engines that take so many times as long."""
        return replace(
            self,
            verify_ns=tuple(ns * verify for ns in self.verify_ns),
            draft_ns=tuple(ns * draft for ns in self.draft_ns),
        )

    def shared(self, load: int, most: int) -> Costs:
        """Return what a round costs, up to gamma `most`, while so many rows do the same.

        One pass verifies for all of them and costs what its tokens cost; drafts are small, and
        cost the same for all as for one. The work outside is done for each.
        """
        return Costs(
            tuple(self.verify(load * (g + 1) - 1) for g in range(most + 1)),
            tuple(self.draft(g) for g in range(most + 1)),
            self.outside_ns * load,
        )

    @staticmethod
    def between(measured: Sequence[tuple[int, float]], most: int) -> tuple[float, ...]:
        """Return a cost for each gamma from 0 to `most`, on lines through those measured.

        `measured` holds (gamma, ns) in rising gamma, the first one's gamma being 0.
        """
        if not measured or measured[0][0] != 0:
            raise ValueError(f"the first cost measured is that of gamma 0; got {measured}")
        table: list[float] = [measured[0][1]]
        for (low, before), (high, after) in pairwise(measured):
            slope = (after - before) / (high - low)
            table += [before + slope * i for i in range(1, high - low)]
            table.append(after)
        return tuple(_along(table, g) for g in range(most + 1))


def shared_widths(gamma: int, rows: int, most: int) -> list[int]:
    """Return how wide passes are in which several rows verify `gamma` tokens each.

    `most` is the widest pass. Of many rows the doublings, and as many as fit.
    """
    numbers = [n for n in range(2, rows + 1) if (gamma + 1) * n <= most]
    return [(gamma + 1) * n for n in numbers if n & (n - 1) == 0 or n == numbers[-1]]


def _along(table: Sequence[float], gamma: int) -> float:
    """Return an entry of a table, continued beyond its end along its mean slope."""
    last = len(table) - 1
    if gamma <= last:
        return table[gamma]
    slope = max(0.0, (table[-1] - table[0]) / last) if last else 0.0
    return table[-1] + slope * (gamma - last)


SURPRISE = 0.5
"""The most by which one pass may differ from what was expected, as a share of it."""

NOISE = 0.15**2
"""Variance of one pass."""

LEVEL_DRIFT, SLOPE_DRIFT = 0.03**2, 0.01**2
"""Variance by which engines become slower, and wider passes in particular, between settlements."""

FIRST_DOUBT = 0.1**2
"""Variance of the costs as they were measured."""

STEEPEST = 4.0

FURTHEST = 1000.0


class Drift:
    """Three factors on measured costs: of every target pass, of what width adds, of the draft.

    A busy machine slows all passes; contexts that grow, or cores that are taken away, change what
    a wider pass costs beside a plain one. Passes of every width tell about both, as far as they
    can be told apart. One pass that took a hundred times too long counts as half as long again.
    Source: a Kalman filter of two states, on means of many passes.
    """

    def __init__(self, costs: Costs, most: int) -> None:
        self._plain = costs.verify(0)
        self._wider = [max(0.0, costs.verify(g) - self._plain) for g in range(most + 1)]
        self._steps = [costs.draft(g) for g in range(most + 1)]
        self._outside = costs.outside_ns
        self._level = self._slope = self._pace = 1.0
        self._doubts = (FIRST_DOUBT, 0.0, FIRST_DOUBT)
        self._pace_doubt = FIRST_DOUBT
        self._verified = [[0.0, 0.0] for _ in range(most + 1)]
        self._drafted = [0.0, 0.0]
        self.prices = self._price()

    def time_verify(self, drafted: int, ns: float) -> None:
        """Take note of what a target pass took."""
        if ns > 0:
            note = self._verified[drafted]
            note[0] += _surprise(ns / self.prices.verify[drafted])
            note[1] += 1.0

    def time_draft(self, steps: int, ns: float, warm: bool) -> None:
        """Take note of what so many draft steps took; where they cost nothing, it is ignored.

        A draft that is not warm had tokens to catch up with: it tells only that it is no slower.
        """
        expected = self.prices.draft[steps]
        if ns > 0 and expected > 0 and (warm or ns < expected):
            self._drafted[0] += _surprise(ns / expected)
            self._drafted[1] += 1.0

    def settle(self) -> None:
        """Correct the prices by what was noted since."""
        level = slope = 0.0
        a, b, c = self._doubts
        a, c = a + LEVEL_DRIFT, c + SLOPE_DRIFT
        for wider, (total, count) in zip(self._wider, self._verified, strict=True):
            if count:
                x = self._slope * wider / (self._plain + self._slope * wider)
                first, second = a + b * x, b + c * x
                doubt = first + second * x + NOISE / count
                gap = (total / count - level - slope * x) / doubt
                level, slope = level + first * gap, slope + second * gap
                a, b, c = (
                    a - first * first / doubt,
                    b - first * second / doubt,
                    (c - second * second / doubt),
                )
        self._doubts = (a, b, c)
        self._level = _within(self._level * exp(level), FURTHEST)
        self._slope = _within(self._slope * exp(slope), STEEPEST)
        self._settle_draft()
        self._verified = [[0.0, 0.0] for _ in self._verified]
        self.prices = self._price()

    def _settle_draft(self) -> None:
        total, count = self._drafted
        self._pace_doubt += LEVEL_DRIFT
        if count:
            gain = self._pace_doubt / (self._pace_doubt + NOISE / count)
            self._pace = _within(self._pace * exp(gain * total / count), FURTHEST)
            self._pace_doubt *= 1.0 - gain
        self._drafted = [0.0, 0.0]

    def _price(self) -> RoundCosts:
        verify = [self._level * (self._plain + self._slope * wider) for wider in self._wider]
        draft = [self._pace * step for step in self._steps]
        return RoundCosts.of(verify, draft, self._outside)


def _surprise(ratio: float) -> float:
    """Return by how much a ratio differs from 1, at most `SURPRISE`."""
    surprise = ratio - 1.0
    if surprise > SURPRISE:
        return SURPRISE
    return surprise if surprise > -SURPRISE else -SURPRISE


def _within(factor: float, most: float) -> float:
    return max(1.0 / most, min(most, factor))


NEVER = 2.0
"""A reach that no token has."""


class DraftPlan(NamedTuple):
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


class RoundCosts(NamedTuple):
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
    def of(cls, verify: Sequence[float], draft: Sequence[float], outside: float) -> RoundCosts:
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
    prices: RoundCosts,
    chances: Sequence[float],
    surest: Sequence[float],
    share: float,
    rate: float,
) -> DraftPlan:
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
    return DraftPlan(gamma, rate, keep, more)


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
