"""Logits processors: edits of a row of scores; the same as transformers' and vLLM's.

Each keeps what it must know of the text so far, and takes drafted tokens before a row as history of
that row alone: a score comes out the same, to the bit, whether a token before it is committed yet
or not. All change few scores, whatever the vocabulary, but for `AllowedTokens` and `Custom`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError
from specrt.params import Callback, Row


class TokenCounts:
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


Ids = NDArray[np.int64]

T = TypeVar("T")


class Processor(Protocol):
    """Edits rows of scores; it learns of tokens as they are committed.

    A row of a verify pass comes after tokens that are only drafted: its `path`, which counts as
    history for that row and for no other.
    """

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn of tokens that are now part of the text, in order."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """Change scores in place. Shapes: row [V] f32."""


@runtime_checkable
class SparseProcessor(Processor, Protocol):
    """A processor that changes few scores, and knows which."""

    def touches(self, path: Sequence[int]) -> Ids:
        """Return all tokens but those of the path whose scores `edit` may change."""


@runtime_checkable
class MaskProcessor(Processor, Protocol):
    """A processor that can make its edit while it copies a row."""

    def copy(self, row: Row, into: Row) -> None:
        """Write an edited row into another. Shapes: both [V] f32, or shorter."""


class LogitsProcessors:
    """The processors of one request, in order, and how far they know the text."""

    def __init__(self, processors: Sequence[Processor], vocabulary: int) -> None:
        self._processors = processors
        spots = [p for p in processors if isinstance(p, SparseProcessor)]
        self._spots = spots if spots and len(spots) == len(processors) else None
        first = processors[0] if processors else None
        self._filter = first if isinstance(first, MaskProcessor) else None
        self._edited = np.empty(vocabulary, np.float32)
        self._known = 0

    def learn(self, tokens: Sequence[int]) -> None:
        """Take over what was committed since the last time."""
        if self._known < len(tokens):
            new = tokens[self._known :]
            for processor in self._processors:
                processor.commit(new)
            self._known = len(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> Row:
        """Return a row with every edit made, in memory that the next call overwrites.

        Shapes: row [V] f32, or shorter, of a draft that knows fewer tokens.
        """
        edited, rest = self._edited, self._processors
        if self._filter is None:
            edited[: len(row)] = row
        else:
            self._filter.copy(row, edited[: len(row)])
            rest = rest[1:]
        edited[len(row) :] = -np.inf
        for processor in rest:
            processor.edit(edited, path)
        return edited[: len(row)]

    def read(self, row: Row, path: Sequence[int], take: Callable[[Row], T]) -> T:
        """Return what `take` makes of a row with every edit made; it must not keep the row.

        Where all processors say what they touch the row itself is edited, and then put right
        again: a copy of a large vocabulary takes longer than all edits.
        Shapes: as for `edit`.
        """
        if self._spots is None or len(row) < len(self._edited) or not row.flags.writeable:
            return take(self.edit(row, path))
        touched = [spot.touches(path) for spot in self._spots]
        ids = np.concatenate((*touched, path) if path else touched)
        scores = row[ids]
        try:
            for spot in self._spots:
                spot.edit(row, path)
            return take(row)
        finally:
            row[ids] = scores


def likeliest(row: Row) -> int:
    """Return the token of the largest score.

    Raises: RequestError where every token was ruled out.
    """
    best = int(row.argmax())
    if not row[best] > -np.inf:  # NaN included
        raise RequestError(
            "no token is left that the request allows here; loosen allowed_token_ids, bad_words, "
            "no_repeat_ngram_size, min_tokens, its structure or its own processors"
        )
    return best


Run = tuple[tuple[int, ...], int]

_NEVER = np.float32(-np.inf)


class AllowedTokens:
    """Lets only some tokens be."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int64)
        self._most = np.empty(0, np.float32)

    def commit(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        self.copy(row, row)

    def copy(self, row: Row, into: Row) -> None:
        """See `MaskProcessor`."""
        if len(self._most) < len(row):
            self._most = np.full(max(len(row), self._ids.max() + 1), _NEVER)
            self._most[self._ids] = np.inf
        # Assigning through a mask takes 30 times as long.
        np.minimum(row, self._most[: len(row)], out=into)


class BadWords:
    """Keeps sequences of tokens from being completed."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._words = [tuple(word) for word in sequences]
        self._reach = max(map(len, self._words)) - 1
        self._ids = np.array([word[-1] for word in self._words], np.int64)
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

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._ids


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

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._ends


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

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._ids


class RepetitionPenalty:
    """Divides scores above 0 of tokens in prompt or output, and multiplies those below.

    Source: Keskar et al. 2019, arXiv:1909.05858.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = np.float32(penalty)
        # The lesser of both is the divided one above 0, and the multiplied one below.
        self._harder = np.minimum if penalty >= 1.0 else np.maximum
        self._seen = TokenCounts()

    def commit(self, tokens: Sequence[int]) -> None:
        """Remember which tokens there were."""
        self._seen.add(tokens)

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        ids = self._seen.ids
        ids = np.concatenate((ids, path)) if path else ids  # twice the same score does no harm
        scores = row[ids]
        with np.errstate(over="ignore"):  # what was as good as ruled out is so now
            row[ids] = self._harder(scores / self._penalty, scores * self._penalty)

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._seen.ids


class OutputPenalties:
    """Takes from the scores of tokens of the output: once each, and once each time.

    As vLLM and OpenAI define presence and frequency penalties; the prompt does not count.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence, self._frequency = np.float32(presence), np.float32(frequency)
        self._seen = TokenCounts()
        self._taken = np.empty(0, np.float32)
        self._begun = False

    def commit(self, tokens: Sequence[int]) -> None:
        """Count what was emitted; the first tokens are the prompt."""
        if self._begun:
            self._seen.add(tokens)
            self._taken = self._presence + self._frequency * self._seen.times
        self._begun = True

    def edit(self, row: Row, path: Sequence[int]) -> None:
        """See `Processor`."""
        ids, taken = self._seen.ids, self._taken
        if path:
            counts = self._seen.counts
            times = [counts.get(token, 0) + path.count(token) for token in path]
            more = self._presence + self._frequency * np.array(times, np.float32)
            # Of a token that is there twice the last one holds.
            ids, taken = np.concatenate((ids, path)), np.concatenate((taken, more))
        row[ids] = row[ids] - taken

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return self._seen.ids


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
        banned = self._after.get(now)
        if banned is not None:
            row[banned] = _NEVER
        for begin, token in _runs(self._last, path, self._size):
            if begin == now:
                row[token] = _NEVER

    def touches(self, path: Sequence[int]) -> Ids:
        """See `SparseProcessor`."""
        return np.array(self._after.get(tuple(self._latest(path)), ()), np.int64)


def _runs(before: Sequence[int], tokens: Sequence[int], size: int) -> list[Run]:
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
