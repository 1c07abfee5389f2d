"""The rows of a pair of engines: which one suits a text, and where it can be had from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specrt.engine import Engine
from specrt.request import Request
from specrt.row import Row, common, copies

WORTH = 16
"""Tokens that must be saved for a copy from another row, or for waiting until it holds them."""


class Rows:
    """All rows, with `keeps` what their buffers hold of requests that are over."""

    def __init__(self, engines: Sequence[Engine], *, keeps: bool) -> None:
        self._keeps = keeps
        self._copies = all(map(copies, engines))
        self._rows = [Row(i, engines) for i in range(engines[0].batch)]
        self._taken = 0

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """Go through all rows."""
        return iter(self._rows)

    def free(self, request: Request) -> Row | None:
        """Return the free row that holds most of a text, else the one that was free longest."""

        def worth(row: Row) -> tuple[int, int]:
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

    def take(self, row: Row, request: Request) -> None:
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
