"""The gamma policy that is never slower: as many tokens as pay, round by round."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum
from math import log
from typing import Protocol

from specrt.speculation.acceptance import Acceptance
from specrt.speculation.costs import Costs, DraftPlan, Drift, plan
from specrt.speculation.round import Round


class DraftDecision(Enum):
    """What a policy says of a token that was just drafted."""

    DISCARD = "drop"
    """Leave this token out, and stop."""
    STOP = "last"
    """Keep this token, and stop."""
    CONTINUE = "more"
    """Keep this token, and draft another."""


class GammaPolicy(Protocol):
    """Decides how many tokens a round drafts, from what rounds before it came to."""

    def choose(self) -> int:
        """Return the most tokens to draft in the coming round; 0 is a plain step."""

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Say what becomes of the token just drafted.

        `drafted` is its place in the draft, from 1; `confidence` is its drafter's, in (0, 1],
        and 1.0 for every token where the drafter has none to give.
        """

    def observe(self, round_: Round) -> None:
        """Learn from a round: its own, or one in which nothing was drafted."""


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
        weight = self._policy.decide(drafted, confidence)
        kept = drafted - (weight is DraftDecision.DISCARD)
        return weight if kept in self._gammas else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        """Let the other policy learn."""
        self._policy.observe(round_)


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


PROBING = 0.015
"""Share of the time that probes may cost while drafting does not pay."""

PATIENCE = 1.05
"""How much longer to wait after each probe that fails."""

LONGEST = 4.0
"""How many times as long at most."""

DEAREST = 8.0
"""The most one probe counts, in tokens lost: a pass held up for other reasons is not its fault."""

DULL = 3
"""Drafts in a row whose first token was left out, before there is a rest."""


class Probes:
    """Spaces probes by what they lose, so that all of them cost a small share of the time."""

    def __init__(self) -> None:
        self.idle = 0
        """Rounds since anything was drafted."""
        self._wait: float | None = None
        self._hits = self._misses = 0

    def depth(self, loss: float) -> int:
        """Return how many tokens to probe with now; none while it is too early.

        `loss` is what a probe is expected to lose, in tokens, where none was made yet.
        """
        if self._wait is None:
            self._wait = loss / PROBING
        return 1 + self._hits if self.idle >= self._wait else 0

    def charge(self, drafted: int, accepted: int, lost: float) -> None:
        """Wait as long as a probe's loss asks for; let the next go further if all was kept."""
        self._hits = self._hits + 1 if accepted == drafted else 0
        self._misses = 0 if accepted else self._misses + 1
        patience = min(LONGEST, PATIENCE ** min(self._misses, 100))
        self._wait = min(DEAREST, lost) / PROBING * patience

    def reset(self) -> None:
        """Forget the probes: drafting pays."""
        self._wait = None
        self._hits = self._misses = 0


class Rests:
    """Stops asking a drafter that was unsure of its first token again and again.

    Such drafts cost a draft step and tell nothing. Rests double until these steps cost as little
    as probes may.
    """

    def __init__(self) -> None:
        self.dull = 0
        """Drafts in a row whose first token was left out."""
        self.left = 0.0
        """Rounds to rest for."""

    def bore(self, loss: float) -> None:
        """Take note of a draft whose first token was left out, and what it lost, in tokens."""
        self.dull += 1
        if self.dull > DULL:
            self.left = min(loss / PROBING, 2.0 ** min(self.dull - DULL - 1, 30))


CHECK = 200
"""Rounds in a row that draft, before a plain step shows what one costs now."""

LIMIT = 256
"""Tokens without drafting before that is called a fallback."""

ENOUGH = 8
"""Drafted tokens judged before an acceptance is quoted."""

CELLS = 32
"""Of the chance of the first token; a plan is made for each when it is first needed."""

REFIT = 16
"""Rounds between refits, at first fewer."""

REPLAN = 4
"""Refits between plans."""

TIMED = 2
"""Of so many rounds one is timed; the clock moves slower than the text."""

SURE = 0.4
"""Share of tokens that count as the surest."""

TELLING = 0.2
"""How much surer these must be, in log odds, for confidence to be worth asking for."""

SPARED = 31
"""Of 32 tokens to be left out one is verified all the same, to learn whether that was right."""

FINE = 16
"""Steps of a rival's rate, per plain step's."""


class AutoGamma:
    """Drafts as many tokens as pay, none included, from costs and a running estimate.

    `rival` is the policy of whoever drafts when this one does not; without one that is a plain
    step. What was learned stays for the completions that follow.

    While drafting does not pay, it probes: a round of one drafted token now and then, spaced so
    that probes cost 1.5 % of the time, and less the longer they fail. Each is charged what it
    really took, draft passes that caught up included.
    """

    def __init__(self, costs: Costs, most: int, rival: AutoGamma | None = None) -> None:
        self._most = most
        self._rival = rival
        self._acceptance = Acceptance(most)
        self._costs = costs
        self._load = 1
        self._drift = Drift(costs.shared(1, most), most)
        self._plans: dict[int, DraftPlan] = {}
        self._known = {1: (self._drift, self._plans)}
        """Per load, what passes cost and what follows from it."""
        self._surest, self._share, self._telling = 0.0, 1.0, False
        self._refit_in = self._refit_after = 4
        self._refits = 0
        self._plan = self._planned()
        self._reach = 1.0
        self._steps = 0
        self._asked = self._trying = self._sparing = False
        self._run = self._dropped = 0
        self._probes = Probes()
        self._rests = Rests()
        self._silent = self._judged = self._kept = 0
        self.fallback: str | None = self._unpayable()
        """Why nothing is drafted but for probes; None again as soon as drafting pays."""

    def set_load(self, load: int) -> None:
        """Go by what passes cost while so many rows share them."""
        if self._rival is not None:
            self._rival.set_load(load)
        if load == self._load:
            return
        if load not in self._known:
            self._known[load] = (Drift(self._costs.shared(load, self._most), self._most), {})
        self._load = load
        self._drift, self._plans = self._known[load]

    @property
    def rate(self) -> float:
        """Tokens per nanosecond expected of the coming rounds."""
        return self._plan.rate

    def choose(self) -> int:
        """Return the most tokens worth drafting now: none, one to probe, or more."""
        self._asked = True
        self._trying = False
        self._reach = 1.0
        self._steps = 0
        self._acceptance.begin()
        self._plan = plan = self._planned()
        if plan.gamma or (self._telling and plan.more[0] <= 1.0):
            if self._rests.left > 0:
                self._rests.left -= 1
                return 0
            if self._run >= CHECK and self._rival is None:
                return 0
            return self._most if self._telling else plan.gamma
        depth = self._probes.depth(self._loss())
        self._trying = depth > 0
        return min(depth, self._most)

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        """Weigh the chance of a token to be kept against what it costs."""
        self._steps = drafted
        self._reach = reach = self._reach * self._acceptance.expect(drafted - 1, confidence)
        if reach >= self._plan.more[drafted] or self._trying:
            return DraftDecision.CONTINUE
        if reach >= self._plan.keep[drafted]:
            return DraftDecision.STOP
        self._dropped += 1
        self._sparing = not self._dropped & SPARED
        return DraftDecision.STOP if self._sparing else DraftDecision.DISCARD

    def observe(self, round_: Round) -> None:
        """Learn from the tokens that were judged, and from what passes took.

        A round in which others drafted, or nothing matched, only brings the next probe nearer.
        """
        drafted, asked = round_.drafted, self._asked
        self._asked = False
        if drafted:
            self._judge(round_)
            return
        self._probes.idle += 1
        if asked and self._steps:
            self._rests.bore(self._drift.prices.step[0] * self._floor())
        self._silent += len(round_.tokens)
        if asked and self._rival is None:
            self._run = 0
            self._drift.time_verify(0, round_.verify_ns)
        if not self._probes.idle & (REFIT * REPLAN - 1):
            self._replan()
        if self._silent >= LIMIT and self.fallback is None:
            self.fallback = self._unprofitable()

    def _judge(self, round_: Round) -> None:
        """Learn from a round that this policy drafted in."""
        drafted, accepted = round_.drafted, round_.accepted
        evaluated = accepted + (accepted < drafted)
        self._acceptance.learn(accepted, evaluated)
        if not self._refit_in % TIMED:
            self._drift.time_verify(drafted, round_.verify_ns)
            self._drift.time_draft(self._steps or drafted, round_.draft_ns, not round_.caught_up)
        if not self._sparing:
            self._rests.dull = 0
        self._sparing = False
        self._run += 1
        self._probes.idle = 0
        self._judged += evaluated
        self._kept += accepted
        if self._trying:
            self._charge(round_)
        else:
            self._probes.reset()
            self._silent = 0
            if accepted:
                self._judged = self._kept = 0
                self.fallback = None
        self._refit_in -= 1
        if not self._refit_in:
            self._refit()

    def _charge(self, round_: Round) -> None:
        """Charge a probe what it lost: of one token on average, not by the luck it had."""
        drafted, accepted = round_.drafted, round_.accepted
        gained = 1.0 + (self._acceptance.mean if drafted == 1 else accepted)
        spent = (round_.draft_ns + round_.verify_ns) * self._floor()
        self._probes.charge(drafted, accepted, max(self._loss() / 2, spent - gained))

    def _loss(self) -> float:
        """Return the tokens that a probe is expected to cost, where it has nothing to catch up."""
        total = self._drift.prices.total
        return total[min(1, self._most)] * self._floor() - 1.0 - self._acceptance.mean

    def _floor(self) -> float:
        """Return the tokens per nanosecond to be had without drafting."""
        plain = 1.0 / self._drift.prices.total[0]
        return plain if self._rival is None else max(plain, self._rival.rate)

    def _refit(self) -> None:
        self._acceptance.refit()
        self._refits += 1
        early = self._refit_after < REFIT
        self._refit_after = min(REFIT, 2 * self._refit_after)
        self._refit_in = self._refit_after
        if early or self._refits % REPLAN == 0:
            self._replan()

    def _replan(self) -> None:
        """Let plans be made again, from what is known by now."""
        self._drift.settle()
        for _, plans in self._known.values():
            plans.clear()
        offset, share = self._acceptance.surest(SURE)
        self._telling = offset > TELLING
        self._surest, self._share = (offset, share) if self._telling else (0.0, 1.0)

    def _planned(self) -> DraftPlan:
        """Return the plan for how easy the text is now, and how fast the rival."""
        cell = int(self._acceptance.mean * CELLS)
        if self._rival is None:
            floor = 0
        else:
            floor = int(self._floor() * self._drift.prices.total[0] * FINE)
        known = self._plans.get(cell + CELLS * floor)
        return known or self._make_plan(cell, floor)

    def _make_plan(self, cell: int, floor: int) -> DraftPlan:
        mean = (cell + 0.5) / CELLS
        odds = log(mean / (1.0 - mean))
        prices, acceptance = self._drift.prices, self._acceptance
        rate = (floor / FINE if floor else 1.0) / prices.total[0]
        made = plan(
            prices,
            acceptance.chances(odds),
            acceptance.chances(odds, self._surest),
            self._share,
            rate,
        )
        self._plans[cell + CELLS * floor] = made
        return made

    def _unpayable(self) -> str | None:
        """Say so where costs are such that not even perfect drafts would pay."""
        total = self._drift.prices.total
        pays = ((g + 1) * total[0] > total[g] for g in range(1, self._most + 1))
        if not self._most or any(pays):
            return None
        return (
            f"drafting and verifying one token takes {total[1] / total[0] - 1:.1f} times as long "
            "as a plain step here: no acceptance pays for that"
        )

    def _unprofitable(self) -> str | None:
        if self._judged >= ENOUGH:
            rate = self._kept / self._judged
            return f"acceptance {rate:.2f} over the last {self._judged} drafted tokens"
        if self._rests.dull >= ENOUGH:
            return f"the draft was unsure of its first token {self._rests.dull} times in a row"
        return None


class LoadAwareGamma:
    """Lets a policy go by how many rows share the passes: the more, the less drafting pays.

    A pass of many tokens is bound by arithmetic, and each drafted token then costs its share.
    """

    def __init__(self, policy: AutoGamma, load: Callable[[], int]) -> None:
        self._policy = policy
        self._load = load
        self.decide = policy.decide
        self.observe = policy.observe

    def choose(self) -> int:
        """See `GammaPolicy`."""
        self._policy.set_load(max(1, self._load()))
        return self._policy.choose()
