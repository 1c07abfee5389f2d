"""The gamma policy that drafts as far as it pays."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import exp, log, log1p
from operator import mul

from specrt.speculation.costs import RECENT, TRUST, Costs, CostTracker
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.round import Round

SWITCH_CHANCE = 0.01
"""How likely the text is to become easier or harder from one round to the next."""
PROBING = 0.015
"""Share of the time that probes may cost while drafting does not pay."""
MAX_PROBE_LOSS = 8.0
"""The most that one probe counts, in tokens: a pass held up for other reasons is not its fault, and
costs tuned far too dear are found out."""
MAX_DRAFTING = 200
"""Rounds in a row that draft, before a plain step shows what one costs now."""
FALLBACK_AFTER = 256
"""Tokens without drafting, probes aside, before that is called a fallback."""
ODDS = tuple(exp(level) for level in range(-4, 5))
"""Levels of how easy a text may be: the odds of a drafted token to be kept."""
CHANCES = tuple(odds / (1.0 + odds) for odds in ODDS)
EVEN = 1.0 / len(ODDS)
HOPE = 0.15
"""The power of its odds that a level weighs at first: a draft is made because it pays."""
USUAL = 1.0
"""Mean log odds of a drafter's confidence before any is known: 73 %."""


Features = tuple[float, float, float]
"""Of a drafted token: how much surer than usual its drafter is, how much less, and its depth."""


class Acceptance:
    """The chance of each drafted token, given its place and its drafter's confidence.

    Its log odds are e + w0 max(0, s) + w1 min(0, s) + w2 ln(1 + place): e is how easy the text is
    now, s how much surer than usual its drafter is, in log odds. How easy the text is now is a
    belief over a few levels. Every judged token makes some of them likelier, by Bayes' rule; each
    round a little of the belief goes back to what texts are usually like, in case this one has
    changed. The weights follow by logistic regression, a step for each judged token.
    """

    def __init__(self, most: int) -> None:
        self._powers = [[c**n for c in CHANCES] for n in range(1, most + 1)]
        """The chance that so many tokens are kept, by level."""
        hope = [odds**HOPE for odds in ODDS]
        self._belief = self._usual = [share / sum(hope) for share in hope]
        self._weights = [1.0, 1.0, 0.0]
        self._seen = [TRUST, TRUST, 4 * TRUST]
        """How much evidence each weight rests on; the more, the smaller its steps."""
        self._mean, self.has_confidence = USUAL, False
        """Mean log odds of the drafter's confidence, and whether it ever told any."""
        self._drafted: list[Features] = []
        self._ease: list[float]
        """Odds at each place, given that the tokens before it are kept: the text is then likelier
        an easy one."""
        self.reach: list[float]
        """By number of tokens of usual confidence, the chance that all of them are kept."""
        self.tokens: list[float]
        """By number of such tokens, how many a round that drafts them is expected to emit."""
        self.mix_with_usual(0.0)

    def begin(self) -> None:
        """Expect a new draft."""
        self._drafted.clear()

    def expect(self, place: int, confidence: float) -> float:
        """Return the chance of the next drafted token, given that those before it are kept.

        A confidence of 1, and one that is no probability, tells nothing.
        """
        surer = 0.0
        if 0.0 < confidence < 1.0:
            surer = log(confidence / (1.0 - confidence)) - self._mean
            self._mean, self.has_confidence = self._mean + RECENT * surer, True
        features = max(0.0, surer), min(0.0, surer), log1p(place)
        self._drafted.append(features)
        return 1.0 - 1.0 / (1.0 + self._times(features) * self._ease[place])

    def _times(self, features: Features) -> float:
        """Return by how much these features multiply the odds of a token."""
        (more, less, depth), (surer, unsure, deeper) = features, self._weights
        return exp(max(-8.0, min(8.0, more * surer + less * unsure + depth * deeper)))

    def learn(self, accepted: int, evaluated: int) -> None:
        """Learn what became of the draft: how many tokens were judged, how many of them kept."""
        while len(self._drafted) < evaluated:
            self.expect(len(self._drafted), 1.0)
        belief = self._belief
        for place, features in enumerate(self._drafted[:evaluated]):
            right, times = place < accepted, self._times(features)
            if right:
                scale = times + 1.0 / ODDS[-1]  # 1 for the easiest: a long draft leaves no zeros
                belief = [
                    b * odds * scale / (1.0 + times * odds)
                    for b, odds in zip(belief, ODDS, strict=True)
                ]
            else:
                belief = [b / (1.0 + times * odds) for b, odds in zip(belief, ODDS, strict=True)]
            chance = 1.0 - 1.0 / (1.0 + times * self._ease[place])
            for i, feature in enumerate(features):
                if feature:
                    self._seen[i] += chance * (1.0 - chance) * feature * feature
                    self._weights[i] += (right - chance) * feature / self._seen[i]
        self._weights[2] = min(0.0, self._weights[2])
        total = sum(belief)
        self._belief = [share / total for share in belief]
        pairs = zip(self._usual, self._belief, strict=True)
        self._usual = [u + SWITCH_CHANCE * (now - u + EVEN - u) for u, now in pairs]
        self.mix_with_usual(SWITCH_CHANCE)

    def mix_with_usual(self, chance: float) -> None:
        """Allow for a text that has become easier or harder with some chance."""
        mixed = zip(self._belief, self._usual, strict=True)
        self._belief = belief = [now + chance * (usual - now) for now, usual in mixed]
        self._ease, self.reach, self.tokens = [], [1.0], [1.0]
        before = reach = tokens = 1.0
        for depth, powers in enumerate(self._powers, 1):
            kept = sum(map(mul, belief, powers))
            ease, before = kept / (before - kept), kept
            odds = ease * depth ** self._weights[2]
            reach *= odds / (1.0 + odds)
            tokens += reach
            self._ease.append(ease)
            self.reach.append(reach)
            self.tokens.append(tokens)


class AutoGamma:
    """Drafts as many tokens as pay, none included, from costs and a running estimate.

    It drafts while the next token, or those up to the best gamma, are worth their time; a token is
    worth the time in which the best round emits one. `rival` is the policy of the drafter that
    follows where this one proposes nothing; without one that is a plain step. `load` tells how
    many rows share the passes. What was learned stays for the completions that follow.

    While drafting does not pay, it probes: a round of one drafted token now and then, spaced so
    that probes cost 1.5 % of the time. Each is charged what it really took, draft passes that
    caught up included.
    """

    def __init__(
        self,
        costs: Costs,
        most: int,
        rival: AutoGamma | None = None,
        load: Callable[[], int] | None = None,
    ) -> None:
        self._costs, self._most, self._rival, self._rows = costs, most, rival, load
        self._acceptance = Acceptance(most)
        self._trackers: dict[int, tuple[CostTracker, CostTracker, float]] = {}
        """By load: of the target's passes, of the draft's, and what is outside of both."""
        self._load = 0
        self.verify_tracker: CostTracker
        self._total: list[float]
        """What rounds cost, by their number of drafted tokens."""
        self._gamma = 0
        """The best number of tokens to draft where all are of usual confidence."""
        self.rate = 0.0
        """Tokens per nanosecond that this comes to: what a nanosecond is worth."""
        self._floor = 0.0
        """Tokens per nanosecond without drafting."""
        self._joint_acceptance, self._steps = 1.0, 0
        self._probing = False
        self._rounds_drafted = self._rounds_idle = 0
        """Rounds in a row that drafted, and that did not."""
        self._probe_loss = 0.0
        self.set_load(1)
        plain, *others = self._total
        may_pay = any(tokens * plain > ns for tokens, ns in enumerate(others, 2))
        self._tokens_since_draft = 0 if may_pay or not most else FALLBACK_AFTER
        """Tokens since a round, other than a probe, that drafted."""

    def fallback(self, after: int = FALLBACK_AFTER) -> str | None:
        """Return why nothing is drafted but for probes; None before so many tokens without."""
        if self._tokens_since_draft < after or not self._most:
            return None
        if self._gamma:
            return "nothing was found to propose"
        ratio, tokens = self._total[1] * self._floor, self._acceptance.tokens[1]
        return (
            f"a round that drafts one token takes {ratio:.2f} times as long as a token without it, "
            f"and {tokens:.2f} tokens are expected of it"
        )

    def set_load(self, load: int) -> None:
        """Go by what passes cost while so many rows share them."""
        if self._rival is not None:
            self._rival.set_load(load)
        if load == self._load:
            return
        self._load = load
        if load not in self._trackers:
            shared, rival = self._costs.shared(load, self._most), self._rival
            track = partial(CostTracker, assumed=shared.assumed)
            verify = track(shared.verify_ns) if rival is None else rival.verify_tracker
            draft = track(shared.draft_ns, one_pass=shared.one_pass)
            self._trackers[load] = verify, draft, shared.outside_ns
        self.verify_tracker, self._draft_tracker, self._outside = self._trackers[load]
        self._plan()

    def choose(self) -> int:
        """Return the most tokens worth drafting now: none, one to probe, or all there may be."""
        if self._rows is not None:
            self.set_load(max(1, self._rows()))
        self._joint_acceptance, self._steps, self._probing = 1.0, 0, False
        self._acceptance.begin()
        self._plan()
        # How sure the drafter is of a first token is worth a look before it is given up.
        if self._gamma or (self._acceptance.has_confidence and self._pays(0)):
            self._probe_loss = 0.0
            return 0 if self._rounds_drafted >= MAX_DRAFTING and self._rival is None else self._most
        if not self._most:
            return 0
        loss = min(MAX_PROBE_LOSS, self._total[1] * self._floor - self._acceptance.tokens[1])
        self._probing = self._rounds_idle * PROBING >= max(self._probe_loss, loss)
        return int(self._probing)

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Weigh the chance of a token to be kept against what it costs."""
        self._steps = drafted
        self._joint_acceptance *= self._acceptance.expect(drafted - 1, confidence)
        if self._probing or self._pays(drafted):
            return DraftDecision.CONTINUE
        verify = self.verify_tracker.costs
        verified = self._joint_acceptance >= self.rate * (verify[drafted] - verify[drafted - 1])
        return DraftDecision.STOP if verified else DraftDecision.DISCARD

    def observe(self, round_: Round) -> None:
        """Learn from the tokens that were judged, and from what passes took.

        A round that another drafter drafted, or in which nothing matched, only brings the next
        probe nearer.
        """
        if round_.drafted:
            self._judge(round_)
            return
        self._rounds_idle += 1
        self._tokens_since_draft += len(round_.tokens)
        if self._rival is None:
            self._rounds_drafted = 0
            self.verify_tracker.record(0, round_.verify_ns)

    def _judge(self, round_: Round) -> None:
        """Learn from a round that this policy drafted in."""
        if self._probing and round_.accepted:
            self._acceptance.mix_with_usual(1.0 - (1.0 - SWITCH_CHANCE) ** self._rounds_idle)
        self._acceptance.learn(round_.accepted, round_.evaluated)
        self.verify_tracker.record(round_.drafted, round_.verify_ns)
        if not round_.caught_up:
            self._draft_tracker.record(self._steps or round_.drafted, round_.draft_ns)
        self._rounds_drafted += 1
        self._rounds_idle = 0
        if self._probing:
            spent = (round_.draft_ns + round_.verify_ns) * self._floor
            self._probe_loss = min(MAX_PROBE_LOSS, spent - self._acceptance.tokens[1])
        else:
            self._tokens_since_draft = 0

    def _plan(self) -> None:
        """Find the best number of tokens to draft, and its rate, as costs and the text are now."""
        costs = zip(self.verify_tracker.costs, self._draft_tracker.costs, strict=True)
        self._total = [verify + draft + self._outside for verify, draft in costs]
        rates = [t / ns for t, ns in zip(self._acceptance.tokens, self._total, strict=True)]
        self._floor = rates[0] if self._rival is None else max(rates[0], self._rival.rate)
        self.rate = max(self._floor, *rates)
        self._gamma = rates.index(self.rate) if self.rate > self._floor else 0

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
