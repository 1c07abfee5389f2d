"""Finds the setting that completes fastest: all of them complete the same prompts in turn."""

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
from specrt.speculation.drafters import NO_DRAFTER, available_drafters
from specrt.speculation.pool import Models
from specrt.text.tokenizer import Tokenizer
from specrt.tuning.pass_timer import thinned, turned
from specrt.tuning.tuning_record import TunedSetting

T = TypeVar("T")

FEWEST_PROMPTS = 4

FEWEST_TOKENS = 256

_MOST_TOKENS = 96

SWEEP_S, QUICK_SWEEP_S = 90, 10
"""Time that a sweep of settings may take, where the models are fast enough for it."""

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


PLAIN = Candidate(NO_DRAFTER, 0)


class SweepPlan(NamedTuple):
    """The candidates, and the work that compares them."""

    candidates: tuple[Candidate, ...]
    prompts: int
    tokens: int
    """Of each completion."""
    repeats: int

    def price_s(self, plain_ns: float) -> float:
        """Return the time of the sweep where no candidate is slower than plain decoding."""
        runs = len(self.candidates) * self.prompts * self.repeats
        return runs * self.tokens * plain_ns / 1e9


@dataclass
class SweepResult:
    """Times and counts of each candidate."""

    decode_ns: dict[Candidate, list[list[int]]]
    """Per candidate and prompt, one time for each repeat."""
    counts: dict[Candidate, SpeculationStats] = field(default_factory=dict)
    """Of the last repeat; greedy decoding emits the same in each."""

    def prompt_ns(self, candidate: Candidate) -> list[float]:
        """Return the median time for each prompt."""
        return [median(times) for times in self.decode_ns[candidate]]

    def total_ns(self, candidate: Candidate) -> float:
        """Return the time for all prompts."""
        return sum(self.prompt_ns(candidate))

    def settings(self) -> tuple[TunedSetting, ...]:
        """Return the totals of each candidate as the tuning record stores them."""
        return tuple(self._setting(candidate) for candidate in self.decode_ns)

    def _setting(self, candidate: Candidate) -> TunedSetting:
        counts = self.counts[candidate]
        return TunedSetting(
            drafter=candidate.drafter,
            fixed_gamma=None if candidate.gamma == AUTO else candidate.gamma,
            emitted=counts.emitted,
            decode_ns=max(1, round(self.total_ns(candidate))),
            rounds=counts.rounds,
            drafted=counts.drafted,
            evaluated=counts.evaluated,
            accepted=counts.accepted,
        )

    def best(self) -> Candidate:
        """Return the fastest with gamma `auto`, or a fixed gamma that is clearly faster."""
        order = sorted(self.decode_ns, key=self.total_ns)
        adaptive = next((each for each in order if each.gamma == AUTO), order[0])
        fixed = (each for each in order if each.gamma != AUTO and self._beats(each, adaptive))
        return next(fixed, adaptive)

    def _beats(self, candidate: Candidate, other: Candidate) -> bool:
        pairs = list(zip(self.prompt_ns(candidate), self.prompt_ns(other), strict=True))
        faster = sum(own < others for own, others in pairs)
        ahead = self.total_ns(candidate) * CLEARLY < self.total_ns(other)
        return ahead and faster >= _MOST_OF_THEM * len(pairs)


def plan_effort(models: Models, costs: Costs, prompts: int, *, quick: bool) -> SweepPlan:
    """Return the most thorough sweep that fits its time, a shorter one for slow models."""
    every, ladder = (
        _every_candidate(models, models.gammas),
        _every_candidate(models, thinned(models.gammas)),
    )
    efforts = [
        SweepPlan(every, 16, _MOST_TOKENS, 3),
        SweepPlan(every, 12, 64, 2),
        SweepPlan(ladder, 8, 64, 2),
        SweepPlan(ladder, 8, 64, 1),
        SweepPlan(ladder, 6, 48, 1),
        SweepPlan(_every_candidate(models, (*models.gammas[:2], max(models.gammas))), 4, 64, 1),
    ]
    fits = [_fitted(effort, prompts) for effort in efforts[_QUICK if quick else 0 :]]
    budget_s = QUICK_SWEEP_S if quick else SWEEP_S
    return next((e for e in fits if e.price_s(costs.plain_ns) <= budget_s), fits[-1])


def _fitted(effort: SweepPlan, prompts: int) -> SweepPlan:
    """Lengthen the completions of few prompts to `FEWEST_TOKENS` in all."""
    used = max(1, min(effort.prompts, prompts))
    return effort._replace(prompts=used, tokens=max(effort.tokens, -(-FEWEST_TOKENS // used)))


def _every_candidate(models: Models, gammas: Sequence[int]) -> tuple[Candidate, ...]:
    drafting = sorted({g for g in gammas if g})
    drafters = available_drafters(has_model=models.draft is not None)
    ways: list[Gamma] = [*drafting, AUTO] if drafting else []
    return (PLAIN, *(Candidate(drafter, gamma) for drafter in drafters for gamma in ways))


def check_prompts(prompts: Sequence[Sequence[int]], max_length: int) -> None:
    """Refuse prompts too few to compare candidates on, given as what their texts begin with.

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
            f"prompts to tune on: {len(prompts)}, with room for {room} tokens; give at least "
            f"{FEWEST_PROMPTS} prompts and room for {FEWEST_TOKENS} tokens, or no --prompts "
            "to measure costs alone"
        )


def spread(prompts: Sequence[T], number: int) -> list[T]:
    """Return `number` of the prompts, spread over all."""
    return [prompts[i * len(prompts) // number] for i in range(number)]


def sweep(
    models: Models,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    effort: SweepPlan,
    progress: Callable[[float], None] = lambda share: None,
) -> SweepResult:
    """Complete each prompt with every candidate in turn, each prompt beginning with another.

    Each candidate has a generator of its own, so that it learns from its own completions alone. One
    short completion of each comes first and is not counted.
    Raises: RequestError where no text is longer than a token, so that nothing can be compared.
    """
    order = effort.candidates
    each = {candidate: Generator(models, tokenizer) for candidate in order}
    for candidate in order:
        _complete(each[candidate], prompts[0], candidate, 2 + max(models.gammas))
    result = SweepResult({candidate: [[] for _ in prompts] for candidate in order})
    for repeat in range(effort.repeats):
        result.counts = {
            candidate: SpeculationStats(candidate.gamma, candidate.drafter) for candidate in order
        }
        for number, prompt in enumerate(prompts):
            for candidate in turned(order, repeat + number):
                took, counts = _complete(each[candidate], prompt, candidate, effort.tokens)
                result.decode_ns[candidate][number].append(took)
                result.counts[candidate].merge(counts)
            progress((repeat + (number + 1) / len(prompts)) / effort.repeats)
        if not result.counts[order[0]].emitted:
            raise RequestError(
                "the texts of all prompts end with their first token, so no setting is faster; "
                "give prompts with longer texts"
            )
    return result


def _complete(
    generator: Generator, prompt: list[int], candidate: Candidate, tokens: int
) -> tuple[int, SpeculationStats]:
    # After its end the text of a source says nothing.
    params = SamplingParams(max_tokens=tokens, ignore_eos=generator.reader.continues)
    completion = generator.generate(
        prompt, params, gamma=candidate.gamma, drafter=candidate.drafter
    )
    arrivals = completion.timings.arrivals
    return arrivals[-1][0] - arrivals[0][0], completion.speculation
