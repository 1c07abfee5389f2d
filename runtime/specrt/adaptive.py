"""The gamma policy that is never slower: as many tokens as pay, round by round."""

from __future__ import annotations

from math import exp, log

from specrt.acceptance import UNTOLD, Acceptance
from specrt.costs import Costs
from specrt.gamma import Weight
from specrt.plan import Plan, plan
from specrt.round import Round

CELLS = 40
SHARE = 0.02


class AutoGamma:
    """Drafts as many tokens as pay, from costs and a running estimate of acceptance."""

    def __init__(self, costs: Costs, most: int) -> None:
        self._most = most
        self._acceptance = Acceptance(most)
        self._costs = costs
        self._plans: dict[int, Plan] = {}
        self._refit_in = self._gap = 4
        self._since = 0
        self._misses = 0
        self._reach = 1.0
        self._trying = False
        self._keep: tuple[float, ...] = ()
        self._more: tuple[float, ...] = ()
        self._verify = [costs.verify(g) for g in range(most + 1)]
        self._draft = [costs.draft(g) for g in range(most + 1)]
        self._sparing = 0
        self.fallback: str | None = None

    def choose(self) -> int:
        """Return the most tokens worth drafting now; after some plain rounds, one to probe."""
        cell = int(self._acceptance.mean * CELLS)
        plan = self._plans.get(cell) or self._plan(cell)
        self._reach = 1.0
        self._keep, self._more = plan.keep, plan.more
        self._trying = False
        if plan.most:
            return plan.most
        if self._since >= self._wait():
            self._trying = True
            return 1
        return 0

    def _wait(self) -> float:
        plain = self._verify[0]
        loss = self._verify[1] + self._draft[1] - plain
        return loss / (SHARE * plain) * min(4.0, 1.05**self._misses)

    def weigh(self, drafted: int, confidence: float) -> Weight:
        """Weigh the chance of a token to be kept against what it costs."""
        self._reach = reach = self._reach * self._acceptance.chance(drafted - 1, confidence)
        if reach < self._keep[drafted] and not self._trying:
            self._sparing += 1
            if self._sparing & 31:
                return Weight.DROP
            return Weight.LAST
        return Weight.MORE if reach >= self._more[drafted] else Weight.LAST

    def observe(self, round_: Round) -> None:
        """Learn from the tokens that were judged."""
        drafted = round_.drafted
        if not drafted:
            self._since += 1
            return
        self._since = 0
        accepted = round_.accepted
        self._acceptance.observe(accepted, accepted + (accepted < drafted), round_.confidences)
        if self._trying:
            self._misses = 0 if accepted else self._misses + 1
        else:
            self._misses = 0
        self._refit_in -= 1
        if not self._refit_in:
            self._acceptance.refit()
            self._plans.clear()
            self._gap = min(64, self._gap * 2)
            self._refit_in = self._gap

    def _plan(self, cell: int) -> Plan:
        a = self._acceptance
        mean = (cell + 0.5) / CELLS
        odds = log(mean / (1 - mean))
        total = sum(a.seen)
        used = [b for b in range(UNTOLD, -1, -1) if a.seen[b] > 0.01 * total]
        used.sort(key=lambda b: -a.bands[b])
        mass = sum(a.seen[b] for b in used)
        chances: list[float] = []
        bands: list[list[tuple[float, float]]] = []
        for place in a.places:
            chances.append(1 / (1 + exp(-odds - place)))
            bands.append(
                [(a.seen[b] / mass, 1 / (1 + exp(-odds - place - a.bands[b]))) for b in used]
            )
        self._plans[cell] = made = plan(
            self._verify, self._draft, self._costs.outside_ns, chances, bands
        )
        return made
