"""What keeping to a structure costs: time per token beside free requests, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from specrt.bench.spread import Spread
from specrt.bench.table import Table
from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.models import Gamma
from specrt.params import SamplingParams


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
