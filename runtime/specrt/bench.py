"""Measure what speculation gains here: the same prompts at each gamma, in turn.

Outputs are compared with plain decoding before any figure is given.

Two regimes hide in one number. Prefill handles many tokens a pass and is bound by arithmetic; it
decides the time to first token. Decode reads every weight for each pass and is bound by memory;
it decides tokens per second, and it is what speculation shortens. Both are reported apart.

Speedup is the ratio of decode throughputs to gamma 0 within one repeat, so that a machine that
slows down slows both; the figure is the median over repeats, its spread beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter_ns
from typing import Any

from numpy.typing import ArrayLike

from specrt.engine import Engine, Output
from specrt.generate import Generator, Models
from specrt.lossless import first_difference
from specrt.params import SamplingParams
from specrt.stats import SpeculationStats


class TimedEngine:
    """An engine that adds up the time spent inside its forward passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._forward = engine.forward
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.busy_ns = 0

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        output = self._forward(tokens, start, rows)
        self.busy_ns += perf_counter_ns() - began
        return output

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


@dataclass
class GammaResult:
    """What one gamma measured. Lists hold one entry per repeat."""

    gamma: int
    tokens_per_second: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    round_ms: list[float] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)
    outside_us: list[float] = field(default_factory=list)
    """Per round: microseconds not spent inside a forward pass."""
    counts: SpeculationStats = field(default_factory=lambda: SpeculationStats(0))

    def to_json(self, plain: GammaResult | None) -> dict[str, Any]:
        """Return medians, counts and rates."""
        names = ("tokens_per_second", "ttft_ms", "itl_ms", "round_ms", "draft_ms", "verify_ms",
                 "outside_us")  # fmt: skip
        medians = {name: round(median(getattr(self, name)), 4) for name in names}
        ratios = self.speedups(plain) if plain else []
        spread = [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None
        return {
            **self.counts.to_json(),
            "gamma": self.gamma,
            "acceptance_by_position": [
                round(kept / seen, 4)
                for kept, seen in zip(
                    self.counts.accepted_at, self.counts.evaluated_at, strict=True
                )
            ],
            **medians,
            "speedup": round(median(ratios), 3) if ratios else None,
            "speedup_spread": spread,
        }

    def speedups(self, plain: GammaResult) -> list[float]:
        """Return the ratio to plain decoding, repeat by repeat."""
        pairs = zip(self.tokens_per_second, plain.tokens_per_second, strict=True)
        return [mine / base for mine, base in pairs]


@dataclass
class BenchResult:
    """A whole comparison."""

    gammas: dict[int, GammaResult]
    prompts: int
    max_tokens: int
    repeats: int
    identical: bool
    repetition: float
    """Share of plain output inside a 16-token run that came before: text that loops."""

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        plain = self.gammas.get(0)
        return {
            "prompts": self.prompts,
            "max_tokens": self.max_tokens,
            "repeats": self.repeats,
            "outputs_identical": self.identical,
            "repetition": round(self.repetition, 4),
            "results": [r.to_json(plain) for r in self.gammas.values()],
        }


def run_bench(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[int],
    *,
    max_tokens: int,
    repeats: int,
    params: SamplingParams | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> BenchResult:
    """Complete every prompt at every gamma, `repeats` times in turn, after one warm-up.

    Gamma 0 is always measured, in the same process.
    """
    params = params or SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0)
    order = list(dict.fromkeys([0, *gammas]))
    timed = Models(
        TimedEngine(generator.models.target),
        TimedEngine(generator.models.draft) if generator.models.draft else None,
        generator.models.gammas,
        generator.models.gamma,
    )
    watched = Generator(timed, generator.tokenizer)
    outputs = {g: [watched.generate(p, params, gamma=g).token_ids for p in prompts] for g in order}
    results = {g: GammaResult(g, counts=SpeculationStats(g)) for g in order}
    for repeat in range(repeats):
        for number, gamma in enumerate(order):
            _measure(watched, timed, prompts, params, results[gamma])
            progress((repeat * len(order) + number + 1) / (repeats * len(order)))
    same = all(first_difference(a, b) is None for g in order
               for a, b in zip(outputs[0], outputs[g], strict=True))  # fmt: skip
    loops = sum(map(repeated_tokens, outputs[0])) / max(1, sum(map(len, outputs[0])))
    return BenchResult(results, len(prompts), max_tokens, repeats, same, loops)


def _measure(
    generator: Generator,
    models: Models,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    result: GammaResult,
) -> None:
    """Run all prompts once at one gamma and add a repeat to its result."""
    engines = [e for e in (models.target, models.draft) if isinstance(e, TimedEngine)]
    counts, decode_ns, busy_ns, ttft, itl = SpeculationStats(result.gamma), 0, 0, [], []
    for prompt in prompts:
        stream = generator.stream(prompt, params, gamma=result.gamma)
        next(stream)
        before = sum(e.busy_ns for e in engines)
        done = stream.finish()
        arrivals = done.timings.arrivals
        busy_ns += sum(e.busy_ns for e in engines) - before
        decode_ns += arrivals[-1][0] - arrivals[0][0]
        ttft.append(done.timings.ttft_ms)
        itl.append(done.timings.itl_ms)
        counts.merge(done.speculation)
    rounds = max(1, counts.rounds)
    result.tokens_per_second.append(counts.emitted / (decode_ns / 1e9) if decode_ns else 0.0)
    result.ttft_ms.append(median(ttft))
    result.itl_ms.append(median(itl))
    result.round_ms.append(decode_ns / rounds / 1e6)
    result.draft_ms.append(median([r.draft_ns for r in counts.log] or [0]) / 1e6)
    result.verify_ms.append(median([r.verify_ns for r in counts.log] or [0]) / 1e6)
    result.outside_us.append((decode_ns - busy_ns) / rounds / 1e3)
    result.counts.merge(counts)


def repeated_tokens(tokens: Sequence[int], run: int = 16) -> int:
    """Count the tokens that end a run of so many tokens which came before in the same text."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(run, len(tokens) + 1):
        piece = tuple(tokens[end - run : end])
        repeated += piece in seen
        seen.add(piece)
    return repeated
