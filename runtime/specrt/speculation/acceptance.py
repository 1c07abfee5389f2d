"""How likely drafted tokens are to be kept: a running estimate that follows the text."""

from __future__ import annotations

from itertools import accumulate
from math import exp, log
from operator import mul

LEVELS = (-4.0, -2.4, -1.2, -0.2, 0.7, 1.6, 2.6, 3.9)
"""How easy the text may be, as log odds of the first drafted token: from 2 % to 98 %."""

FIRST_BELIEF = (0.25, 0.1, 0.05, 0.05, 0.1, 0.2, 0.15, 0.1)
"""Before any round: most pairs are worth something, and the rest should be found out soon."""

CHANGE = 0.01
"""How likely the text is to turn, per round."""

HABIT = 0.2
"""Share of the belief that goes, at each refit, into what texts are usually like."""

EVER = 0.01
"""The least share of each level in what texts are usually like: nothing is ruled out."""

EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.985)
"""Where bands of confidence meet; finer where drafts are sure, for there most tokens are."""

UNTOLD = len(EDGES) + 1
"""The band of confidence 1.0, which is what a drafter says that has none to give."""

FIRST_BANDS = (-2.2, -1.7, -1.3, -1.0, -0.8, -0.5, -0.3, 0.0, 0.4, 0.8, 1.3, 1.8, 0.0)
"""Log odds of the bands, about half those of the confidence itself: drafts exaggerate."""

FINE = 128

FADE = 0.85
"""Share of the counts kept at each refit."""

WORTH = 0.15
"""What one token tells about an offset: p (1 - p), as it mostly is."""

ENOUGH = 4.0
"""Tokens judged before confidence is thought to tell anything."""

BAND_PRIOR = 1.0

PLACE_PRIOR = 2.0
"""What an offset's prior weighs, in the same unit."""


class Acceptance:
    """The chance of each drafted token, given its place and its drafter's confidence.

    The log odds are a sum: how easy the text is now, an offset of the place in the draft, an
    offset of the band its confidence is in. How easy the text is now is a belief over a few
    levels, corrected by every token judged, and mixed each round with what texts are usually
    like, in case it has turned. A steady text so gives a steady estimate, and one that alternates
    is followed within two or three rounds. The offsets are refitted every few rounds by a damped
    Newton step of a logistic regression on discounted counts. A place is drawn to the place
    before it, a band to what its confidence says, and surer bands are never held less likely.
    Source: the forward algorithm of a hidden Markov model, Rabiner 1989, section III.A.
    """

    def __init__(self, most: int) -> None:
        self.places = [0.0] * most
        """Offset of each place, that of the first being 0."""
        self.bands = list(FIRST_BANDS)
        """Offset of each band of confidence, 0 on average."""
        self.seen = [(i + 1) / 80 for i in range(UNTOLD)] + [0.0]
        """How many tokens of each band were judged lately."""
        self._belief = list(FIRST_BELIEF)
        self._usual = list(FIRST_BELIEF)
        self._change = [CHANGE * share for share in self._usual]
        self._chances = [_chance(level) for level in LEVELS]
        self._likelihoods: dict[tuple[int, int], list[float]] = {}
        self._table = [sum(i / FINE >= edge for edge in EDGES) for i in range(FINE)]
        self._tokens: list[tuple[int, float]] = []
        self._band_gaps = [0.0] * len(self.bands)
        self._place_gaps = [0.0] * most
        self._depths = [0.0] * most
        self.mean = self.odds = 0.0
        self._summarise()

    def begin(self) -> None:
        """Expect a new draft."""
        self._tokens = []

    def expect(self, place: int, confidence: float) -> float:
        """Return the chance of the next drafted token, given that those before it are kept.

        `place` is counted from 0. A confidence that is no probability tells nothing.
        """
        band = self._table[int(confidence * FINE)] if 0.0 <= confidence < 1.0 else UNTOLD
        chance = 1.0 / (1.0 + exp(-(self.odds + self.places[place] + self.bands[band])))
        self._tokens.append((band, chance))
        return chance

    def learn(self, accepted: int, evaluated: int) -> None:
        """Learn what became of the draft: how many tokens were judged, how many of them kept."""
        while len(self._tokens) < evaluated:
            self.expect(len(self._tokens), 1.0)
        places, bands, seen = self.places, self.bands, self.seen
        place_gaps, band_gaps = self._place_gaps, self._band_gaps
        self._depths[evaluated - 1] += 1.0
        offset = 0.0
        for place in range(accepted):
            band, chance = self._tokens[place]
            offset += places[place] + bands[band]
            gap = 1.0 - chance
            place_gaps[place] += gap
            band_gaps[band] += gap
            seen[band] += 1.0
        belief = self._belief
        if accepted:
            belief = list(
                map(mul, belief, self._likelihood(accepted, round(offset / accepted * 4)))
            )
        if evaluated > accepted:
            band, chance = self._tokens[accepted]
            place_gaps[accepted] -= chance
            band_gaps[band] -= chance
            seen[band] += 1.0
            offset = places[accepted] + bands[band]
            belief = list(map(mul, belief, self._likelihood(0, round(offset * 4))))
        scale = (1.0 - CHANGE) / sum(belief)
        self._belief = [b * scale + c for b, c in zip(belief, self._change)]  # noqa: B905
        self._summarise()

    def chances(self, odds: float, offset: float = 0.0) -> list[float]:
        """Return the chance of a token at each place, in a text of given ease."""
        return [_chance(odds + place + offset) for place in self.places]

    def surest(self, share: float) -> tuple[float, float]:
        """Return the mean offset of the surest tokens, and what share of all tokens they are.

        `share` is the least they should be; a band is taken as a whole. While hardly any token was
        judged they are all alike.
        """
        if sum(self.seen) < ENOUGH:
            return 0.0, 1.0
        least = share * sum(self.seen)
        count = total = 0.0
        for band in sorted(range(len(self.bands)), key=self.bands.__getitem__, reverse=True):
            count += self.seen[band]
            total += self.seen[band] * self.bands[band]
            if count >= least:
                break
        return total / count, count / sum(self.seen)

    def refit(self) -> None:
        """Correct the offsets by what was judged since, and forget some of what was before."""
        rest = 1.0 - EVER * len(LEVELS)
        self._usual = [
            rest * (usual + HABIT * (belief - usual)) + EVER
            for usual, belief in zip(self._usual, self._belief, strict=True)
        ]
        self._change = [CHANGE * share for share in self._usual]
        self._refit_places()
        self._refit_bands()

    def _refit_places(self) -> None:
        judged = sum(self._depths)
        before, fitted = 0.0, []
        for place, gap, depth in zip(self.places, self._place_gaps, self._depths, strict=True):
            pull = PLACE_PRIOR * (before - place)
            before = place + (gap + pull) / (WORTH * judged + PLACE_PRIOR)
            fitted.append(before)
            judged -= depth
        first = fitted[0]
        self.places = [place - first for place in fitted]
        self._place_gaps = [0.0] * len(fitted)
        self._depths = [FADE * depth for depth in self._depths]

    def _refit_bands(self) -> None:
        seen = self.seen
        middle = sum(map(mul, FIRST_BANDS, seen)) / sum(seen)
        fitted = [
            band + (gap + BAND_PRIOR * (first - middle - band)) / (WORTH * count + BAND_PRIOR)
            for band, first, gap, count in zip(
                self.bands, FIRST_BANDS, self._band_gaps, seen, strict=True
            )
        ]
        centre = sum(map(mul, fitted, seen)) / sum(seen)
        untold = fitted.pop()
        self.bands = [band - centre for band in accumulate(fitted, max)]
        self.bands.append(untold - centre)
        self._band_gaps = [0.0] * len(seen)
        self.seen = [FADE * count for count in seen]

    def _summarise(self) -> None:
        self.mean = mean = sum(map(mul, self._belief, self._chances))
        self.odds = log(mean / (1.0 - mean))

    def _likelihood(self, accepted: int, quarters: int) -> list[float]:
        """Return, per level, the chance of so many tokens kept in a row, or of one refused.

        `quarters` is their mean offset in quarters: coarse enough to be looked up.
        """
        key = (accepted, quarters)
        known = self._likelihoods.get(key)
        if known is None:
            chances = [_chance(level + quarters / 4) for level in LEVELS]
            known = [c**accepted if accepted else 1.0 - c for c in chances]
            self._likelihoods[key] = known
        return known


def _chance(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds))
