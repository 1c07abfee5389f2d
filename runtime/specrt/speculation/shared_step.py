"""What the rows of a step draft, and whether drafts are worth what was expected of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from specrt.speculation.costs import TRUST, Costs, CostTracker

PROBING = 0.01
"""Share of the tokens that probes may cost."""
MAX_PROBE_LOSS = 8.0
"""The most that one probe counts, in tokens of a row: a pass held up for other reasons is not its
fault, and costs tuned far too dear are found out."""
MAX_DRAFTING = 200
"""Steps in a row that draft, before a plain step shows what one costs now."""
MEMORY = 64.0
"""Steps that an outcome is made of."""
SURPRISE = 0.05**2
"""How much outcomes are off what is expected of them, before any is known: a variance."""
HELD_UP = 4.0
"""How many times as long as expected a step counts to have taken, at most."""
MARGIN = 1.03
"""How many times plain steps' tokens a plan must promise: the best of many promises too much."""
READING = 1 / 8
"""Of a draft pass, what each token costs that it reads before."""
DOUBT = 0.02
"""A plain step that loses this share of its tokens counts twice as a probe: the more plain steps
fall behind, the less they are in question."""


class Expecting(Protocol):
    """A policy that knows what drafts come to."""

    @property
    def tokens(self) -> Sequence[float]:
        """By number of drafted tokens, how many a round is expected to emit."""


class DraftingRow(NamedTuple):
    """A row that may draft by passes of the draft model."""

    policy: Expecting
    lacks: int = 0
    """Tokens that the draft has not read."""
    room: int = 1 << 20
    """Tokens that may follow."""


class Outcome:
    """Tokens that steps made, by those that their time was expected to make."""

    def __init__(self) -> None:
        self._made = self._expected = TRUST
        self._squares = TRUST
        self.ratio = 1.0
        self.variance = 1.0
        """Of the ratio."""

    def record(self, made: float, expected: float) -> None:
        """Take note of a step; one held up, or timed for the first time, counts within bounds."""
        expected = max(made / HELD_UP, min(HELD_UP * made, expected))
        keep = 1.0 - 1.0 / MEMORY
        self._made = keep * self._made + made
        self._expected = keep * self._expected + expected
        self._squares = keep * self._squares + (made - expected) * (made - expected)
        self.ratio = self._made / self._expected
        self.variance = self._squares / (self._expected * self._expected)


class Company:
    """What is known of steps of one number of rows."""

    def __init__(self, costs: Costs, rows: int, most: int) -> None:
        widths = range(rows - 1, rows * (most + 1))
        self.verify = CostTracker([costs.verify(w) for w in widths], assumed=costs.assumed)
        """By drafted tokens of all rows, what a step takes besides drafting."""
        self.plain, self.drafting = Outcome(), Outcome()
        self.worth = 1.0
        """Tokens that drafts were worth, by those expected, as far as that is less and no noise."""
        self.steps_drafted = self.steps_idle = 0
        """Steps in a row that drafted, and that did not."""
        self.probe_loss = 0.0
        self.gain = inf
        """By how many times plain steps' tokens the best plan makes more than it must."""

    def judge(self, made: float, expected: float, *, drafted: bool) -> None:
        """Hold what was expected to what a step made."""
        (self.drafting if drafted else self.plain).record(made, expected)
        ratio = self.drafting.ratio / self.plain.ratio
        noise = self.drafting.variance + self.plain.variance
        self.worth = min(1.0, 1.0 + (ratio - 1.0) * SURPRISE / (SURPRISE + noise))


class SharedStep:
    """Decides for all rows of a step, which wait for each other, how many draft, and how far.

    It chooses the most expected tokens of the step for its time: the rows whose drafts are
    likeliest to be kept draft, as many and as far as gives the best rate. At that rate time has a
    price in tokens, and each row goes on while its next token is worth its share of the step's
    time (Dinkelbach 1967, On nonlinear fractional programming). Costs are those of whole steps as
    they ran, by rows. What was expected is held to what came out, of plain steps as of others, and
    drafts that kept less are charged for it.
    """

    def __init__(self, costs: Costs, most: int, *, padded: bool = False) -> None:
        self._costs, self._most, self._padded = costs, most, padded
        self._companies: dict[int, Company] = {}
        self._drafts: dict[int, CostTracker] = {}
        self.floor = self.rate = 1.0
        """Tokens a nanosecond of a plain step, and of what pays best."""
        self.gamma = 0
        """How far a probe drafts."""
        self._chosen: Sequence[Expecting] = ()
        self.verify: list[float]
        self.copying: list[float]
        self.drafting: list[float]
        self.begin(1, ())

    def begin(self, rows: int, drafting: Sequence[DraftingRow]) -> None:
        """Plan a step of so many rows, some of which may draft by passes of the draft model."""
        self.rows, self.probing = rows, False
        if rows not in self._companies:
            self._companies[rows] = Company(self._costs, rows, self._most)
        self.company = self._companies[rows]
        if rows > 1:
            self.floor = self.rate = rows / self.company.verify.costs[0]
            ranked = sorted(drafting, key=lambda row: row.policy.tokens[1], reverse=True)
            self._chosen = self._choose([row.policy for row in ranked if self._pays_to_read(row)])
            if not self._chosen:
                self._chosen = self._probe([row.policy for row in ranked])
            self._share(len(self._chosen))

    def _choose(self, ranked: Sequence[Expecting]) -> Sequence[Expecting]:
        """Return the rows that draft because it pays, and set the price of time."""
        company = self.company
        rate, _, number, _ = self._best(ranked)
        company.gain = rate / self.floor - MARGIN if ranked else company.gain
        if rate <= self.floor * MARGIN:
            return ()
        self.rate, company.probe_loss = rate, 0.0
        return () if self.plain_due() else ranked[:number]

    def _probe(self, ranked: Sequence[Expecting]) -> Sequence[Expecting]:
        """Return the rows that draft to see what it comes to, where that is due."""
        company, most = self.company, MAX_PROBE_LOSS * self.rows
        rate, ns, number, self.gamma = self._best(ranked)
        loss = min(most, max(ns * (self.floor - rate), company.probe_loss))
        self.probing = number > 0 and company.steps_idle * PROBING * self.rows >= loss
        return ranked[:number] if self.probing else ()

    def _best(self, ranked: Sequence[Expecting]) -> tuple[float, float, int, int]:
        """Return the best rate, its time, how many rows draft, and how far."""
        verify, worth = self.company.verify.costs, self.company.worth
        best = (0.0, 0.0, 0, 0)
        gains = [float(self.rows)] * (self._most + 1)
        for number, policy in enumerate(ranked, 1):
            drafts, tokens = self._draft_costs(number).costs, policy.tokens
            for gamma in range(1, self._most + 1):
                gains[gamma] += tokens[gamma] - 1.0
                ns = (verify[self._width(number, gamma)] + drafts[gamma]) / worth
                best = max(best, (gains[gamma] / ns, ns, number, gamma))
        return best

    def _pays_to_read(self, row: DraftingRow) -> bool:
        """Tell whether what a row gains in the rest of its text is worth what its draft lacks."""
        gain, read_ns = self.company.gain, READING * self._draft_costs(1).costs[1]
        saved = row.room / self.floor * (1.0 - 1.0 / (1.0 + max(0.0, gain)))
        return row.lacks <= self._most or saved >= row.lacks * read_ns

    def _share(self, number: int) -> None:
        """Set a row's share of the time, by its drafted tokens: with passes, and without."""
        company, rows, most = self.company, self.rows, self._most
        costs = company.verify.costs
        many = number or rows
        self.verify = [(costs[self._width(many, g)] - costs[0]) / many for g in range(most + 1)]
        plain, worth = costs[0] / rows, company.worth
        self.copying = [plain + ns / worth for ns in self.verify]
        drafts = self._draft_costs(many).costs
        self.drafting = [ns + drafts[g] / many / worth for g, ns in enumerate(self.copying)]

    def _width(self, drafting: int, gamma: int) -> int:
        """Return the place of a step in the table of costs."""
        return gamma * (self.rows if self._padded else drafting)

    def _draft_costs(self, rows: int) -> CostTracker:
        """Return what drafting takes where so many rows do."""
        if rows not in self._drafts:
            wider = self._costs.verify(rows - 1) / self._costs.verify(0)
            table = [self._costs.draft(g) * wider for g in range(self._most + 1)]
            self._drafts[rows] = CostTracker(
                table, assumed=self._costs.assumed, one_pass=self._costs.one_pass
            )
        return self._drafts[rows]

    def plain_due(self) -> bool:
        """Tell whether to see again what a plain step comes to, where drafting pays."""
        loss = self.rate / self.floor - 1.0
        counted = loss * (1.0 + loss / DOUBT)
        return self.company.steps_drafted >= min(MAX_DRAFTING, counted / PROBING)

    def drafts(self, policy: Expecting) -> bool:
        """Tell whether a row drafts by passes in this step."""
        return any(policy is chosen for chosen in self._chosen)

    def settle(
        self, made: int, drafted: Sequence[int], draft_ns: int, verify_ns: int,
        passes: int = 0, drafting: int = 0,
    ) -> None:  # fmt: skip
        """Learn from a step: tokens made, those drafted by each row, and what it took.

        `drafting` rows ran the first of so many draft `passes`; none where that is no measure.
        """
        company, ns = self.company, draft_ns + verify_ns
        width = max(drafted) * self.rows if self._padded else sum(drafted)
        expected = ns * (self.rate if width else self.floor)
        company.judge(made, expected, drafted=width > 0)
        if self.rows > 1:
            company.verify.record(width, verify_ns)
            if passes:
                self._draft_costs(drafting).record(passes, draft_ns)
        if width and not self.probing:
            company.steps_drafted, company.steps_idle = company.steps_drafted + 1, 0
        else:
            company.steps_drafted, company.steps_idle = 0, company.steps_idle + 1
        if self.probing:
            company.steps_idle = 0
            company.probe_loss = min(MAX_PROBE_LOSS * self.rows, ns * self.floor - made)
