"""Lookup: what followed the text's last tokens when they were there before."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.speculation.gamma import GammaPolicy, DraftDecision
from specrt.passes import Asking
from specrt.round import Round
from specrt.suffixes import Match, Suffixes
from specrt.verify import NOTHING, Proposal

LEAST = 2
"""One matching token is right a quarter of the time, too seldom to pay for a wider pass; two are
right more often than not."""
MOST = 16
"""Of longer matches the most recent is as good as the longest."""


class NgramDrafter:
    """Copies from the prompt and from the output so far, without any model.

    It finds the longest suffix of the text, `least` to `most` tokens, that was there before, takes
    its most recent occurrence, and drafts the tokens that followed. Where they run up to the end
    of the text it goes on with the tokens it has just drafted, so that a text of any period
    continues. Where nothing matches it proposes nothing, and the round is a plain step.

    `gamma` says how far to draft. The confidence it is told is n / (n + 2) for a token that
    follows n tokens of agreement: the match, and the tokens drafted before it, which count only
    once they are kept. It is known without drawing anything, so leaving tokens out on its word is
    lossless under both rules. A drafted token is certain: there is no distribution.

    The text is read as it grows, each token once. A drafter is made for one completion; given a
    text that does not continue the one before it starts anew. It looks only at how long the text
    is and at the last token read, because a wrong guess costs a rejected draft and nothing else.
    Source: prompt lookup, Saxena 2023; the copies that overlap themselves, Ziv and Lempel 1977.
    """

    SOURCE = "ngram"

    def __init__(self, gamma: GammaPolicy, *, least: int = LEAST, most: int = MOST) -> None:
        self._gamma = gamma
        self._least = least
        self._most = most
        self._suffixes = Suffixes(least, most)
        self._last = -1

    def propose(self, tokens: Sequence[int], room: int) -> Asking[Proposal]:
        """Copy at most `room` tokens, and none when the policy chose a plain step."""
        yield from ()
        most = min(self._gamma.choose(), room)
        if most <= 0:
            return NOTHING
        self._read(tokens)
        match = self._suffixes.longest()
        return NOTHING if match is None else self._copy(tokens, match, most)

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Let the policy learn; the tokens are read when they are needed."""
        self._gamma.observe(round_)

    def _read(self, tokens: Sequence[int]) -> None:
        known = len(self._suffixes)
        if known > len(tokens) or (known and tokens[known - 1] != self._last):
            self._suffixes, known = Suffixes(self._least, self._most), 0
        self._suffixes.extend(tokens[known:])
        self._last = tokens[-1]

    def _copy(self, tokens: Sequence[int], match: Match, most: int) -> Proposal:
        agreed, start = match
        decide = self._gamma.decide
        period = len(tokens) - start
        drafted: list[int] = []
        confidences: list[float] = []
        for i in range(most):
            confidence = agreed / (agreed + 2)
            decision = decide(i + 1, confidence)
            if decision is DraftDecision.DISCARD:
                break
            drafted.append(tokens[start + i] if i < period else drafted[i - period])
            confidences.append(confidence)
            if decision is DraftDecision.STOP:
                break
            agreed += 1
        return Proposal(drafted, None, self.SOURCE, confidences) if drafted else NOTHING
