"""Measures several completions at once, and the cost of constrained decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter_ns
from typing import Any, NamedTuple

from specrt.bench.report import Spread
from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import Gamma, SamplingParams
from specrt.speculation.drafters import ForcedDrafter
from specrt.tuning.pass_timer import turned

_WARM_UP_TOKENS = 8


class BatchLoad(NamedTuple):
    """How many completions run at once, and how far each drafts."""

    rows: int
    gamma: Gamma


@dataclass(frozen=True)
class Trial:
    """All prompts completed once, prefill included, without a prompt cache."""

    tokens: tuple[tuple[int, ...], ...]
    duration_ns: int
    drafted: int
    rounds: int

    @classmethod
    def of(cls, completions: Sequence[Completion], duration_ns: int) -> Trial:
        """Sum up completions.

        Raises: RequestError where one failed.
        """
        error = next((c.error for c in completions if c.error), None)
        if error is not None:
            raise RequestError(f"a completion failed while it was measured: {error}")
        counts = [c.speculation for c in completions]
        return cls(
            tuple(tuple(c.token_ids) for c in completions),
            duration_ns,
            sum(c.drafted for c in counts),
            sum(c.rounds for c in counts),
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all completions over the time from the first request to the last token."""
        return sum(map(len, self.tokens)) / (self.duration_ns / 1e9)


@dataclass(frozen=True)
class Throughput:
    """The rate of one load, and its ratios to the loads with the fewest rows."""

    load: BatchLoad
    tokens_per_second: Spread
    gain: Spread
    """Over the same gamma with the fewest rows, repeat by repeat."""
    overall: Spread
    """Over the first gamma with the fewest rows, repeat by repeat."""
    drafted_per_round: float
    same: int
    """Completions whose tokens are the first load's."""
    completions: int

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {
            "rows": self.load.rows,
            "gamma": self.load.gamma,
            "tokens_per_second": self.tokens_per_second.to_json(2),
            "gain": self.gain.to_json(),
            "overall": self.overall.to_json(),
            "drafted_per_round": round(self.drafted_per_round, 3),
            "same": self.same,
            "completions": self.completions,
        }


def check_rows(generator: Generator, rows: Sequence[int]) -> None:
    """Refuse more rows than the bundle has.

    Raises: RequestError.
    """
    built = generator.models.target.batch
    excess = [n for n in rows if not 1 <= n <= built]
    if excess:
        raise RequestError(
            f"{excess[0]} rows at once: this bundle was built for 1 to {built}; name fewer with "
            "--rows, or build it again with a larger `batch`"
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
    progress: Callable[[float], None] = lambda share: None,
) -> list[Throughput]:
    """Complete all prompts with every number of rows at every gamma, in turn, `repeats` times.

    A row that finishes takes the next prompt. Each repeat begins with another load, so that a
    machine that slows down slows all of them. Ctrl-C ends it early: whole repeats are returned.
    Raises: KeyboardInterrupt before the first whole repeat.
    """
    loads = [BatchLoad(n, gamma) for gamma in gammas for n in rows]
    trials: dict[BatchLoad, list[Trial]] = {load: [] for load in loads}

    def run(load: BatchLoad, params: SamplingParams) -> Trial:
        generator.forget()
        began = perf_counter_ns()
        completions = generator.generate_many(
            prompts, params, gamma=load.gamma, drafter=drafter, rows=load.rows
        )
        return Trial.of([c for (c,) in completions], perf_counter_ns() - began)

    brief = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
    for load in loads:
        run(load, brief)
    try:
        for repeat in range(repeats):
            taken = {}
            for place, load in enumerate(turned(loads, repeat)):
                taken[load] = run(load, params)
                progress((repeat * len(loads) + place + 1) / (repeats * len(loads)))
            for load, trial in taken.items():
                trials[load].append(trial)
    except KeyboardInterrupt:
        if not trials[loads[0]]:
            raise
    return [_throughput(load, trials, loads) for load in loads]


def _throughput(
    load: BatchLoad, trials: dict[BatchLoad, list[Trial]], loads: Sequence[BatchLoad]
) -> Throughput:
    own, fewest = trials[load], min(each.rows for each in loads)
    few, first = trials[BatchLoad(fewest, load.gamma)], trials[BatchLoad(fewest, loads[0].gamma)]
    same = sum(
        tokens == expected
        for trial, base in zip(own, first, strict=True)
        for tokens, expected in zip(trial.tokens, base.tokens, strict=True)
    )
    return Throughput(
        load,
        Spread.of([trial.tokens_per_second for trial in own]),
        Spread.of(_ratios(own, few)),
        Spread.of(_ratios(own, first)),
        sum(trial.drafted for trial in own) / max(1, sum(trial.rounds for trial in own)),
        same,
        sum(len(trial.tokens) for trial in own),
    )


def _ratios(own: Sequence[Trial], base: Sequence[Trial]) -> list[float]:
    pairs = zip(own, base, strict=True)
    return [trial.tokens_per_second / other.tokens_per_second for trial, other in pairs]


def throughput_table(measured: Sequence[Throughput]) -> tuple[list[str], list[list[str]]]:
    """Return column names and cells of a table of several rows at once."""
    fewest, first = min(t.load.rows for t in measured), measured[0].load.gamma
    base = f"over {fewest} row{'s' if fewest > 1 else ''}"
    columns = [
        "rows", "gamma", "tokens/s", base, "quartiles", f"{base}, gamma {first}", "drafted/round",
        "same text",
    ]  # fmt: skip
    rows = [
        [
            f"{t.load.rows}",
            f"{t.load.gamma}",
            f"{t.tokens_per_second.median:.1f}",
            f"{t.gain.median:.2f}",
            str(t.gain),
            f"{t.overall.median:.2f}",
            f"{t.drafted_per_round:.2f}",
            f"{t.same} of {t.completions}",
        ]
        for t in measured
    ]
    return columns, rows


class Pair(NamedTuple):
    """One prompt completed freely and under the constraint, back to back."""

    free: Completion
    constrained: Completion


@dataclass(frozen=True)
class ConstraintCost:
    """What a constraint costs at one gamma.

    At gamma 0 that is the constraint alone; above, the texts differ, and so does acceptance.
    """

    gamma: Gamma
    free_ms: Spread
    constrained_ms: Spread
    """Per token after the first delivery."""
    ratio: Spread
    """Constrained over free, pair by pair."""
    tokens_per_round: tuple[float, float]
    """Free, and constrained."""
    forced: float
    """Share of the tokens that the constraint left no choice about."""
    pairs: int

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        free, constrained = self.tokens_per_round
        return {
            "gamma": self.gamma,
            "free_ms": self.free_ms.to_json(),
            "structured_ms": self.constrained_ms.to_json(),
            "ratio": self.ratio.to_json(),
            "tokens_per_round": {"free": round(free, 4), "structured": round(constrained, 4)},
            "forced": round(self.forced, 4),
            "pairs": self.pairs,
        }


def measure_constraint(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[Gamma],
    params: SamplingParams,
    *,
    repeats: int,
    drafter: str | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[ConstraintCost]:
    """Complete every prompt with the constraint of `params` and without, `repeats` times.

    A free completion goes on past the model's end; a constrained one ends where its text is
    complete. Times are per token. Ctrl-C ends it early: the gammas that are done are returned.
    Raises: RequestError where a text is complete before there is anything to time,
        KeyboardInterrupt before the first gamma is done.
    """
    constrained = replace(params, ignore_eos=False)
    free = SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_k=params.top_k,
        top_p=params.top_p, min_p=params.min_p, seed=params.seed, verifier=params.verifier,
        ignore_eos=True,
    )  # fmt: skip

    def run(prompt: Sequence[int], gamma: Gamma, turn: int) -> Pair:
        results = {}
        for params in (free, constrained) if turn % 2 else (constrained, free):
            generator.forget()
            completion = generator.generate(prompt, params, gamma=gamma, drafter=drafter)
            results[params is constrained] = completion
        return Pair(results[False], results[True])

    costs = []
    try:
        for number, gamma in enumerate(gammas):
            run(prompts[0], gamma, 0)
            turns = range(repeats * len(prompts))
            pairs = []
            for turn in turns:
                pairs.append(run(prompts[turn % len(prompts)], gamma, turn + turn // len(prompts)))
                progress((number + (turn + 1) / len(turns)) / len(gammas))
            costs.append(_cost(gamma, pairs))
    except KeyboardInterrupt:
        if not costs:
            raise
    return costs


def _cost(gamma: Gamma, pairs: Sequence[Pair]) -> ConstraintCost:
    timed = [pair for pair in pairs if len(pair.constrained.timings.arrivals) > 1]
    if not timed:
        raise RequestError(
            "the constrained text is complete after a token or two, so there is nothing to time; "
            "give a constraint with longer texts"
        )
    free = [_ms_per_token(pair.free) for pair in timed]
    constrained = [_ms_per_token(pair.constrained) for pair in timed]
    tokens = sum(len(pair.constrained.token_ids) for pair in timed)
    sources = [pair.constrained.speculation.sources for pair in timed]
    forced = sum(each.get(ForcedDrafter.SOURCE, (0, 0))[1] for each in sources)
    rounds = [median(c.speculation.tokens_per_round for c in side) for side in zip(*timed)]  # noqa: B905
    return ConstraintCost(
        gamma,
        Spread.of(free),
        Spread.of(constrained),
        Spread.of([c / f for c, f in zip(constrained, free, strict=True)]),
        (rounds[0], rounds[1]),
        forced / tokens,
        len(timed),
    )


def _ms_per_token(completion: Completion) -> float:
    """Return the decode time of a completion for each token after the first delivery."""
    return 1e3 / completion.timings.tokens_per_second


def constraint_table(measured: Sequence[ConstraintCost]) -> tuple[list[str], list[list[str]]]:
    """Return column names and cells of a table of what a constraint costs."""
    columns = [
        "gamma", "free ms/token", "structured", "ratio", "quartiles", "tokens/round", "structured",
        "forced",
    ]  # fmt: skip
    rows = [
        [
            f"{cost.gamma}",
            f"{cost.free_ms.median:.3f}",
            f"{cost.constrained_ms.median:.3f}",
            f"{cost.ratio.median:.3f}",
            str(cost.ratio),
            f"{cost.tokens_per_round[0]:.2f}",
            f"{cost.tokens_per_round[1]:.2f}",
            f"{cost.forced:.0%}",
        ]
        for cost in measured
    ]
    return columns, rows
