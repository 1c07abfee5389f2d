"""One completion that was measured, and what follows from its times. The prefill is apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from specrt.bench.clock import Busy
from specrt.stats import SpeculationStats


class Stages(NamedTuple):
    """Where the time of a round goes. Units: microseconds a round; the stages add up to it."""

    draft: float
    """Proposing, the draft model's passes included."""
    verify: float
    """Inside the target's passes."""
    accept: float
    """Judging the draft: the target's side outside its passes."""
    other: float
    """Committing, text, statistics and the loop itself."""


@dataclass(frozen=True)
class Sample:
    """One prompt completed once at one configuration.

    Units: nanoseconds. `decode_ns` is from the first delivery to the last; `target` and `draft`
    are the engines' passes in that time.
    """

    prompt: int
    repeat: int
    tokens: tuple[int, ...]
    """All that was emitted, the prefill's token first."""
    ttft_ns: int
    decode_ns: int
    gaps_ns: tuple[float, ...]
    """Per token after the first delivery, its share of the gap before it."""
    counts: SpeculationStats
    target: Busy
    draft: Busy

    @property
    def pair(self) -> tuple[int, int]:
        """Which completions of other configurations ran beside this one."""
        return self.prompt, self.repeat

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput."""
        return self.counts.emitted / (self.decode_ns / 1e9)

    @cached_property
    def stages(self) -> Stages:
        """The mean round."""
        draft = sum(r.draft_ns for r in self.counts.log)
        judged = sum(r.verify_ns for r in self.counts.log)
        parts = (draft, self.target.ns, judged - self.target.ns, self.decode_ns - draft - judged)
        return Stages(*(ns / self.counts.rounds / 1e3 for ns in parts))

    @property
    def outside_us(self) -> float:
        """Microseconds a round not spent inside a forward pass of either engine."""
        inside = self.target.ns + self.draft.ns
        return (self.decode_ns - inside) / self.counts.rounds / 1e3

    @cached_property
    def verify_ns(self) -> float:
        """Median time of the target's side, over the rounds that drafted where any did."""
        drafting = [r.verify_ns for r in self.counts.log if r.drafted]
        return median(drafting or [r.verify_ns for r in self.counts.log])

    @cached_property
    def drafted_token_ns(self) -> float | None:
        """Median time one drafted token took; None where none was drafted apart from verifying.

        The median leaves out the first round, in which a draft model reads the prompt.
        """
        costs = [r.draft_ns / r.drafted for r in self.counts.log if r.drafted and r.draft_ns]
        return median(costs) if costs else None


def shared_gaps(arrivals: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """Return each gap between deliveries, shared by the tokens that came with it.

    Shapes: arrivals are (ns, tokens delivered), the prefill first -> one gap a token after it.
    """
    gaps: list[float] = []
    for (before, _), (now, count) in pairwise(arrivals):
        gaps += [(now - before) / count] * count
    return tuple(gaps)


def repeated_tokens(tokens: Sequence[int], run: int = 16) -> int:
    """Count the tokens that end a run of so many tokens which came before in the same text."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(run, len(tokens) + 1):
        piece = tuple(tokens[end - run : end])
        repeated += piece in seen
        seen.add(piece)
    return repeated
