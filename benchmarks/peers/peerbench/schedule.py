"""Who is measured, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peerbench.protocol import PLAIN, Gamma, parse_gamma


@dataclass(frozen=True)
class Contender:
    """One row of the comparison: a peer in a mode at a gamma."""

    peer: str
    mode: str = PLAIN
    gamma: Gamma = 0

    @classmethod
    def parse(cls, text: str) -> Contender:
        """Read `peer`, `peer:plain` or `peer:mode:gamma`. Raises: ValueError."""
        peer, _, rest = text.partition(":")
        mode, _, gamma = (rest or PLAIN).partition(":")
        if not peer or (mode == PLAIN) == bool(gamma):
            raise ValueError(f"{text!r} is not a contender; write peer:plain or peer:mode:gamma")
        return cls(peer, mode, parse_gamma(gamma) if gamma else 0)

    def __str__(self) -> str:
        return f"{self.peer}:{self.mode}" + (f":{self.gamma}" if self.mode != PLAIN else "")


def interleave(contenders: Sequence[Contender], repeats: int) -> Iterator[tuple[int, Contender]]:
    """Yield (repeat, contender): all once per repeat, each repeat beginning one further on.

    Every second repeat goes the other way round: a machine that slows down meets everyone, and
    nobody is always first or always after the same.
    """
    count = len(contenders)
    for repeat in range(repeats):
        step = -1 if repeat % 2 else 1
        for place in range(count):
            yield repeat, contenders[(repeat + step * place) % count]
