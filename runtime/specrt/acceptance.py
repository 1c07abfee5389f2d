"""How likely drafted tokens are to be kept: a running estimate that follows the text."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from operator import mul

LEVELS = (-4.0, -2.4, -1.2, -0.2, 0.7, 1.6, 2.6, 3.9)
"""How easy the text may be, as log odds of the first drafted token: from 2 % to 98 %."""
FIRST_BELIEF = (0.12, 0.08, 0.08, 0.1, 0.17, 0.2, 0.15, 0.1)
"""Before any round: nothing is known, and most pairs are worth something."""
CHANGE = 0.02
"""How likely the text is to turn, per round."""
LEARNING = 0.01
"""How much of each round's belief goes into what texts are usually like."""
EVER = 0.01
"""The least share of each level in what texts are usually like: nothing is ruled out."""

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.985)
UNTOLD = len(EDGES) + 1
"""The band of confidence 1.0, which is what a drafter says that has none to give."""
PRIOR_BANDS = (-2.2, -1.7, -1.3, -1.0, -0.8, -0.5, -0.3, 0.0, 0.4, 0.8, 1.3, 1.8, 0.0)
FINE = 128
STIFFNESS = 1.5
"""Evidence, in tokens' worth of variance, that an offset's prior weighs."""
MEMORY = 0.97
"""Share of that evidence kept at each refit."""


def _band_table() -> tuple[int, ...]:
    return tuple(sum(i / FINE >= edge for edge in EDGES) for i in range(FINE))


class Acceptance:
    """The chance of each drafted token, given its place and its drafter's confidence.

    The log odds are a sum: how easy the text is now, an offset of the place, an offset of the
    band of confidence. How easy it is now is a belief over a few levels, corrected by every token
    judged and mixed each round with what texts are usually like, in case the text has turned. A
    steady text therefore gives a steady estimate, and one that alternates is followed within two
    or three rounds. The offsets are refitted now and then by a damped Newton step of a logistic
    regression, whose prior is the confidence itself.
    Source: the forward algorithm of a hidden Markov model, Rabiner 1989, section III.A.
    """

    def __init__(self, most: int) -> None:
        self.places = [0.0] * most
        self.bands = list(PRIOR_BANDS)
        self.seen = [(i + 1) / 8.0 for i in range(UNTOLD)] + [0.0]
        self._belief = list(FIRST_BELIEF)
        self._usual = list(FIRST_BELIEF)
        self._band = _band_table()
        self._kept: dict[tuple[int, int], list[float]] = {}
        self._chances = [1 / (1 + exp(-level)) for level in LEVELS]
        self._place_gap = [0.0] * most
        self._place_info = [0.0] * most
        self._band_gap = [0.0] * len(self.bands)
        self._band_info = [0.0] * len(self.bands)
        self.mean = 0.0
        self.odds = 0.0
        self._settle()

    def band(self, confidence: float) -> int:
        """Return the band a confidence falls in; of anything odd, that of no confidence."""
        return self._band[int(confidence * FINE)] if 0.0 <= confidence < 1.0 else UNTOLD

    def chance(self, place: int, confidence: float) -> float:
        """Return the chance of a token at a place, from 0, given that those before it are kept."""
        band = self._band[int(confidence * FINE)] if 0.0 <= confidence < 1.0 else UNTOLD
        return 1.0 / (1.0 + exp(-(self.odds + self.places[place] + self.bands[band])))

    def observe(self, accepted: int, evaluated: int, confidences: Sequence[float]) -> None:
        """Learn from the tokens of one draft that were judged."""
        kept = refused = 0.0
        told = len(confidences) >= evaluated
        for place in range(evaluated):
            band = self.band(confidences[place]) if told else UNTOLD
            offset = self.places[place] + self.bands[band]
            chance = 1.0 / (1.0 + exp(-(self.odds + offset)))
            if place < accepted:
                kept += offset
                gap = 1.0 - chance
            else:
                refused = offset
                gap = -chance
            info = chance * (1.0 - chance)
            self._place_gap[place] += gap
            self._place_info[place] += info
            self._band_gap[band] += gap
            self._band_info[band] += info
            self.seen[band] += 1.0
        belief = self._belief
        if accepted:
            belief = list(map(mul, belief, self._likelihood(accepted, round(kept / accepted * 4))))
        if evaluated > accepted:
            belief = list(map(mul, belief, self._likelihood(0, round(refused * 4))))
        self._turn(belief)

    def _turn(self, belief: list[float]) -> None:
        scale = (1.0 - CHANGE) / sum(belief)
        usual = self._usual
        self._belief = belief = [b * scale + CHANGE * u for b, u in zip(belief, usual, strict=True)]
        self._usual = [u + LEARNING * (b - u) for b, u in zip(belief, usual, strict=True)]
        self._settle()

    def _settle(self) -> None:
        self.mean = mean = sum(map(mul, self._belief, self._chances))
        self.odds = log(mean / (1.0 - mean))

    def _likelihood(self, accepted: int, quarters: int) -> list[float]:
        key = (accepted, quarters)
        known = self._kept.get(key)
        if known is None:
            chances = [1 / (1 + exp(-(level + quarters / 4))) for level in LEVELS]
            known = [c**accepted if accepted else 1 - c for c in chances]
            self._kept[key] = known
        return known

    def refit(self) -> None:
        """Correct the offsets by what was seen since, and forget a little."""
        floor = EVER
        total = sum(self._usual)
        self._usual = [(1 - floor * len(LEVELS)) * u / total + floor for u in self._usual]
        before = 0.0
        for i, place in enumerate(self.places):
            weight = self._place_info[i] + STIFFNESS
            step = (self._place_gap[i] + STIFFNESS * (before - place)) / weight
            self.places[i] = before = max(-5.0, min(5.0, place + max(-1.0, min(1.0, step))))
        first = self.places[0]
        self.places = [place - first for place in self.places]
        for b, offset in enumerate(self.bands):
            weight = self._band_info[b] + STIFFNESS
            step = (self._band_gap[b] + STIFFNESS * (PRIOR_BANDS[b] - offset)) / weight
            self.bands[b] = max(-5.0, min(5.0, offset + max(-1.0, min(1.0, step))))
        centre = sum(map(mul, self.bands, self.seen)) / sum(self.seen)
        self.bands = [b - centre for b in self.bands]
        for i in range(1, UNTOLD):
            self.bands[i] = max(self.bands[i], self.bands[i - 1])
        self._place_gap = [0.0] * len(self.places)
        self._band_gap = [0.0] * len(self.bands)
        self._place_info = [MEMORY * i for i in self._place_info]
        self._band_info = [MEMORY * i for i in self._band_info]
        self.seen = [MEMORY * s for s in self.seen]
