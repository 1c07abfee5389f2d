"""N-gram lookup: what followed the text's last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from specrt.errors import RequestError
from specrt.speculation.gamma import DraftDecision, GammaPolicy
from specrt.speculation.round import NOTHING, Passes, Proposal, Round

NONE = -1


class Match(NamedTuple):
    """An earlier occurrence of the text's last tokens: `text[end - length : end]`."""

    length: int
    end: int
    """Index of the token that followed it."""


class Suffixes:
    """Finds the longest suffix of a text that occurred before, at its most recent occurrence.

    Suffixes shorter than `least` do not count, and of longer ones only the last `most` tokens do.
    Appending a token costs O(most - least) on average over a text, whatever its length: in practice
    a dictionary lookup or two. The worst single token, such as another one after a long run of
    equal tokens, costs as much as the text is long. `longest` does no work.

    A state is a set of suffixes that have the same occurrences, all lengths between its longest
    and, exclusively, that of the state it links to. The newest state's link is the longest suffix
    that occurred before. Where a state last ended is noted only for states with suffixes of the
    lengths that count: they are a short stretch of the path of links, from the match down.
    Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
    """

    def __init__(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise RequestError(
                f"suffixes of {least} to {most} tokens cannot be; expected at least 1, and "
                "no more at least than at most"
            )
        self._least = least
        self._most = most
        self._size = 0
        self._newest = 0
        self._place = 0
        """The state of the match, or of its last `most` tokens."""
        self._match: Match | None = None
        # State 0 is the empty suffix; it links to nothing. Most states have one transition, kept
        # in two lists; a dictionary for each would take three times the memory of all the rest.
        self._length = [0]
        self._link = [NONE]
        self._recent = [0]
        self._token = [NONE]
        self._next = [NONE]
        self._others: list[dict[int, int] | None] = [None]

    def __len__(self) -> int:
        """Return how many tokens the text has."""
        return self._size

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)

    def longest(self) -> Match | None:
        """Return the most recent earlier occurrence of the longest suffix that has one."""
        return self._match

    def _append(self, token: int) -> None:
        lengths, link, recent = self._length, self._link, self._recent
        ahead = self._after(self._place, token)
        state = self._grow(token)
        length = lengths[state]
        if length > self._most:
            # The match was full and grew: its last tokens are those of the match before, ahead by
            # one transition and, being as many again, perhaps down a link.
            length, state = self._most, ahead
            while lengths[link[state]] >= length:
                state = link[state]
        self._place = state
        self._match = Match(length, recent[state]) if length >= self._least else None
        while lengths[state] >= self._least:
            recent[state] = self._size
            state = link[state]

    def _after(self, state: int, token: int) -> int:
        """Return the state that a token leads to, or NONE."""
        if self._token[state] == token:
            return self._next[state]
        others = self._others[state]
        return NONE if others is None else others.get(token, NONE)

    def _grow(self, token: int) -> int:
        """Add the state of the whole text, and return the one it links to."""
        newest, self._newest = self._newest, len(self._link)
        self._size += 1
        self._add(self._size, self._size, NONE, NONE, None)
        self._token[newest], self._next[newest] = token, self._newest
        state = self._link[newest]
        after = NONE
        while state != NONE:
            after = self._after(state, token)
            if after != NONE:
                break
            self._lead(state, token, self._newest)
            state = self._link[state]
        if state == NONE:
            after = 0
        elif self._length[after] != self._length[state] + 1:
            after = self._split(after, state, token)
        self._link[self._newest] = after
        return after

    def _split(self, whole: int, before: int, token: int) -> int:
        """Move suffixes to a new state: of `whole`, those that now occurred once more.

        They are the ones that `token` leads to from `before` and from the states it links to.
        """
        length, state = self._length[before] + 1, len(self._link)
        others = self._others[whole]
        self._add(
            length,
            self._recent[whole],
            self._token[whole],
            self._next[whole],
            others and others.copy(),
        )
        self._link[state], self._link[whole] = self._link[whole], state
        while before != NONE and self._after(before, token) == whole:
            self._lead(before, token, state)
            before = self._link[before]
        return state

    def _lead(self, state: int, token: int, to: int) -> None:
        """Let a token lead from one state to another."""
        others = self._others[state]
        if self._token[state] == token:
            self._next[state] = to
        elif others is None:
            self._others[state] = {token: to}
        else:
            others[token] = to

    def _add(
        self, length: int, recent: int, token: int, after: int, others: dict[int, int] | None
    ) -> None:
        self._length.append(length)
        self._link.append(NONE)
        self._recent.append(recent)
        self._token.append(token)
        self._next.append(after)
        self._others.append(others)


LEAST = 2
"""One matching token is right a quarter of the time, too seldom to pay for a wider pass; two are
right more often than not."""

MOST = 16
"""Of longer matches the most recent is as good as the longest."""


class NgramDrafter:
    """Copies from the prompt and from the output so far, without any model.

    With a `source` it copies from that, too: it is read as what stands before the text.

    It finds the longest suffix of the text, `least` to `most` tokens, that was there before, takes
    its most recent occurrence, and drafts the tokens that followed. Where they run up to the end
    of the text it goes on with the tokens it has just drafted, so that a text of any period
    continues. Where nothing matches it proposes nothing, and the round is a plain step.

    `gamma` decides how far to draft. The confidence of a token is n / (n + 2), where n tokens of
    agreement come before it: the match, and the tokens drafted so far, which count only once they
    are accepted. It is known without drawing anything, so leaving tokens out because of it is
    lossless under every verifier. A drafted token is certain: there is no distribution.

    The text is read as it grows, each token once. A drafter is made for one completion; given a
    text that does not continue the one before it starts anew. It looks only at how long the text
    is and at the last token read, because a wrong guess costs a rejected draft and nothing else.
    Source: prompt lookup, Saxena 2023; the copies that overlap themselves, Ziv and Lempel 1977.
    """

    SOURCE = "ngram"

    def __init__(
        self,
        gamma: GammaPolicy,
        *,
        least: int = LEAST,
        most: int = MOST,
        source: Sequence[int] = (),
    ) -> None:
        self._gamma = gamma
        self._source = source
        self._joined: list[int] = []
        """Source and text, as far as it is read; nothing without a source."""
        self._least = least
        self._most = most
        self._suffixes = Suffixes(least, most)
        self._last = -1

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Copy at most `room` tokens, and none when the policy chose a plain step."""
        yield from ()
        most = min(self._gamma.choose(), room)
        if most <= 0:
            return NOTHING
        match = self.find(tokens)
        return NOTHING if match is None else self._copy(self.searched(tokens), match, most)

    def find(self, tokens: Sequence[int]) -> Match | None:
        """Return where the last tokens of a text occurred before, in what is `searched`."""
        self._read(tokens)
        return self._suffixes.longest()

    def searched(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return what a match is a place in, once a text was read: that, after its source."""
        return self._joined if self._source else tokens

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Let the policy learn; the tokens are read when they are needed."""
        self._gamma.observe(round_)

    def _read(self, tokens: Sequence[int]) -> None:
        before = len(self._source)
        known = len(self._suffixes) - before
        if known > len(tokens) or (known > 0 and tokens[known - 1] != self._last):
            self._suffixes, known = Suffixes(self._least, self._most), -before
        if known < 0:
            self._suffixes.extend(self._source)
            self._joined, known = [*self._source], 0
        new = tokens[known:]
        self._suffixes.extend(new)
        if before:
            self._joined += new
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
