"""Complete the same prompts with every drafter at every gamma, in turn, and name the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeVar

from specrt.completion import SpeculationStats
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import available_drafters
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from specrt.tuning.pass_timer import thinned, turned
from specrt.tuning.tuning_record import TunedSetting

T = TypeVar("T")

FEWEST_PROMPTS = 4

FEWEST_TOKENS = 256

_MOST_TOKENS = 96

_THOROUGH_S, _QUICK_S = 90, 10

_QUICK = 3
"""The first effort that a quick sweep may make."""

CLEARLY = 1.03
"""How much faster than `auto` a fixed gamma must be, over all prompts, to become the default."""

_MOST_OF_THEM = 0.75
"""On how many of the prompts it must be faster at all."""


class Candidate(NamedTuple):
    """A drafter and a gamma, which may be the best."""

    drafter: str
    gamma: Gamma


PLAIN = Candidate("none", 0)


class SweepPlan(NamedTuple):
    """How much is completed to tell contenders apart."""

    contenders: tuple[Candidate, ...]
    prompts: int
    tokens: int
    """Of each completion."""
    repeats: int

    def price_s(self, plain_ns: float) -> float:
        """Return what it takes where no contender is slower than plain decoding."""
        runs = len(self.contenders) * self.prompts * self.repeats
        return runs * self.tokens * plain_ns / 1e9


@dataclass
class SweepResult:
    """What the contenders did so far."""

    decode_ns: dict[Candidate, list[list[int]]]
    """Per contender and prompt, one time for each repeat."""
    counts: dict[Candidate, SpeculationStats] = field(default_factory=dict)
    """Of the last repeat; greedy decoding emits the same in each."""

    def prompt_ns(self, who: Candidate) -> list[float]:
        """Return the median time for each prompt."""
        return [median(times) for times in self.decode_ns[who]]

    def total_ns(self, who: Candidate) -> float:
        """Return the time for all prompts."""
        return sum(self.prompt_ns(who))

    def settings(self) -> tuple[TunedSetting, ...]:
        """Return what each contender came to, as a record keeps it."""
        return tuple(self._setting(who) for who in self.decode_ns)

    def _setting(self, who: Candidate) -> TunedSetting:
        counts = self.counts[who]
        return TunedSetting(
            drafter=who.drafter,
            fixed_gamma=None if who.gamma == AUTO else who.gamma,
            emitted=counts.emitted,
            decode_ns=max(1, round(self.total_ns(who))),
            rounds=counts.rounds,
            drafted=counts.drafted,
            evaluated=counts.evaluated,
            accepted=counts.accepted,
        )

    def best(self) -> Candidate:
        """Return the fastest contender that leaves gamma open, or a fixed one that beats it."""
        order = sorted(self.decode_ns, key=self.total_ns)
        free = next((who for who in order if who.gamma == AUTO), order[0])
        clear = (who for who in order if who.gamma != AUTO and self._beats(who, free))
        return next(clear, free)

    def _beats(self, who: Candidate, other: Candidate) -> bool:
        pairs = list(zip(self.prompt_ns(who), self.prompt_ns(other), strict=True))
        faster = sum(mine < its for mine, its in pairs)
        ahead = self.total_ns(who) * CLEARLY < self.total_ns(other)
        return ahead and faster >= _MOST_OF_THEM * len(pairs)


def plan_effort(models: Models, costs: Costs, prompts: int, *, quick: bool) -> SweepPlan:
    """Return the most thorough sweep that fits its time, a shorter one for slow models."""
    every, ladder = _contenders(models, models.gammas), _contenders(models, thinned(models.gammas))
    efforts = [
        SweepPlan(every, 16, _MOST_TOKENS, 3),
        SweepPlan(every, 12, 64, 2),
        SweepPlan(ladder, 8, 64, 2),
        SweepPlan(ladder, 8, 64, 1),
        SweepPlan(ladder, 6, 48, 1),
        SweepPlan(_contenders(models, (*models.gammas[:2], max(models.gammas))), 4, 64, 1),
    ]
    fits = [_fitted(effort, prompts) for effort in efforts[_QUICK if quick else 0 :]]
    budget_s = _QUICK_S if quick else _THOROUGH_S
    return next((e for e in fits if e.price_s(costs.plain_ns) <= budget_s), fits[-1])


def _fitted(effort: SweepPlan, prompts: int) -> SweepPlan:
    """Make the completions of few prompts longer, so that they are enough."""
    used = max(1, min(effort.prompts, prompts))
    return effort._replace(prompts=used, tokens=max(effort.tokens, -(-FEWEST_TOKENS // used)))


def _contenders(models: Models, gammas: Sequence[int]) -> tuple[Candidate, ...]:
    drafting = sorted({g for g in gammas if g})
    drafters = available_drafters(has_model=models.draft is not None)
    ways: list[Gamma] = [*drafting, AUTO] if drafting else []
    return (PLAIN, *(Candidate(drafter, gamma) for drafter in drafters for gamma in ways))


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Refuse prompts on which contenders could not be told apart.

    Raises: RequestError when they are too few, too long, or leave too little room.
    """
    longest = max(map(len, prompts), default=0)
    if longest > max_length:
        raise RequestError(
            f"a prompt of {longest} tokens does not fit the context of {max_length}; shorten it"
        )
    room = sum(min(_MOST_TOKENS, max_length + 1 - len(p)) for p in prompts)
    if len(prompts) < FEWEST_PROMPTS or room < FEWEST_TOKENS:
        raise RequestError(
            f"{len(prompts)} prompts with room for {room} tokens are too few to tune on; give at "
            f"least {FEWEST_PROMPTS} prompts and room for {FEWEST_TOKENS} tokens, or no --prompts "
            "to measure costs alone"
        )


def spread(prompts: Sequence[T], number: int) -> list[T]:
    """Return so many of the prompts, spread over all."""
    return [prompts[i * len(prompts) // number] for i in range(number)]


def sweep(
    models: Models,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    effort: SweepPlan,
    progress: Callable[[float], None] = lambda done: None,
) -> SweepResult:
    """Complete each prompt with every contender in turn, each prompt beginning with another.

    Contenders learn from their own completions alone. One short completion of each comes first,
    uncounted.
    """
    order = effort.contenders
    each = {who: Generator(models, tokenizer) for who in order}
    for who in order:
        _complete(each[who], prompts[0], who, 2 + max(models.gammas))
    contest = SweepResult({who: [[] for _ in prompts] for who in order})
    for repeat in range(effort.repeats):
        contest.counts = {who: SpeculationStats(who.gamma, who.drafter) for who in order}
        for number, prompt in enumerate(prompts):
            for who in turned(order, repeat + number):
                took, counts = _complete(each[who], prompt, who, effort.tokens)
                contest.decode_ns[who][number].append(took)
                contest.counts[who].merge(counts)
            progress((repeat + (number + 1) / len(prompts)) / effort.repeats)
    return contest


def _complete(
    generator: Generator, prompt: list[int], who: Candidate, tokens: int
) -> tuple[int, SpeculationStats]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    done = generator.generate(prompt, params, gamma=who.gamma, drafter=who.drafter)
    arrivals = done.timings.arrivals
    return arrivals[-1][0] - arrivals[0][0], done.speculation
