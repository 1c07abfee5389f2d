"""How far to draft: the protocol, fixed gammas, and the policy that drafts as far as it pays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from math import exp, log, log1p, sqrt
from operator import mul
from typing import Protocol

from specrt.speculation.costs import Costs
from specrt.speculation.round import Round

TURN = 0.01
"""How likely the text is to become easier or harder from one round to the next."""
TRUST = 8.0
"""Judged tokens that what is assumed of confidence and depth weighs as much as."""
RECENT = 1 / 16
"""Share of a running mean that the latest round makes up."""
PROBING = 0.015
"""Share of the time that probes may cost while drafting does not pay."""
CHECK = 200
"""Rounds in a row that draft, before a plain step shows what one costs now."""
SPARED = 32
"""Of so many tokens that confidence leaves out, one is verified, to learn whether it was right."""
SILENT = 256
"""Tokens without drafting that does pay, before this is called a fallback."""


class DraftDecision(Enum):
    """What a policy decides about the token just drafted."""

    DISCARD = "discard"
    """Leave this token out, and stop."""
    STOP = "stop"
    """Keep this token, and stop."""
    CONTINUE = "continue"
    """Keep this token, and draft another."""


class GammaPolicy(Protocol):
    """Decides how many tokens a round drafts, from what rounds before it came to."""

    def choose(self) -> int:
        """Return the most tokens to draft in the coming round; 0 is a plain step."""

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Decide about the token just drafted.

        `drafted` is its place in the draft, from 1; `confidence` is its drafter's, in (0, 1],
        and 1.0 for every token where the drafter has none to give.
        """

    def observe(self, round_: Round) -> None:
        """Learn from a round: its own, or one in which nothing was drafted."""


class FixedGamma:
    """Drafts the same number of tokens every round."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self) -> int:
        """Return the fixed gamma."""
        return self._gamma

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Keep every token."""
        return DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        """Learn nothing."""


class BuiltGamma:
    """Keeps another policy to the gammas that verify passes were built for.

    Where it would stop between two of them the draft goes on to the next one.
    """

    def __init__(self, policy: GammaPolicy, gammas: Collection[int]) -> None:
        self._policy = policy
        self._gammas = gammas

    def choose(self) -> int:
        """Return the smallest gamma that was built and reaches as far."""
        most = self._policy.choose()
        return min((g for g in self._gammas if g >= most), default=max(self._gammas))

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Stop where the other policy does, if that is at a gamma that was built."""
        decision = self._policy.decide(drafted, confidence)
        kept = drafted - (decision is DraftDecision.DISCARD)
        return decision if kept in self._gammas else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        """Let the other policy learn."""
        self._policy.observe(round_)


class LoadAwareGamma:
    """Tells a policy how many rows share the passes before it chooses."""

    def __init__(self, policy: AutoGamma, load: Callable[[], int]) -> None:
        self._policy = policy
        self._load = load
        self.decide = policy.decide
        self.observe = policy.observe

    def choose(self) -> int:
        """See `GammaPolicy`."""
        self._policy.set_load(max(1, self._load()))
        return self._policy.choose()


class Acceptance:
    """The chance of each drafted token, given its place and its drafter's confidence.

    Its log odds are a sum: how easy the text is now, plus a weight times how much surer than usual
    the drafter is of it, minus a weight times the logarithm of its place. How easy the text is now
    is a belief over a few levels: every judged token makes some likelier (Bayes' rule), and each
    round a little of it goes back to all levels alike, because the text may have turned. The
    weights follow by logistic regression, a step for each judged token.
    """

    LEVELS = tuple(range(-4, 5))

    def __init__(self) -> None:
        self._belief = self._usual = [1.0 / len(self.LEVELS)] * len(self.LEVELS)
        self._weights = [0.8, 0.8, 0.0]
        self._known = [TRUST, TRUST, 4 * TRUST]
        self._mean = self._variance = 0.0
        self._tokens: list[tuple[float, float, float]] = []
        self.ease = 0.0
        self.turn(1.0)

    @property
    def spread(self) -> float:
        """How much surer tokens are whose confidence is one standard deviation above the mean."""
        return self._weights[0] * sqrt(self._variance)

    def begin(self) -> None:
        """Expect a new draft."""
        self._tokens.clear()

    def chance(self, place: int) -> float:
        """Return the chance of a token of usual confidence; places count from 0."""
        return _chance(self.ease + self._weights[2] * log1p(place))

    def expect(self, place: int, confidence: float) -> float:
        """Return the chance of the next drafted token, given that those before it are kept."""
        surer = 0.0
        if 0.0 < confidence < 1.0:
            odds = max(-6.0, min(6.0, log(confidence / (1.0 - confidence))))
            surer = odds - self._mean
            self._mean += RECENT * surer
            self._variance += RECENT * (surer * surer - self._variance)
        features = (max(0.0, surer), min(0.0, surer), log1p(place))
        self._tokens.append(features)
        return _chance(self.ease + self._offset(features))

    def _offset(self, features: Sequence[float]) -> float:
        return sum(map(mul, self._weights, features))

    def turn(self, chance: float) -> None:
        """Allow for a text that has become another with some chance."""
        self._belief = _mixed(self._belief, self._usual, chance)
        self._summarise()

    def learn(self, accepted: int, evaluated: int) -> None:
        """Learn what became of the draft: how many tokens were judged, how many of them kept."""
        while len(self._tokens) < evaluated:
            self.expect(len(self._tokens), 1.0)
        belief = self._belief
        for i, features in enumerate(self._tokens[:evaluated]):
            right, offset = i < accepted, self._offset(features)
            chances = [_chance(level + offset) for level in self.LEVELS]
            belief = [b * (c if right else 1.0 - c) for b, c in zip(belief, chances, strict=True)]
            chance = _chance(self.ease + offset)
            for j, feature in enumerate(features):
                self._known[j] += chance * (1.0 - chance) * feature * feature
                self._weights[j] += (right - chance) * feature / self._known[j]
        self._weights[2] = min(0.0, self._weights[2])
        total = sum(belief)
        self._belief = [b / total for b in belief]
        even = [1.0 / len(self.LEVELS)] * len(self.LEVELS)
        self._usual = _mixed(_mixed(self._usual, self._belief, TURN), even, TURN / 1)
        self.turn(TURN)

    def _summarise(self) -> None:
        mean = sum(b * _chance(level) for b, level in zip(self._belief, self.LEVELS, strict=True))
        self.ease = log(mean / (1.0 - mean))


class CostTracker:
    """What passes cost now, by their number of drafted tokens: tuned costs, as rounds correct them.

    All costs move with a common factor, since a busy machine slows every pass, and each moves on
    its own more slowly. A pass is never faster than it can be: one in less than half the time it
    should take shows that the cost was wrong, and replaces it. One that was held up counts as half
    as long again. Where no pass was timed yet the cost is at most that on the line through those
    that were, so that a width which tuning found too dear is tried.
    """

    def __init__(self, tuned: Sequence[float]) -> None:
        self._shape = list(tuned)
        self._level = 1.0
        self._passes = [0] * len(tuned)
        self._fast = [1] * len(tuned)
        self._slow = [0] * len(tuned)

    def record(self, drafted: int, ns: float) -> None:
        """Take note of what a pass took."""
        expected = self._shape[drafted] * self._level
        if ns <= 0 or expected <= 0:
            return
        ratio = ns / expected
        fast = self._fast[drafted] + 1 if ratio < 0.5 else 0
        slow = self._slow[drafted] + 1 if ratio > 2.0 else 0
        if fast == 2 or slow == 4:
            self._shape[drafted] *= ratio
            fast = slow = 0
        elif not (fast or slow):
            surprise = min(0.5, ratio - 1.0)
            self._level *= 1.0 + surprise * max(1.0 / (1.0 + sum(self._passes)), RECENT)
            self._shape[drafted] *= 1.0 + surprise / (2 * TRUST + min(56, self._passes[drafted]))
        self._fast[drafted], self._slow[drafted] = fast, slow
        self._passes[drafted] += 1

    def costs(self) -> list[float]:
        """Return the costs."""
        costs = [self._level * ns for ns in self._shape]
        timed = [i for i, passes in enumerate(self._passes) if passes]
        if timed:
            least = costs[timed[0]]
            for i, passes in enumerate(self._passes):
                if passes:
                    least = costs[i]
                costs[i] = min(costs[i], least)
        return costs


class AutoGamma:
    """Drafts as many tokens as pay, none included, from costs and a running estimate."""

    def __init__(self, costs: Costs, most: int, rival: AutoGamma | None = None) -> None:
        self._most = most
        self._rival = rival
        self._costs = costs
        self._acceptance = Acceptance()
        self._load = 0
        self._trackers: dict[int, tuple[CostTracker, CostTracker, float]] = {}
        self._reach = 1.0
        self._steps = 0
        self._asked = self._probing = self._sparing = False
        self._run = self._idle = self._silent = self._discarded = 0
        self._wait: float | None = None
        self.fallback: str | None = None
        self.set_load(1)

    def set_load(self, load: int) -> None:
        """Go by what passes cost while so many rows share them."""
        if self._rival is not None:
            self._rival.set_load(load)
        if load == self._load:
            return
        self._load = load
        if load not in self._trackers:
            shared = self._costs.shared(load, self._most)
            self._trackers[load] = (
                CostTracker(shared.verify_ns) if self._rival is None else self._rival._verify,
                CostTracker(shared.draft_ns),
                shared.outside_ns,
            )
        self._verify, self._draft, self._outside = self._trackers[load]
        self._plan()

    def _plan(self) -> None:
        verify, draft = self._verify.costs(), self._draft.costs()
        total = [v + d + self._outside for v, d in zip(verify, draft, strict=True)]
        chances = [self._acceptance.chance(place) for place in range(self._most)]
        rate = 1.0 / total[0]
        if self._rival is not None:
            rate = max(rate, self._rival.rate)
        self._floor = rate
        self._total = total
        gamma, tokens, reach = 0, 1.0, 1.0
        for k, chance in enumerate(chances, 1):
            reach *= chance
            tokens += reach
            if tokens > rate * total[k]:
                gamma, rate = k, tokens / total[k]
        self.gamma, self.rate = gamma, rate
        spread = self._acceptance.spread
        keep, more = [0.0], []
        for k in range(self._most):
            wider, step = verify[k + 1] - verify[k], draft[k + 1] - draft[k]
            keep.append(rate * wider)
            odds = log(chances[k] / (1 - chances[k])) + spread
            enough = (wider + 2 * step) / _chance(odds)
            tokens, reach = 0.0, 1.0
            for j in range(k, self._most):
                reach *= chances[j]
                tokens += reach
                enough = min(enough, (total[j + 1] - total[k]) / tokens)
            more.append(rate * enough)
        more.append(2.0)
        self._keep, self._more = keep, more

    def choose(self) -> int:
        """Return the most tokens worth drafting now: none, one to probe, or more."""
        self._asked, self._probing = True, False
        self._reach, self._steps = 1.0, 0
        self._acceptance.begin()
        self._plan()
        if self.gamma or self._more[0] <= 1.0:
            self._wait = None
            if self._run >= CHECK and self._rival is None:
                return 0
            return self._most if self._acceptance.spread else self.gamma
        if self._wait is None:
            self._wait = self._loss() / PROBING
        self._probing = self._idle >= self._wait
        return min(self._most, int(self._probing))

    def _loss(self) -> float:
        return self._total[min(1, self._most)] * self._floor - 1.0 - self._acceptance.chance(0)

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Weigh the chance of a token to be kept against what it costs."""
        self._steps = drafted
        self._reach *= self._acceptance.expect(drafted - 1, confidence)
        if self._probing or self._reach >= self._more[drafted]:
            return DraftDecision.CONTINUE
        if self._reach >= self._keep[drafted]:
            return DraftDecision.STOP
        self._discarded += 1
        spared = self._discarded % SPARED == 0
        return DraftDecision.STOP if spared else DraftDecision.DISCARD

    def observe(self, round_: Round) -> None:
        """Learn from the tokens that were judged, and from what passes took."""
        drafted, asked = round_.drafted, self._asked
        self._asked = False
        if not drafted:
            self._idle += 1
            self._silent += len(round_.tokens)
            if asked and self._rival is None:
                self._run = 0
                self._verify.record(0, round_.verify_ns)
            return
        if self._probing and round_.accepted:
            self._acceptance.turn(1.0 - (1.0 - TURN) ** self._idle)
        self._acceptance.learn(round_.accepted, round_.evaluated)
        self._verify.record(drafted, round_.verify_ns)
        steps = self._steps or drafted
        if not round_.caught_up:
            self._draft.record(steps, round_.draft_ns)
        self._run += 1
        self._idle = 0
        if self._probing:
            spent = (round_.draft_ns + round_.verify_ns) * self._floor
            lost = spent - 1.0 - self._acceptance.chance(0)
            self._wait = min(8.0, max(self._loss() / 2, lost)) / PROBING
        else:
            self._silent = 0


def _mixed(one: Sequence[float], other: Sequence[float], share: float) -> list[float]:
    return [a + share * (b - a) for a, b in zip(one, other, strict=True)]


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))
