"""What a completion asks of engines: one pass at a time, run by whoever owns them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from specrt.engine import Engine, Output

T = TypeVar("T")


class Pass(NamedTuple):
    """One forward pass of one row of text; see `Engine.forward`."""

    engine: Engine
    tokens: Sequence[int]
    start: int
    rows: int
    """How many of the last positions are scored."""

    def run(self) -> Output:
        """Run it on an engine of one row."""
        return self.engine.forward((self.tokens,), self.start, self.rows)


Asking = Generator[Pass, Output, T]
"""Asks for passes, is sent what each left behind, and returns a T.

A completion says what it needs and never runs a pass itself. So its rounds can be run alone, or
with the rows of other completions in the same passes, and are the same rounds.
"""


def alone(asking: Asking[T]) -> T:
    """Run what asks for passes to its end, one pass after the other, on engines of one row."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(asked.run())
    except StopIteration as end:
        result: T = end.value
        return result
