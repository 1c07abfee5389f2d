"""A row of the engines: what its KV buffers hold, and which request uses it."""

from __future__ import annotations

from collections.abc import Sequence

from specrt.engine import Engine, PackedEngine
from specrt.request import Request
from specrt.target import CachedTokens


class Row:
    """One row of text of target and draft.

    Holds: the KV buffers hold a prefix of `tokens`, as long as each cache says; it stays when a
    request is over, for the next that begins alike.
    """

    def __init__(self, index: int, engines: Sequence[Engine]) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.caches = [CachedTokens(engine) for engine in engines]
        """What each model holds, the target first."""
        self.request: Request | None = None
        self.used = 0
        """When it was taken last, as a count of requests."""
        self.forgotten = False
        """Whether nobody else may begin with what it holds of a text that is being written."""

    def shared(self, tokens: Sequence[int]) -> int:
        """Return how many of the first tokens the target's buffers hold already."""
        if self.forgotten:
            return 0
        return min(self.caches[0].length, common(self.tokens, tokens))

    def take(self, request: Request, source: Row, used: int) -> None:
        """Take up a request, with what `source`, mostly this row, holds of its text."""
        most = min(common(source.tokens, request.tokens), len(request.tokens) - 1)
        lengths = [min(held.length, most) for held in source.caches]
        if source is not self:
            for held, length in zip(self.caches, lengths, strict=True):
                held.length = 0  # whatever becomes of the copy
                copy_row(held.engine, source.index, self.index, length)
        for cache, length in zip(request.caches, lengths, strict=True):
            cache.length = length
        self.tokens = request.tokens
        self.caches = request.caches
        self.request = request
        self.used = used

    def release(self) -> None:
        """Let the request go, and keep what the buffers hold of its text."""
        self.request = None
        self.tokens = list(self.tokens)
        most = 0 if self.forgotten else len(self.tokens)
        self.forgotten = False
        self.caches = [CachedTokens(c.engine, min(c.length, most)) for c in self.caches]

    def forget(self) -> None:
        """Take it that the buffers hold nothing, as soon as nobody needs what they hold."""
        if self.request is not None:
            self.forgotten = True
        else:
            self.lose()

    def lose(self) -> None:
        """Take note that the buffers were overwritten; who uses the row reads its text again."""
        for cache in self.caches:
            cache.length = 0


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many first tokens two texts share."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # whole slices compare faster than tokens
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def copies(engine: Engine) -> bool:
    """Tell whether rows of an engine can be copied."""
    return isinstance(engine, PackedEngine)


def copy_row(engine: Engine, source: int, to: int, length: int) -> None:
    """Copy what a row of an engine holds to another."""
    assert isinstance(engine, PackedEngine), "rows are copied where engines can"
    engine.copy_row(source, to, length)
