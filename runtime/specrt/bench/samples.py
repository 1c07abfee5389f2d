"""Measured completions: what follows from their times, and medians over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from specrt.completion import SpeculationStats
from specrt.params import AUTO, Gamma


class Busy(NamedTuple):
    """Time spent inside forward passes, and how many there were."""

    ns: int = 0
    passes: int = 0

    def since(self, before: Busy) -> Busy:
        """Return what came after an earlier reading."""
        return Busy(self.ns - before.ns, self.passes - before.passes)


class Spread(NamedTuple):
    """The median of some values, and the quartiles around it: half of them lie between."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value or more."""
        return cls(quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75))

    def to_json(self, digits: int = 4) -> dict[str, Any]:
        """Return the three numbers by name."""
        return {name: round(value, digits) for name, value in self._asdict().items()}


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the others lie, on the line between neighbours.

    Source: definition 7 of Hyndman and Fan 1996, NumPy's default.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


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


Pairs = Mapping[tuple[int, int], Sample]
"""Plain completions by prompt and repeat."""


@dataclass(frozen=True)
class BenchRow:
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


class Configuration(NamedTuple):
    """One way to decode: how many tokens a round drafts, and who drafts them."""

    gamma: Gamma
    drafter: str

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted: what all others are measured against."""
        return self.gamma == 0

    def __str__(self) -> str:
        """Return it in words."""
        if self.is_plain:
            return "plain decoding"
        return f"{AUTO if self.gamma == AUTO else f'gamma {self.gamma}'} ({self.drafter})"


PLAIN = Configuration(0, "none")


def configurations(gammas: Iterable[Gamma], drafters: Iterable[str]) -> list[Configuration]:
    """Return every gamma with every drafter, once each, plain decoding first and always."""
    drafters = list(drafters)
    pairs = [Configuration(g, d) for d in drafters for g in gammas]
    plain = [c.is_plain or c.drafter == PLAIN.drafter for c in pairs]
    drafting = [c for c, is_plain in zip(pairs, plain, strict=True) if not is_plain]
    return list(dict.fromkeys([PLAIN, *drafting]))


def in_turn(compared: list[Configuration], turn: int) -> list[Configuration]:
    """Return the order for one turn, so that none always comes first, or after the same one.

    In as many turns as there are configurations each one has every place once; in the next as
    many turns the order runs backwards.
    """
    cycle, shift = divmod(turn, len(compared))
    order = compared[shift:] + compared[:shift]
    return order[::-1] if cycle % 2 else order
