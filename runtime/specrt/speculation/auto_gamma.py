"""The gamma policy that drafts as far as it pays."""

from __future__ import annotations

from specrt.speculation.acceptance import SWITCH_CHANCE, Acceptance
from specrt.speculation.costs import Costs, CostTracker
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.round import Round
from specrt.speculation.shared_step import MAX_PROBE_LOSS, PROBING, SharedStep

FALLBACK_AFTER = 256
"""Tokens without drafting, probes aside, before that is called a fallback."""


class AutoGamma:
    """Drafts as many tokens as pay, none included, from costs and a running estimate.

    It drafts while the next token, or those up to the best gamma, are worth their time; a token is
    worth the time in which the best round emits one. `rival` is the policy of the drafter that
    follows where this one proposes nothing; without one that is a plain step. `step` has what all
    rows of a step share; where there are several it says what time is worth, and whether this row
    drafts. What was learned stays for the completions that follow.

    While drafting does not pay, it probes: a round of one drafted token now and then, spaced so
    that probes cost 1 % of the time. Each is charged what it really took, draft passes that
    caught up included.
    """

    def __init__(
        self,
        costs: Costs,
        most: int,
        rival: AutoGamma | None = None,
        step: SharedStep | None = None,
    ) -> None:
        self._most, self._rival, self._step = most, rival, step or SharedStep(costs, most)
        self._acceptance = Acceptance(most)
        verify, drafts = (
            [cost(gamma) for gamma in range(most + 1)] for cost in (costs.verify, costs.draft)
        )
        self._free = not any(drafts)
        """Whether it drafts without passes."""
        self.verify_tracker: CostTracker = (
            CostTracker(verify, assumed=costs.assumed) if rival is None else rival.verify_tracker
        )
        self._draft_tracker = CostTracker(drafts, assumed=costs.assumed, one_pass=costs.one_pass)
        self._outside = costs.outside_ns
        self._total: list[float]
        """What rounds cost, by their number of drafted tokens."""
        self._verify: list[float]
        """What verifying costs of that."""
        self._gamma = 0
        """The best number of tokens to draft where all are of usual confidence."""
        self.rate = 0.0
        """Tokens per nanosecond that this comes to: what a nanosecond is worth."""
        self._floor = 0.0
        """Tokens per nanosecond without drafting."""
        self._joint_acceptance, self._steps = 1.0, 0
        self._probing = self._counted = False
        self._rounds_idle = 0
        """Rounds in a row that did not draft."""
        self._probe_loss = 0.0
        self._plan()
        plain, *others = self._total
        may_pay = any(tokens * plain > ns for tokens, ns in enumerate(others, 2))
        self._tokens_since_draft = 0 if may_pay or not most else FALLBACK_AFTER
        """Tokens since a round, other than a probe, that drafted."""

    @property
    def tokens(self) -> list[float]:
        """By number of drafted tokens, how many a round is expected to emit."""
        return self._acceptance.tokens

    def fallback(self, after: int = FALLBACK_AFTER) -> str | None:
        """Return why nothing is drafted but for probes; None before so many tokens without."""
        if self._tokens_since_draft < after or not self._most:
            return None
        if self._gamma:
            return "nothing was found to propose"
        ratio, worth = self._total[1] * self._floor, self._step.company.worth
        reason = (
            f"a round that drafts one token takes {ratio:.2f} times as long as a token without it, "
            f"and {self.tokens[1]:.2f} tokens are expected of it"
        )
        return reason if worth == 1 else f"{reason}; drafts made {worth:.2f} of what was expected"

    def choose(self) -> int:
        """Return the most tokens worth drafting now: none, one to probe, or all there may be.

        In company a round that is to draft none needs not be observed.
        """
        most = self._most_worth()
        self._counted = not most and self._step.rows > 1
        if self._counted:
            self._count_idle(1)
        return most

    def _most_worth(self) -> int:
        self._joint_acceptance, self._steps, self._probing = 1.0, 0, False
        self._acceptance.begin()
        self._plan()
        step, shares = self._step, self._step.rows > 1
        if shares and not self._free:
            self._probing = step.probing
            return self._gamma if step.probing or not self._gamma else self._most
        # How sure the drafter is of a first token is worth a look before it is given up.
        reading = 0.0 if self._free else step.unread_ns
        pays = self._gamma or (self._acceptance.has_confidence and self._pays(0))
        if pays and step.room * (1 / self._floor - 1 / self.rate) >= reading:
            self._probe_loss = 0.0
            due = step.first if shares else self._rival is None and step.plain_due()
            return 0 if due else self._most
        if not self._most:
            return 0
        loss = (self._total[1] + reading) * self._floor - self.tokens[1]
        loss = min(MAX_PROBE_LOSS, loss)
        self._probing = self._rounds_idle * PROBING >= max(self._probe_loss, loss)
        return int(self._probing)

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Weigh the chance of a token to be kept against what it costs."""
        self._steps = drafted
        self._joint_acceptance *= self._acceptance.expect(drafted - 1, confidence)
        shares = self._step.rows > 1 and not self._free
        if shares:
            self._total = self._step.drafting(drafted)
        if self._probing or self._pays(drafted):
            if shares:
                self._step.go_on(drafted)
            return DraftDecision.CONTINUE
        cost = self._verify[drafted] - self._verify[drafted - 1]
        verified = self._joint_acceptance >= self.rate * cost
        return DraftDecision.STOP if verified else DraftDecision.DISCARD

    def observe(self, round_: Round) -> None:
        """Learn from the tokens that were judged, and from what passes took.

        A round that another drafter drafted, or in which nothing matched, only brings the next
        probe nearer. Where rows share passes their times are those of the step, which learns them.
        """
        alone = self._step.rows == 1
        if round_.drafted:
            self._judge(round_, alone=alone)
        elif not self._counted:
            self._count_idle(len(round_.tokens))
            if alone and self._rival is None:
                self.verify_tracker.record(0, round_.verify_ns)
        if alone and not round_.caught_up and (round_.drafted or self._rival is None):
            self._step.probing = self._probing
            made, drafted = len(round_.tokens), (round_.drafted,)
            self._step.settle(made, drafted, round_.draft_ns, round_.verify_ns)

    def _count_idle(self, tokens: int) -> None:
        """Count a round without drafts; in company the text may have become another meanwhile."""
        self._rounds_idle += 1
        self._tokens_since_draft += tokens
        if self._step.rows > 1:
            self._acceptance.mix_with_usual(SWITCH_CHANCE)

    def _judge(self, round_: Round, *, alone: bool) -> None:
        """Learn from a round that this policy drafted in."""
        if self._probing and round_.accepted:
            self._acceptance.mix_with_usual(1.0 - (1.0 - SWITCH_CHANCE) ** self._rounds_idle)
        self._acceptance.learn(round_.accepted, round_.evaluated)
        if alone:
            self.verify_tracker.record(round_.drafted, round_.verify_ns)
            if not round_.caught_up:
                self._draft_tracker.record(self._steps or round_.drafted, round_.draft_ns)
        self._rounds_idle = 0
        if self._probing:
            spent = (round_.draft_ns + round_.verify_ns) * self._floor
            self._probe_loss = min(MAX_PROBE_LOSS, spent - self.tokens[1])
        else:
            self._tokens_since_draft = 0

    def _plan(self) -> None:
        """Find the best number of tokens to draft, and its rate, as costs and the text are now."""
        step, tokens = self._step, self._acceptance.tokens
        if step.rows > 1:
            self._verify = step.verify
            if self._free:
                self._total, self.rate = step.copying, step.rate
                gains = [t - step.rate * ns for t, ns in zip(tokens, self._total, strict=True)]
                self._gamma = gains.index(max(gains))
            else:
                self._total = step.drafting(0)
                self._gamma = step.gamma if step.drafts(self) else 0
                self.rate = step.price * tokens[self._gamma]
            self._floor = self.rate
            return
        self._verify = self.verify_tracker.costs
        costs = zip(self._verify, self._draft_tracker.costs, strict=True)
        self._total = [verify + draft + self._outside for verify, draft in costs]
        if step.company.worth < 1.0:
            self._total[1:] = [ns / step.company.worth for ns in self._total[1:]]
        rates = [t / ns for t, ns in zip(tokens, self._total, strict=True)]
        self._floor = rates[0] if self._rival is None else max(rates[0], self._rival.rate)
        self.rate = max(self._floor, *rates)
        self._gamma = rates.index(self.rate) if self.rate > self._floor else 0
        step.floor, step.rate = rates[0], self.rate

    def _pays(self, drafted: int) -> bool:
        """Tell whether the next token, or those up to the best gamma, are worth their time."""
        tokens, total = self._acceptance.tokens, self._total
        if drafted == self._most:
            return False
        worth = self.rate * self._acceptance.reach[drafted]
        for end in (drafted + 1, max(drafted + 1, self._gamma)):
            gained, ns = tokens[end] - tokens[drafted], total[end] - total[drafted]
            if self._joint_acceptance * gained >= worth * ns:
                return True
        return False
