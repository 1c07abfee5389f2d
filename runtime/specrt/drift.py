"""What passes cost now: costs measured before, corrected by what rounds take."""

from __future__ import annotations

from math import exp

from specrt.costs import Costs
from specrt.plan import Prices

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

    def _price(self) -> Prices:
        verify = [self._level * (self._plain + self._slope * wider) for wider in self._wider]
        draft = [self._pace * step for step in self._steps]
        return Prices.of(verify, draft, self._outside)


def _surprise(ratio: float) -> float:
    """Return by how much a ratio differs from 1, at most `SURPRISE`."""
    surprise = ratio - 1.0
    if surprise > SURPRISE:
        return SURPRISE
    return surprise if surprise > -SURPRISE else -SURPRISE


def _within(factor: float, most: float) -> float:
    return max(1.0 / most, min(most, factor))
