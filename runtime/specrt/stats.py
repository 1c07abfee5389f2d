"""What a completion counted, and the rates that follow. Counts are stored; rates are properties."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specrt.speculate import Round


@dataclass
class SpeculationStats:
    """Counts over the rounds of one completion or many. The prefill is not a round."""

    gamma: int
    rounds: int = 0
    drafted: int = 0
    evaluated: int = 0
    accepted: int = 0
    emitted: int = 0
    draft_ns: list[int] = field(default_factory=list)
    verify_ns: list[int] = field(default_factory=list)
    """Per round, the time spent drafting and verifying; the first draft reads the prompt."""
    accepted_at: list[int] = field(default_factory=list)
    """Per position in the draft, how often the token there was accepted."""
    evaluated_at: list[int] = field(default_factory=list)
    """Per position in the draft, how often the token there was examined."""

    def add(self, round_: Round, emitted: int) -> None:
        """Count one round, of whose tokens `emitted` were delivered."""
        self.rounds += 1
        self.drafted += round_.drafted
        self.evaluated += round_.evaluated
        self.accepted += round_.accepted
        self.emitted += emitted
        self.draft_ns.append(round_.draft_ns)
        self.verify_ns.append(round_.verify_ns)
        while len(self.evaluated_at) < round_.evaluated:
            self.evaluated_at.append(0)
            self.accepted_at.append(0)
        for i in range(round_.evaluated):
            self.evaluated_at[i] += 1
            self.accepted_at[i] += i < round_.accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted / evaluated (alpha); 0 where nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    @property
    def draft_yield(self) -> float:
        """Accepted / drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_round(self) -> float:
        """τ = emitted / rounds; 0 where no round ran."""
        return self.emitted / self.rounds if self.rounds else 0.0

    def merge(self, other: SpeculationStats) -> None:
        """Add the counts of another completion at the same gamma."""
        for name in ("rounds", "drafted", "evaluated", "accepted", "emitted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.draft_ns += other.draft_ns
        self.verify_ns += other.verify_ns
        for name in ("accepted_at", "evaluated_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for i, count in enumerate(theirs):
                mine[i] += count

    def to_json(self) -> dict[str, Any]:
        """Return counts and rates under their public names."""
        return {
            "gamma": self.gamma,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "draft_yield": round(self.draft_yield, 4),
            "tokens_per_round": round(self.tokens_per_round, 4),
        }


@dataclass
class Timings:
    """When the tokens of one completion came.

    Units: nanoseconds of `perf_counter_ns`, less the time for which the caller kept the stream
    waiting. Tokens of one round arrive together.
    """

    began_ns: int
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """(time, tokens delivered) per round, the prefill first."""

    @property
    def ttft_ms(self) -> float:
        """Time to first token: from the request to the first delivery."""
        return (self.arrivals[0][0] - self.began_ns) / 1e6 if self.arrivals else 0.0

    @property
    def itl_ms(self) -> float:
        """Median gap between deliveries, each gap shared by the tokens that came with it."""
        gaps: list[float] = []
        for (before, _), (now, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            gaps.extend([(now - before) / count / 1e6] * count)
        return median(gaps) if gaps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput: tokens after the first delivery over the time they took.

        The draft reads the prompt after the first delivery, so that is part of it.
        """
        if len(self.arrivals) < 2:
            return 0.0
        tokens = sum(count for _, count in self.arrivals[1:])
        return tokens / ((self.arrivals[-1][0] - self.arrivals[0][0]) / 1e9)
