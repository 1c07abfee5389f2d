"""What the rows of a step draft, and whether drafts are worth what was expected of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from specrt.speculation.costs import HELD_UP, TRUST, CostLine, Costs

PROBING = 0.01
"""Share of the tokens that probes may cost."""
MAX_PROBE_LOSS = 8.0
"""The most that one probe counts, in tokens of a row: a pass held up for other reasons is not its
fault, and costs tuned far too dear are found out."""
LEAST_PROBE_LOSS = 0.1
"""The least that one counts, in tokens of a row: what is expected of it is not certain."""
MAX_DRAFTING = 200
"""Steps in a row that draft, before a plain step shows what one costs now."""
MEMORY = 64.0
"""Steps that an outcome is made of."""
NOISE = 25.0
"""Variances of an outcome that it is off by where it counts half: five standard deviations."""
TOKEN = 0.1
"""Of a step, what a drafted token may cost that no pass of one row has shown."""
MARGIN = 1.03
"""How many times plain steps' tokens a plan must promise: the best of many promises too much."""
READING = 1 / 8
"""Of a draft pass, what each token costs that it reads before."""
REST = 15
"""The most steps that follow a plan by which no row drafts, before there is another."""
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


class Plan(NamedTuple):
    """What a step of several rows may draft."""

    fair_rate: float
    """Tokens a nanosecond as they count, by the geometric mean over rows."""
    rate: float
    """Tokens a nanosecond."""
    ns: float
    number: int
    """How many rows draft."""
    gamma: int
    """How far."""


class StepOutcome:
    """Tokens that steps made, by those that their time was expected to make."""

    def __init__(self, variance: float) -> None:
        self._made = self._expected = TRUST
        self._squares = variance * TRUST**2
        self.ratio = 1.0
        self.variance = variance
        """Of the ratio."""

    def record(self, made: float, expected: float, steps: int) -> None:
        """Take note of steps; what was held up, or timed first, counts within bounds."""
        expected = max(made / HELD_UP, min(HELD_UP * made, expected))
        keep: float = (1.0 - 1.0 / MEMORY) ** steps
        self._made = keep * self._made + made
        self._expected = keep * self._expected + expected
        off = made - self.ratio * expected
        self._squares = keep * self._squares + off * off
        self.ratio = self._made / self._expected
        self.variance = self._squares / (self._expected * self._expected)


class Company:
    """What is known of steps of one number of rows."""

    def __init__(self, costs: Costs, rows: int, most: int) -> None:
        widths = range(rows - 1, rows * (most + 1))
        self._passes = [costs.verify(w) for w in widths]
        self._tokens = [TOKEN * costs.verify(0) * drafted for drafted in range(len(widths))]
        self._line = CostLine(0.0)
        self._off, self.times = [1.0] * len(widths), [0] * len(widths)
        """By how many times each place is off that line, and how often it was timed."""
        self.verify = self._passes
        """By drafted tokens of all rows, what a step takes besides drafting."""
        self.plain, self.drafting = StepOutcome(0.05**2), StepOutcome(1 / TRUST)
        """Of plain steps, which are timed as they are, and of steps that draft."""
        self.worth = 1.0
        """Tokens that drafts were worth, by those expected, as far as that is less and no noise."""
        self.steps_drafted = self.steps_idle = 0
        """Steps in a row that drafted, and that did not."""
        self.plans = self.plain_plans = 0
        """How many there were, and those in a row by which no row drafts, as it does not pay."""
        self.probe_loss = 0.0
        self.gain = inf
        """By how many times plain steps' tokens the best plan makes more than it must."""

    def record(self, drafted: int, ns: float) -> None:
        """Take note of what a step took besides drafting."""
        self._line.record(self._passes[drafted], self._tokens[drafted], ns)
        lines = self._line.along(self._passes, self._tokens)
        self.times[drafted] += 1
        off = max(1 / HELD_UP, min(HELD_UP, ns / lines[drafted])) - self._off[drafted]
        self._off[drafted] += off / (TRUST + self.times[drafted])
        self.verify = [ns * own for ns, own in zip(lines, self._off, strict=True)]

    def judge(self, made: float, expected: float, steps: int, *, drafted: bool) -> None:
        """Hold what was expected to what steps made."""
        (self.drafting if drafted else self.plain).record(made, expected, steps)
        less = 1.0 - self.drafting.ratio / self.plain.ratio
        doubt = NOISE * (self.drafting.variance + self.plain.variance)
        self.worth = 1.0 - max(0.0, less) * less * less / (less * less + doubt)


class SharedStep:
    """Decides for all rows of a step, which wait for each other, how many draft, and how far.

    It chooses the plan with the highest geometric mean of the rows' speeds (Kelly 1997, Charging
    and rate control for elastic traffic): a row that does not draft is held up by those that do,
    and doubling one text's speed is worth no more than halving another's. A row that drafts goes on
    while its next token, as a share of its own, is worth its share of the step's time: the
    derivative of that mean. Rows that copy go on while a token is worth its time at the step's rate
    (Dinkelbach 1967, On nonlinear fractional programming). Costs are those of whole steps as they
    ran, by rows. Drafts that kept less than was expected are charged for it.
    """

    def __init__(self, costs: Costs, most: int, *, padded: bool = False) -> None:
        self._costs, self._most, self._padded = costs, most, padded
        self._companies: dict[int, Company] = {}
        self._drafts = [costs.draft(passes) for passes in range(most + 1)]
        self._line = CostLine(costs.verify(1) / costs.verify(0) - 1.0)
        self.floor = self.rate = 1.0
        """Tokens a nanosecond of a plain step, and of what pays best."""
        self.price = 1.0
        """What a nanosecond costs a row that drafts, by the tokens that it makes in a step."""
        self.gamma = 0
        """How far the plan drafts."""
        self.rest = 0
        """How many more steps of the same rows the plan is good for."""
        self._chosen: Sequence[Expecting] = ()
        self.unread_ns: float
        """What a draft takes to read what it lacks, where there is one row."""
        self.room: int
        """How many tokens may follow there."""
        self.verify: list[float]
        self.copying: list[float]
        self.begin(1, ())

    def begin(self, rows: int, drafting: Sequence[DraftingRow]) -> None:
        """Plan a step of so many rows, some of which may draft by passes of the draft model."""
        self.rows, self.probing, self.rest = rows, False, 0
        if rows not in self._companies:
            self._companies[rows] = Company(self._costs, rows, self._most)
        self.company = self._companies[rows]
        if rows > 1:
            self.company.plans += 1
            self.floor = self.rate = self.price = rows / self.company.verify[0]
            ranked = sorted(drafting, key=lambda row: row.policy.tokens[1], reverse=True)
            self._chosen = self._choose(ranked) or self._probe(ranked)
            plain = not self._chosen and self.rate == self.floor
            self.company.plain_plans = self.company.plain_plans + 1 if plain else 0
            self._share()
        else:
            _, lacks, self.room = drafting[0] if drafting else (None, 0, 0)
            self.unread_ns = self._reading_ns(lacks)

    def _choose(self, ranked: Sequence[DraftingRow]) -> Sequence[Expecting]:
        """Return the rows that draft because it pays, and set the price of time."""
        company = self.company
        worthy = [row.policy for row in ranked if self._pays_to_read(row)]
        best = self._best(worthy)
        company.gain = best.fair_rate / self.floor - MARGIN if worthy else company.gain
        if best.fair_rate <= self.floor * MARGIN:
            return ()
        self.rate, self.price, self.gamma = best.rate, self.rows / best.ns, best.gamma
        company.probe_loss = 0.0
        return () if self.plain_due() else worthy[: best.number]

    def _probe(self, ranked: Sequence[DraftingRow]) -> Sequence[Expecting]:
        """Return the rows that draft to see what it comes to, where that is due."""
        company = self.company
        _, rate, ns, number, self.gamma = self._best([row.policy for row in ranked])
        ns += sum(self._reading_ns(row.lacks) for row in ranked[:number])
        loss = max(LEAST_PROBE_LOSS * self.rows, ns * (self.floor - rate), company.probe_loss)
        due = min(MAX_PROBE_LOSS * self.rows, loss) / (PROBING * self.rows) - company.steps_idle
        self.probing = number > 0 and due <= 0
        self.rest = int(max(0.0, min(REST, company.plain_plans, due if number else inf)))
        return [row.policy for row in ranked[:number]] if self.probing else ()

    def _best(self, ranked: Sequence[Expecting]) -> Plan:
        """Return the plan with the highest geometric mean of the rows' speeds."""
        verify, worth, rows = self.company.verify, self.company.worth, self.rows
        best = Plan(0.0, 0.0, 0.0, 0, 0)
        products, sums = [1.0] * (self._most + 1), [float(rows)] * (self._most + 1)
        for number, policy in enumerate(ranked, 1):
            drafts, tokens = self._draft_costs(number), policy.tokens
            for gamma in range(1, self._most + 1):
                products[gamma] *= tokens[gamma]
                sums[gamma] += tokens[gamma] - 1.0
                ns = (verify[self._width(number, gamma)] + drafts[gamma]) / worth
                fair = rows * products[gamma] ** (1.0 / rows)
                best = max(best, Plan(fair / ns, sums[gamma] / ns, ns, number, gamma))
        return best

    def _pays_to_read(self, row: DraftingRow) -> bool:
        """Tell whether what a row gains in the rest of its text is worth what its draft lacks."""
        saved = row.room / self.floor * (1.0 - 1.0 / (1.0 + max(0.0, self.company.gain)))
        return saved >= self._reading_ns(row.lacks)

    def _reading_ns(self, lacks: int) -> float:
        """Return what a draft takes to read what it lacks, beyond what a round leaves it."""
        return 0.0 if lacks <= self._most else lacks * READING * self._draft_costs(1)[1]

    def _share(self) -> None:
        """Set what a row is charged of a step that it copies tokens for, and of verifying them."""
        company, rows, most = self.company, self.rows, self._most
        many, costs = len(self._chosen) or rows, company.verify
        self.verify = [(costs[self._width(many, g)] - costs[0]) / many for g in range(most + 1)]
        self.copying = [costs[0] / rows + ns / company.worth for ns in self.verify]
        self._going_on = [len(self._chosen)] + [0] * most
        self._by_passes: dict[int, list[float]] = {}

    def drafting(self, drafted: int) -> list[float]:
        """Return what a row is charged that has drafted so many tokens, by how many it drafts.

        The rows that still draft share the passes to come.
        """
        many = max(1, self._going_on[drafted - 1 if drafted else 0])
        if many not in self._by_passes:
            share = many * self.company.worth
            drafts = self._draft_costs(many)
            both = zip(self.copying, drafts, strict=True)
            self._by_passes[many] = [ns + draft / share for ns, draft in both]
        return self._by_passes[many]

    def go_on(self, drafted: int) -> None:
        """Note that a row drafts further."""
        self._going_on[drafted] += 1

    def _width(self, drafting: int, gamma: int) -> int:
        """Return the place of a step in the table of costs."""
        return gamma * (self.rows if self._padded else drafting)

    def _draft_costs(self, rows: int) -> list[float]:
        """Return what drafting takes where so many rows do, by passes."""
        return self._line.along(self._drafts, [(rows - 1) * ns for ns in self._drafts])

    def plain_due(self) -> bool:
        """Tell whether to see again what a plain step comes to, where drafting pays."""
        loss = self.rate / self.floor - 1.0
        counted = loss * (1.0 + loss / DOUBT)
        due = self.company.steps_drafted >= min(MAX_DRAFTING, counted / PROBING)
        return due or self.first

    @property
    def first(self) -> bool:
        """Whether no plain step of so many rows was timed yet, though some may have been."""
        company = self.company
        return self.rows > 1 and not company.times[0] and company.plans <= TRUST

    def drafts(self, policy: Expecting) -> bool:
        """Tell whether a row drafts by passes in this step."""
        return any(policy is chosen for chosen in self._chosen)

    def settle(
        self, made: int, drafted: Sequence[int], draft_ns: int, verify_ns: int,
        passes: int = 0, drafting: int = 0, steps: int = 1,
    ) -> None:  # fmt: skip
        """Learn from a step, or plain `steps`: tokens made, those drafted by each row, and times.

        `drafting` rows ran the first of so many draft `passes`; none where that is not a measure.
        Where `verify_ns` is 0 the step is none either: a draft read a prompt. A probe still pays.
        """
        company, ns = self.company, draft_ns + verify_ns
        width = max(drafted, default=0) * self.rows if self._padded else sum(drafted)
        promised = self.rate / company.worth if self.rate > self.floor else self.floor
        if verify_ns:
            expected = ns * (promised if width else self.floor)
            company.judge(made, expected, steps, drafted=width > 0)
        if verify_ns and self.rows > 1:
            company.record(width, verify_ns / steps)
            if passes:
                ns_alone = self._drafts[passes]
                self._line.record(ns_alone, (drafting - 1) * ns_alone, draft_ns)
        if width and not self.probing:
            company.steps_drafted, company.steps_idle = company.steps_drafted + 1, 0
        else:
            company.steps_drafted, company.steps_idle = 0, company.steps_idle + steps
        if self.probing:
            company.steps_idle = 0
            company.probe_loss = min(MAX_PROBE_LOSS * self.rows, ns * self.floor - made)
