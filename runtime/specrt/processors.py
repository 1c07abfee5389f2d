"""Edits of a row of scores, as requests ask for them; those of transformers and vLLM.

Each keeps what it must know of the text so far, and takes drafted tokens before a row as history of
that row alone. All change few scores, whatever the vocabulary, but for `AllowedTokens`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError

Row = NDArray[np.float32]
Callback = Callable[[list[int], Row], Row]
"""Called with the token ids of prompt and output, and a row of scores [V]; returns the new row."""

_NEVER = np.float32(-np.inf)


class AllowedTokens:
    """Lets only some tokens be."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.unique(np.array(ids, np.int64))

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        kept = row[self._ids]
        row[:] = _NEVER
        row[self._ids] = kept


class BadWords:
    """Keeps sequences of tokens from being completed."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in sequences]
        self._reach = max(map(len, self._words)) - 1
        self._last: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember the latest tokens."""
        self._last = [*self._last, *tokens][-self._reach :] if self._reach else []

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        seen = (*self._last, *path)
        for *before, last in self._words:
            if not before or tuple(before) == seen[-len(before) :]:
                row[last] = _NEVER


class MinTokens:
    """Keeps the text from ending before it has so many tokens."""

    def __init__(self, least: int, ends: Sequence[int]) -> None:
        self._left = least
        self._ends = np.array(sorted(ends), np.int64)
        self._begun = False

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted; the first tokens are the prompt."""
        self._left -= len(tokens) if self._begun else 0
        self._begun = True

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        if len(path) < self._left:
            row[self._ends] = _NEVER


class LogitBias:
    """Adds to the scores of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = np.array(list(bias), np.int64)
        self._added = np.array(list(bias.values()), np.float32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        row[self._ids] += self._added


class Seen:
    """Which tokens there were, and how often; the different ones as an array that grows."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._times = np.empty(64, np.float32)
        self._places: dict[int, int] = {}

    def add(self, tokens: Sequence[int]) -> None:
        """Count tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, self._ids])
                self._times = np.concatenate([self._times, self._times])
            self._ids[place] = token
            self.counts[token] = self.counts.get(token, 0) + 1
            self._times[place] = self.counts[token]

    @property
    def ids(self) -> NDArray[np.int64]:
        """The different tokens, in the order they came."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> NDArray[np.float32]:
        """How often each of them came."""
        return self._times[: len(self._places)]


class RepetitionPenalty:
    """Divides scores above 0 of tokens in prompt or output, and multiplies those below.

    Source: Keskar et al. 2019, arXiv:1909.05858.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        self._seen = Seen()

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember which tokens there were."""
        self._seen.add(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        self._punish(row, self._seen.ids)
        fresh = {token for token in path if token not in self._seen.counts}
        if fresh:
            self._punish(row, np.array(sorted(fresh), np.int64))

    def _punish(self, row: Row, ids: NDArray[np.int64]) -> None:
        scores = row[ids]
        with np.errstate(over="ignore"):  # what was as good as ruled out is so now
            row[ids] = np.where(scores > 0, scores / self._penalty, scores * self._penalty)


class OutputPenalties:
    """Takes from the scores of tokens of the output: once each, and once each time.

    As vLLM and OpenAI define presence and frequency penalties; the prompt does not count.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._seen = Seen()
        self._begun = False

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted; the first tokens are the prompt."""
        if self._begun:
            self._seen.add(tokens)
        self._begun = True

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        known = self._seen
        row[known.ids] -= self._presence + self._frequency * known.times
        for token, times in Counter(path).items():
            row[token] -= self._frequency * np.float32(times)
            if token not in known.counts:
                row[token] -= self._presence


class NoRepeatNgram:
    """Keeps any n tokens in a row from coming twice.

    Source: Paulus et al. 2017, arXiv:1705.04304.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._after: dict[tuple[int, ...], list[int]] = {}
        self._last: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember what followed each run of tokens."""
        for begin, token in _runs(self._last, tokens, self._size):
            self._after.setdefault(begin, []).append(token)
        self._last = self._latest(tokens)

    def _latest(self, tokens: Sequence[int]) -> list[int]:
        return [*self._last, *tokens][-(self._size - 1) :] if self._size > 1 else []

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        now = tuple(self._latest(path))
        if len(now) < self._size - 1:
            return
        row[self._after.get(now, [])] = _NEVER
        row[[token for begin, token in _runs(self._last, path, self._size) if begin == now]] = (
            _NEVER
        )


def _runs(
    before: Sequence[int], tokens: Sequence[int], size: int
) -> list[tuple[tuple[int, ...], int]]:
    """Return, for each new token that ends a run of `size`, what comes before it and itself."""
    text = [*before, *tokens]
    ends = range(len(before), len(text))
    return [(tuple(text[e - size + 1 : e]), text[e]) for e in ends if e >= size - 1]


class Custom:
    """A function of the caller's."""

    def __init__(self, function: Callback) -> None:
        self._function = function
        self._tokens: list[int] = []

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember the text."""
        self._tokens += tokens

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`.

        Raises: RequestError for what is no row of scores.
        """
        name = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            given = self._function([*self._tokens, *path], row.copy())
            with np.errstate(over="ignore"):
                made = np.asarray(given).astype(np.float32)
        except Exception as error:  # whatever the caller's function raises
            raise RequestError(f"the logits processor {name} failed: {error!r}") from error
        if made.shape != row.shape:
            raise RequestError(
                f"the logits processor {name} returned shape {list(made.shape)}; expected "
                f"{list(row.shape)}, one score for each token"
            )
        if not made.max() < np.inf:
            raise RequestError(
                f"the logits processor {name} returned NaN or infinity; expected scores, and -inf "
                "for what must not come"
            )
        row[:] = made
