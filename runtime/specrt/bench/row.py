"""What one configuration came to on one class of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specrt.bench.configuration import Configuration
from specrt.bench.sample import Sample, Stages
from specrt.bench.spread import Spread, quantile
from specrt.stats import SpeculationStats

Pairs = Mapping[tuple[int, int], Sample]
"""Plain completions by prompt and repeat."""


@dataclass(frozen=True)
class Row:
    """All samples of one configuration, each beside the plain one of its prompt and repeat."""

    configuration: Configuration
    samples: Sequence[Sample]
    plain: Pairs
    weight_bytes: int = 0
    """Of the target: what each of its passes reads."""

    def _over(self, value: Callable[[Sample], float]) -> Spread:
        return Spread.of([value(s) for s in self.samples])

    @cached_property
    def tokens_per_second(self) -> Spread:
        """Decode throughput."""
        return self._over(lambda s: s.tokens_per_second)

    @cached_property
    def _gains(self) -> list[float]:
        return [s.tokens_per_second / self.plain[s.pair].tokens_per_second for s in self.samples]

    @cached_property
    def speedup(self) -> Spread:
        """Decode throughput over that of plain decoding, pair by pair."""
        return Spread.of(self._gains)

    @property
    def overall(self) -> float:
        """The speedup of all samples run one after another: total tokens over total time."""
        beside = [self.plain[s.pair] for s in self.samples]
        return _throughput(self.samples) / _throughput(beside)

    @property
    def standing(self) -> str:
        """Whether it gains: `faster` or `slower` where at least three quarters of the pairs are."""
        if self.configuration.is_plain:
            return "plain"
        enough = 0.75 * len(self._gains)
        if sum(gain > 1.0 for gain in self._gains) >= enough:
            return "faster"
        return "slower" if sum(gain < 1.0 for gain in self._gains) >= enough else "even"

    @cached_property
    def ttft_ms(self) -> Spread:
        """Time to first token."""
        return self._over(lambda s: s.ttft_ns / 1e6)

    @cached_property
    def itl_ms(self) -> tuple[float, float]:
        """Gap between tokens, 50th and 95th percentile."""
        gaps = [gap for s in self.samples for gap in s.gaps_ns]
        return quantile(gaps, 0.5) / 1e6, quantile(gaps, 0.95) / 1e6

    @cached_property
    def stages(self) -> dict[str, Spread]:
        """Microseconds a round, stage by stage."""
        rounds = [s.stages for s in self.samples]
        return {
            name: Spread.of(values)
            for name, values in zip(Stages._fields, zip(*rounds, strict=True), strict=True)
        }

    @cached_property
    def outside_us(self) -> Spread:
        """Microseconds a round outside both engines."""
        return self._over(lambda s: s.outside_us)

    @cached_property
    def weights_per_second(self) -> Spread:
        """Bytes of the target's weights that its passes read in a second of their time."""
        return self._over(lambda s: self.weight_bytes * s.target.passes / (s.target.ns / 1e9))

    @property
    def draft_steps(self) -> float | None:
        """What drafting one token costs, in plain steps; None where none was drafted."""
        found = [
            s.drafted_token_ns / self.plain[s.pair].verify_ns
            for s in self.samples
            if s.drafted_token_ns is not None
        ]
        return quantile(found, 0.5) if found else None

    @property
    def verify_steps(self) -> float:
        """What the target's side of a round that drafts costs, in plain steps."""
        return self._over(lambda s: s.verify_ns / self.plain[s.pair].verify_ns).median

    @cached_property
    def counts(self) -> SpeculationStats:
        """The rounds of all samples."""
        total = SpeculationStats(*self.configuration)
        for sample in self.samples:
            total.merge(sample.counts)
        total.fallback = next((s.counts.fallback for s in self.samples if s.counts.fallback), None)
        return total

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / evaluated at each place in the draft."""
        both = zip(self.counts.accepted_at, self.counts.evaluated_at, strict=True)
        return [kept / seen for kept, seen in both]

    def to_json(self) -> dict[str, Any]:
        """Return counts, rates, medians and quartiles under their public names."""
        p50, p95 = self.itl_ms
        draft = self.draft_steps
        return {
            **self.counts.to_json(),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "standing": self.standing,
            "speedup": self.speedup.to_json(),
            "speedup_overall": round(self.overall, 4),
            "tokens_per_second": self.tokens_per_second.to_json(2),
            "ttft_ms": self.ttft_ms.to_json(),
            "itl_ms": {"p50": round(p50, 4), "p95": round(p95, 4)},
            "round_us": {name: spread.to_json(2) for name, spread in self.stages.items()},
            "outside_us": self.outside_us.to_json(2),
            "draft_steps": None if draft is None else round(draft, 4),
            "verify_steps": round(self.verify_steps, 4),
            "weight_bytes_per_second": self.weights_per_second.to_json(0),
        }


def _throughput(samples: Sequence[Sample]) -> float:
    return sum(s.counts.emitted for s in samples) / sum(s.decode_ns for s in samples)
