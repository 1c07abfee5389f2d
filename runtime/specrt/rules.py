"""What a request says about the next token besides temperature: edits of a row of scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specrt.errors import RequestError

Row = NDArray[np.float32]
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
class Spot(Processor, Protocol):
    """A processor that changes few scores, and knows which."""

    def touches(self, path: Sequence[int]) -> Ids:
        """Return all tokens but those of the path whose scores `edit` may change."""


@runtime_checkable
class Filter(Processor, Protocol):
    """A processor that can make its edit while it copies a row."""

    def copy(self, row: Row, into: Row) -> None:
        """Write an edited row into another. Shapes: both [V] f32, or shorter."""


class Rules:
    """The processors of one request, in order, and how far they know the text."""

    def __init__(self, processors: Sequence[Processor], vocabulary: int) -> None:
        self._processors = processors
        spots = [p for p in processors if isinstance(p, Spot)]
        self._spots = spots if spots and len(spots) == len(processors) else None
        first = processors[0] if processors else None
        self._filter = first if isinstance(first, Filter) else None
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
