"""Tokens per second of several completions at once, against one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, NamedTuple

from specrt.bench.spread import Spread
from specrt.bench.table import Table
from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.models import Gamma
from specrt.params import SamplingParams
from specrt.tune import turned

_WARM_UP_TOKENS = 8


class Crowd(NamedTuple):
    """How many completions run at once, and how far each drafts."""

    rows: int
    gamma: Gamma


@dataclass(frozen=True)
class Turn:
    """All prompts completed once. Prompts are read, and nothing of them is known before."""

    tokens: tuple[tuple[int, ...], ...]
    took_ns: int
    drafted: int
    rounds: int

    @classmethod
    def of(cls, done: Sequence[Completion], took_ns: int) -> Turn:
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

    crowd: Crowd
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
    crowds = [Crowd(n, gamma) for gamma in gammas for n in rows]
    turns: dict[Crowd, list[Turn]] = {crowd: [] for crowd in crowds}

    def run(crowd: Crowd, params: SamplingParams) -> Turn:
        generator.forget()
        began = perf_counter_ns()
        done = generator.generate_many(
            prompts, params, gamma=crowd.gamma, drafter=drafter, rows=crowd.rows
        )
        return Turn.of([c for (c,) in done], perf_counter_ns() - began)

    brief = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
    for crowd in crowds:
        run(crowd, brief)
    for repeat in range(repeats):
        for place, crowd in enumerate(turned(crowds, repeat)):
            turns[crowd].append(run(crowd, params))
            progress((repeat * len(crowds) + place + 1) / (repeats * len(crowds)))
    return [_summed(crowd, turns, crowds) for crowd in crowds]


def _summed(crowd: Crowd, turns: dict[Crowd, list[Turn]], crowds: Sequence[Crowd]) -> Throughput:
    own, fewest = turns[crowd], min(c.rows for c in crowds)
    alone, first = turns[Crowd(fewest, crowd.gamma)], turns[Crowd(fewest, crowds[0].gamma)]
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


def _ratios(own: Sequence[Turn], other: Sequence[Turn]) -> list[float]:
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
