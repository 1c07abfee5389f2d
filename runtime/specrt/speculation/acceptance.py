"""How likely a drafted token is to be kept."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from math import exp, log, log1p
from operator import add, mul

from specrt.speculation.costs import RECENT, TRUST

SWITCH_CHANCE = 0.01
"""How likely the text is to become easier or harder from one round to the next."""
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
        total = _sum(hope)
        self._belief = self._usual = [share / total for share in hope]
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

        A confidence of 1, and one that is not a probability, tells nothing.
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
        total = _sum(belief)
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
            kept = _sum(map(mul, belief, powers))
            ease, before = kept / (before - kept), kept
            odds = ease * depth ** self._weights[2]
            reach *= odds / (1.0 + odds)
            tokens += reach
            self._ease.append(ease)
            self.reach.append(reach)
            self.tokens.append(tokens)


def _sum(values: Iterable[float]) -> float:
    """Add up from the left, each step rounded; `sum` does not so from Python 3.12 on."""
    return reduce(add, values)
