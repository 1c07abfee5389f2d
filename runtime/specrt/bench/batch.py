"""Tokens per second of several completions at once, and the cost of constrained decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

from specrt.bench.report import Table
from specrt.bench.samples import Spread
from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.tuning.pass_timer import turned

_WARM_UP_TOKENS = 8


class BatchLoad(NamedTuple):
    """How many completions run at once, and how far each drafts."""

    rows: int
    gamma: Gamma


@dataclass(frozen=True)
class Trial:
    """All prompts completed once. Prompts are read, and nothing of them is known before."""

    tokens: tuple[tuple[int, ...], ...]
    took_ns: int
    drafted: int
    rounds: int

    @classmethod
    def of(cls, done: Sequence[Completion], took_ns: int) -> Trial:
        """Sum up completions; raises RequestError where one failed."""
        failed = next((c.error for c in done if c.error), None)
        if failed is not None:
            raise RequestError(f"a completion failed while it was measured: {failed}")
        counts = [c.speculation for c in done]
        return cls(
            tuple(tuple(c.token_ids) for c in done),
            took_ns,
            sum(c.drafted for c in counts),
            sum(c.rounds for c in counts),
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all completions over the time from the first request to the last token."""
        return sum(map(len, self.tokens)) / (self.took_ns / 1e9)


@dataclass(frozen=True)
class Throughput:
    """What some rows at some gamma came to, and what that is beside the first crowd measured."""

    crowd: BatchLoad
    tokens_per_second: Spread
    gain: Spread
    """Over the same gamma with the fewest rows, turn by turn."""
    overall: Spread
    """Over the first gamma with the fewest rows, turn by turn."""
    drafted_per_round: float
    same: int
    """Completions whose tokens are those of the first crowd."""
    completions: int

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {
            "rows": self.crowd.rows,
            "gamma": self.crowd.gamma,
            "tokens_per_second": self.tokens_per_second.to_json(2),
            "gain": self.gain.to_json(),
            "overall": self.overall.to_json(),
            "drafted_per_round": round(self.drafted_per_round, 3),
            "same": self.same,
            "completions": self.completions,
        }


def check_rows(generator: Generator, rows: Sequence[int]) -> None:
    """Refuse more rows than there are.

    Raises: RequestError.
    """
    built = generator.models.target.batch
    wrong = [n for n in rows if not 1 <= n <= built]
    if wrong:
        raise RequestError(
            f"{wrong[0]} rows at once: this bundle was built for 1 to {built}; build with "
            f"`batch = {max(wrong)}` for more"
        )


def measure_throughput(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    gammas: Sequence[Gamma],
    params: SamplingParams,
    *,
    repeats: int,
    drafter: str | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Throughput]:
    """Complete all prompts with so many rows at once, every crowd in turn, `repeats` times.

    Every crowd completes the same prompts, a row that is done taking the next. Each turn begins
    with another crowd, so that a machine that slows down slows all of them.
    """
    crowds = [BatchLoad(n, gamma) for gamma in gammas for n in rows]
    turns: dict[BatchLoad, list[Trial]] = {crowd: [] for crowd in crowds}

    def run(crowd: BatchLoad, params: SamplingParams) -> Trial:
        generator.forget()
        began = perf_counter_ns()
        done = generator.generate_many(
            prompts, params, gamma=crowd.gamma, drafter=drafter, rows=crowd.rows
        )
        return Trial.of([c for (c,) in done], perf_counter_ns() - began)

    brief = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
    for crowd in crowds:
        run(crowd, brief)
    for repeat in range(repeats):
        for place, crowd in enumerate(turned(crowds, repeat)):
            turns[crowd].append(run(crowd, params))
            progress((repeat * len(crowds) + place + 1) / (repeats * len(crowds)))
    return [_summed(crowd, turns, crowds) for crowd in crowds]


def _summed(
    crowd: BatchLoad, turns: dict[BatchLoad, list[Trial]], crowds: Sequence[BatchLoad]
) -> Throughput:
    own, fewest = turns[crowd], min(c.rows for c in crowds)
    alone, first = turns[BatchLoad(fewest, crowd.gamma)], turns[BatchLoad(fewest, crowds[0].gamma)]
    same = sum(
        one == other
        for mine, firsts in zip(own, first, strict=True)
        for one, other in zip(mine.tokens, firsts.tokens, strict=True)
    )
    return Throughput(
        crowd,
        Spread.of([turn.tokens_per_second for turn in own]),
        Spread.of(_ratios(own, alone)),
        Spread.of(_ratios(own, first)),
        sum(turn.drafted for turn in own) / max(1, sum(turn.rounds for turn in own)),
        same,
        sum(len(turn.tokens) for turn in own),
    )


def _ratios(own: Sequence[Trial], other: Sequence[Trial]) -> list[float]:
    pairs = zip(own, other, strict=True)
    return [mine.tokens_per_second / base.tokens_per_second for mine, base in pairs]


def throughput_table(found: Sequence[Throughput], title: str) -> Table:
    """Return a table of what rows at once come to."""
    fewest, first = min(t.crowd.rows for t in found), found[0].crowd.gamma
    many = "rows" if fewest > 1 else "row"
    columns = (
        "rows", "gamma", "tokens/s", f"over {fewest} {many}", "quartiles",
        f"over {fewest} {many}, gamma {first}", "drafted/round", "same text",
    )  # fmt: skip
    rows = [
        (
            f"{t.crowd.rows}",
            f"{t.crowd.gamma}",
            f"{t.tokens_per_second.median:.1f}",
            f"{t.gain.median:.2f}",
            f"{t.gain.low:.2f}-{t.gain.high:.2f}",
            f"{t.overall.median:.2f}",
            f"{t.drafted_per_round:.2f}",
            f"{t.same} of {t.completions}",
        )
        for t in found
    ]
    return Table(title, columns, rows)


class Pair(NamedTuple):
    """One prompt completed freely and within the structure, right after each other."""

    free: Completion
    kept: Completion


@dataclass(frozen=True)
class StructureCost:
    """What a structure costs at one gamma.

    At gamma 0 that is the structure alone; above, texts differ, and with them acceptance.
    """

    gamma: Gamma
    free_ms: Spread
    kept_ms: Spread
    """Per token after the first delivery."""
    ratio: Spread
    """Of the two, pair by pair."""
    tokens_per_round: tuple[float, float]
    """Freely, and within the structure."""
    forced: float
    """Share of the tokens that the structure left no choice about."""
    pairs: int

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        free, kept = self.tokens_per_round
        return {
            "gamma": self.gamma,
            "free_ms": self.free_ms.to_json(),
            "structured_ms": self.kept_ms.to_json(),
            "ratio": self.ratio.to_json(),
            "tokens_per_round": {"free": round(free, 4), "structured": round(kept, 4)},
            "forced": round(self.forced, 4),
            "pairs": self.pairs,
        }


def measure_structure(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[Gamma],
    params: SamplingParams,
    *,
    repeats: int,
    drafter: str | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> list[StructureCost]:
    """Complete every prompt with the structure of `params` and without, `repeats` times.

    Both have the same number of tokens: a free one goes past its end, and a pair whose structure
    was complete before counts as far as both go.
    Raises: RequestError where a structure is complete before there is anything to time.
    """
    kept = replace(params, ignore_eos=False)
    free = SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_k=params.top_k,
        top_p=params.top_p, min_p=params.min_p, seed=params.seed, verifier=params.verifier,
        ignore_eos=True,
    )  # fmt: skip

    def run(prompt: Sequence[int], gamma: Gamma, turn: int) -> Pair:
        done = {}
        for params in (free, kept) if turn % 2 else (kept, free):
            generator.forget()
            done[params is kept] = generator.generate(prompt, params, gamma=gamma, drafter=drafter)
        return Pair(done[False], done[True])

    found = []
    for number, gamma in enumerate(gammas):
        run(prompts[0], gamma, 0)
        turns = range(repeats * len(prompts))
        pairs = []
        for turn in turns:
            pairs.append(run(prompts[turn % len(prompts)], gamma, turn + turn // len(prompts)))
            progress((number + (turn + 1) / len(turns)) / len(gammas))
        found.append(_cost(gamma, pairs))
    return found


def _cost(gamma: Gamma, pairs: Sequence[Pair]) -> StructureCost:
    timed = [pair for pair in pairs if len(pair.kept.timings.arrivals) > 1]
    if not timed:
        raise RequestError(
            "the structure is complete after a token or two, and there is nothing to time; take "
            "one that takes longer to complete"
        )
    free = [_ms_per_token(pair.free) for pair in timed]
    kept = [_ms_per_token(pair.kept) for pair in timed]
    tokens = sum(len(pair.kept.token_ids) for pair in timed)
    forced = sum(p.kept.speculation.sources.get("forced", (0, 0))[1] for p in timed)
    rounds = [median(c.speculation.tokens_per_round for c in side) for side in zip(*timed)]  # noqa: B905
    return StructureCost(
        gamma,
        Spread.of(free),
        Spread.of(kept),
        Spread.of([k / f for k, f in zip(kept, free, strict=True)]),
        (rounds[0], rounds[1]),
        forced / tokens,
        len(timed),
    )


def _ms_per_token(done: Completion) -> float:
    """Return the decode time of a completion for each token after the first delivery."""
    return 1e3 / done.timings.tokens_per_second


def structure_table(found: Sequence[StructureCost], title: str) -> Table:
    """Return a table of what a structure costs."""
    columns = (
        "gamma", "free ms/token", "structured", "ratio", "quartiles", "tokens/round", "structured",
        "forced",
    )  # fmt: skip
    rows = [
        (
            f"{cost.gamma}",
            f"{cost.free_ms.median:.3f}",
            f"{cost.kept_ms.median:.3f}",
            f"{cost.ratio.median:.3f}",
            f"{cost.ratio.low:.3f}-{cost.ratio.high:.3f}",
            f"{cost.tokens_per_round[0]:.2f}",
            f"{cost.tokens_per_round[1]:.2f}",
            f"{cost.forced:.0%}",
        )
        for cost in found
    ]
    return Table(title, columns, rows)
