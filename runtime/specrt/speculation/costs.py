"""What passes cost on one machine, and what rounds therefore cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specrt.errors import BundleError

TRUST = 8.0
"""Observations that an assumption weighs as much as."""
WIDENING = 0.03
"""By what share a target pass of a token more costs more, at least, where it was never timed."""
RECENT = 1 / 16
"""Share of a running mean that the latest observation makes up."""
HELD_UP = 4.0
"""How many times as long as expected a step counts to have taken, at most."""
FIRST_NOISE = 0.2**2
"""How much times and lines are off before any is known: a variance, as a share."""
DRIFT = 0.01**2
"""How much they drift from one to the next."""


@dataclass(frozen=True)
class Costs:
    """What target and draft passes cost on one machine.

    Units: nanoseconds; steps of the target where they are assumed.
    Raises: BundleError for costs that no machine has.
    """

    verify_ns: tuple[float, ...]
    """At index g, a target pass of width g + 1; at 0 a plain step. Where several rows share passes
    it goes on to their widths."""
    draft_ns: tuple[float, ...]
    """At index g, drafting g tokens in a row; at 0 nothing."""
    outside_ns: float = 0.0
    """Per round, outside the engines."""
    assumed: bool = False
    """Whether nothing was measured: the first timed pass of each engine then sets its scale."""
    one_pass: bool = False
    """Whether a draft of any length is one pass, and costs the same."""

    def __post_init__(self) -> None:
        known = (*self.verify_ns, *self.draft_ns, self.outside_ns)
        sound = self.verify_ns and self.draft_ns and all(map(math.isfinite, known))
        if not sound or min(self.verify_ns) <= 0 or min(known) < 0 or self.draft_ns[0] != 0:
            raise BundleError(
                f"the costs are verify {self.verify_ns}, draft {self.draft_ns}, outside "
                f"{self.outside_ns}; expected nanoseconds from gamma 0 on, drafting none of which "
                "costs nothing; run `specrt tune` again"
            )

    @classmethod
    def assume(cls, most: int) -> Costs:
        """Return what passes of most engines cost, where nothing was measured here.

        A token more in a target pass, and a drafted one, take a tenth of a step.
        """
        tenths = tuple(0.1 * gamma for gamma in range(most + 1))
        return cls(tuple(1.0 + share for share in tenths), tenths, assumed=True)

    @property
    def plain_ns(self) -> float:
        """A round that drafts nothing."""
        return self.round_ns(0)

    def verify(self, gamma: int) -> float:
        """Return what verifying `gamma` drafted tokens costs, measured or interpolated."""
        return _along(self.verify_ns, gamma)

    def draft(self, gamma: int) -> float:
        """Return what drafting `gamma` tokens costs, measured or interpolated."""
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

    def of_one_pass(self) -> Costs:
        """Return the costs where a draft of any length is the pass of the longest."""
        drafts = (0.0, *(self.draft_ns[-1] for _ in self.draft_ns[1:]))
        return replace(self, draft_ns=drafts, one_pass=True)

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


class CostTracker:
    """What passes cost now, by the number of drafted tokens: tuned costs, as rounds correct them.

    Every pass moves a common factor, for a busy machine slows them all, and a little its own cost.
    A pass in under half the expected time replaces a tuned cost at once, and a measured one when
    it happens twice in a row. A pass that takes over twice as long counts only after four in a row.
    A width never timed costs little more than the next narrower timed one, whatever was tuned, so
    that a width tuned too dear is tried; a longer draft, of which each token is a pass, costs as
    much more as it is longer. A draft of `one_pass` has one cost at every length. Assumed costs, in
    steps, become nanoseconds with the first pass; a step counts as one before, so that an engine
    that was never timed is tried.

    Units: nanoseconds.
    """

    def __init__(
        self, tuned: Sequence[float], *, assumed: bool = False, one_pass: bool = False
    ) -> None:
        self._own = list(tuned)
        self._one_pass = one_pass
        self._common = 1.0
        self._scaled = not assumed
        self._passes = [0] * len(tuned)
        self._fast = [1] * len(tuned)
        self._slow = [0] * len(tuned)
        self._last = [1.0] * len(tuned)
        self._spread, self._held_up = 0.0, 2.0
        self._narrowest = len(tuned)
        """The shortest draft whose pass was timed."""
        self.costs: list[float]
        """The cost for each number of drafted tokens."""
        self._update()

    def record(self, drafted: int, ns: float) -> None:
        """Take note of what a pass took."""
        drafted = min(drafted, 1) if self._one_pass else drafted
        own = self._own[drafted]
        if ns <= 0 or own <= 0:
            return
        if not self._scaled:
            self._common, self._scaled = ns / own, True
        expected = own * self._common
        ratio = ns / expected
        self._fast[drafted] = self._fast[drafted] + 1 if ratio < 0.5 else 0
        self._slow[drafted] = self._slow[drafted] + 1 if ratio > self._held_up else 0
        if self._fast[drafted] == 2 or self._slow[drafted] == 4:
            self._own[drafted] *= ratio
            self._fast[drafted] = self._slow[drafted] = 0
        elif 0.5 <= ratio <= 2.0:
            surprise, passes = min(0.5, ratio - 1.0), self._passes[drafted]
            self._common *= 1.0 + surprise * max(1.0 / (1.0 + sum(self._passes)), RECENT)
            self._own[drafted] *= 1.0 + surprise / (2 * TRUST + min(passes, 8 * TRUST))
        self._spread += RECENT * (min(abs(ratio - self._last[drafted]), 4.0) - self._spread)
        self._last[drafted], self._held_up = ratio, max(2.0, 1.0 + 6.0 * self._spread)
        self._passes[drafted] += 1
        self._narrowest = min(drafted, self._narrowest)
        self._update()

    def _update(self) -> None:
        """Set the costs by what was timed."""
        narrowest, each_a_pass = self._narrowest, self._own[0] == 0
        most = self._own[narrowest] if narrowest < len(self._own) else math.inf
        self.costs = costs = list[float]()
        for drafted, (ns, passes) in enumerate(zip(self._own, self._passes, strict=True)):
            if passes:
                most = ns
            elif drafted > narrowest:
                most *= drafted / (drafted - 1) if each_a_pass else 1.0 + WIDENING
            costs.append(self._common * min(ns, most))
        if self._one_pass:
            costs[1:] = costs[1:2] * (len(costs) - 1)


class CostLine:
    """A cost that grows on a line with what is done: scale x + slope y, from noisy times.

    The two follow by a Kalman filter whose state drifts (Kalman 1960, A new approach to linear
    filtering). The first time sets the scale of both. Noise is what times were off so far; one that
    is off by more than `HELD_UP` times counts as that.

    Units: nanoseconds.
    """

    def __init__(self, slope: float) -> None:
        self.scale, self.slope = 1.0, slope
        self._scaled = False
        self._noise = FIRST_NOISE
        self._variances = FIRST_NOISE, 0.0, 1.0
        """Of the scale, of both together, and of the slope; by the scale squared."""

    def record(self, x: float, y: float, ns: float) -> None:
        """Take note of what it took."""
        if ns <= 0 or x <= 0:
            return
        if not self._scaled:
            self.scale *= ns / (self.scale * x + self.slope * y)
            self.slope, self._scaled = self.slope * self.scale, True
        expected = max(self.scale * x + self.slope * y, 0.1 * self.scale * x)
        ns = max(expected / HELD_UP, min(HELD_UP * expected, ns))
        surprise = ns / expected - 1.0
        self._noise += RECENT * (min(1.0, surprise * surprise) - self._noise)
        of_scale, both, of_slope = self._variances
        of_scale, of_slope = of_scale + DRIFT, of_slope + DRIFT
        share_x, share_y = self.scale * x / expected, self.scale * y / expected
        gain_x = of_scale * share_x + both * share_y
        gain_y = both * share_x + of_slope * share_y
        certainty = 1.0 / (gain_x * share_x + gain_y * share_y + max(self._noise, DRIFT))
        self._variances = (
            of_scale - gain_x * gain_x * certainty,
            both - gain_x * gain_y * certainty,
            of_slope - gain_y * gain_y * certainty,
        )
        step = self.scale * surprise * certainty
        self.scale = max(0.1 * self.scale, self.scale + gain_x * step)
        self.slope += gain_y * step

    def along(self, xs: Sequence[float], ys: Sequence[float]) -> list[float]:
        """Return what each of several costs."""
        a, b = self.scale, self.slope
        return [max(a * x + b * y, 0.1 * a * x) for x, y in zip(xs, ys, strict=True)]


def shared_widths(gamma: int, rows: int, most: int) -> list[int]:
    """Return how wide passes are in which several rows verify `gamma` tokens each.

    `most` is the widest pass. Numbers of rows are powers of two, and the largest that fits.
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
