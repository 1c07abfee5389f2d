"""The slots of a pair of engines: what each KV buffer holds, and which one suits a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specrt.engine.protocol import Engine, PackedEngine
from specrt.scheduler.request import Request
from specrt.speculation.kv_cache import KVCache


class Slot:
    """One row of text of target and draft.

    Holds: the KV buffers hold a prefix of `tokens`, as long as each cache says; it stays when a
    request is over, for the next that begins alike.
    """

    def __init__(self, index: int, engines: Sequence[Engine]) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.caches = [KVCache(engine) for engine in engines]
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

    def take(self, request: Request, source: Slot, used: int) -> None:
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
        self.caches = [KVCache(c.engine, min(c.length, most)) for c in self.caches]

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


WORTH = 16
"""Tokens that must be saved for a copy from another row, or for waiting until it holds them."""


class SlotTable:
    """All rows, with `keeps` what their buffers hold of requests that are over."""

    def __init__(self, engines: Sequence[Engine], *, keeps: bool) -> None:
        self._keeps = keeps
        self._copies = all(map(copies, engines))
        self._rows = [Slot(i, engines) for i in range(engines[0].batch)]
        self._taken = 0

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Slot]:
        """Go through all rows."""
        return iter(self._rows)

    def free(self, request: Request) -> Slot | None:
        """Return the free row that holds most of a text, else the one that was free longest."""

        def worth(row: Slot) -> tuple[int, int]:
            shared = row.shared(request.tokens)
            return (shared if shared >= WORTH else 0, -row.used)

        return max((r for r in self._rows if r.request is None), key=worth, default=None)

    def expected(self, request: Request) -> bool:
        """Tell whether a row that reads its prompt will hold much more of a text than any does."""
        if not self._copies or request.fresh or not self._keeps:
            return False
        have = max(row.shared(request.tokens) for row in self._rows)
        reading = [r for r in self._rows if r.request and not (r.request.paused or r.forgotten)]
        return max((common(r.tokens, request.tokens) for r in reading), default=0) >= have + WORTH

    def take(self, row: Slot, request: Request) -> None:
        """Let a request have a row, with what this or another one holds of its text."""
        source = row
        if request.fresh or not self._keeps:
            row.forget()
        elif self._copies:
            best = max(self._rows, key=lambda r: r.shared(request.tokens))
            if best.shared(request.tokens) >= row.shared(request.tokens) + WORTH:
                source = best
        self._taken += 1
        row.take(request, source, self._taken)
