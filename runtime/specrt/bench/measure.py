"""Run prompts at every configuration in turn, and time them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from specrt.bench.clock import Busy, TimedEngine, TimedRounds, timed
from specrt.bench.configuration import Configuration, in_turn
from specrt.bench.sample import Sample, shared_gaps
from specrt.completion import Stream
from specrt.errors import RequestError
from specrt.generate import Generator
from specrt.models import Models
from specrt.params import SamplingParams

WARM_UP_TOKENS = 8
"""Enough for every prompt's prefill and the first rounds to have been bound once."""

Samples = Mapping[Configuration, Sequence[Sample]]


def _uncached(models: Models, generator: Generator) -> Generator:
    """Return a generator that reads every prompt whole, whoever read it before."""
    return Generator(models, generator.tokenizer, prompt_cache=False)


@dataclass(frozen=True)
class Clocks:
    """The engines of a pair, timed."""

    target: TimedEngine
    draft: TimedEngine | None

    @classmethod
    def of(cls, models: Models) -> Clocks:
        """Wrap the engines of a pair."""
        return cls(timed(models.target), timed(models.draft) if models.draft else None)

    def models(self, models: Models) -> Models:
        """Return the pair with timed engines; costs, where they are measured, are so once."""
        rounds = models.rounds and TimedRounds(models.rounds, self.target)
        wrapped = models.timed(self.target, self.draft, rounds)
        return replace(wrapped, measure=cache(models.measure) if models.measure else None)


def measure(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    compared: Sequence[Configuration],
    params: SamplingParams,
    *,
    repeats: int,
    progress: Callable[[float], None] = lambda done: None,
) -> Samples:
    """Complete every prompt at every configuration back to back, `repeats` times.

    Each configuration has a generator of its own, so that what a gamma policy learns comes from
    its own rounds alone. One warm-up goes before: every prompt for a few tokens, the first whole.
    Raises: RequestError for nothing to measure.
    """
    if repeats < 1 or not prompts:
        raise RequestError(
            f"{repeats} repeats of {len(prompts)} prompts is nothing to measure; expected 1 or "
            "more of both"
        )
    clocks = Clocks.of(generator.models)
    wrapped = clocks.models(generator.models)
    runners = {c: Runner(c, clocks, _uncached(wrapped, generator)) for c in compared}
    samples: dict[Configuration, list[Sample]] = {c: [] for c in compared}
    turns = len(prompts) * (repeats + 1)
    for number, prompt in enumerate(prompts):
        brief = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
        for runner in runners.values():
            runner.stream(prompt, brief if number else params).finish()
        progress((number + 1) / turns)
    for turn in range(len(prompts) * repeats):
        repeat, number = divmod(turn, len(prompts))
        for configuration in in_turn(list(compared), turn):
            done = runners[configuration].run(prompts[number], params, number, repeat)
            samples[configuration].append(done)
        progress((len(prompts) + turn + 1) / turns)
    return samples


@dataclass(frozen=True)
class Runner:
    """Completes prompts at one configuration."""

    configuration: Configuration
    clocks: Clocks
    generator: Generator

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        """Begin a completion."""
        gamma, drafter = self.configuration
        return self.generator.stream(prompt, params, gamma=gamma, drafter=drafter)

    def run(
        self, prompt: Sequence[int], params: SamplingParams, number: int, repeat: int
    ) -> Sample:
        """Complete a prompt, and time what comes after the first token."""
        target, draft = self.clocks.target, self.clocks.draft
        stream = self.stream(prompt, params)
        next(stream)
        read, drafted = target.busy, draft.busy if draft else None
        done = stream.finish()
        arrivals = done.timings.arrivals
        return Sample(
            prompt=number,
            repeat=repeat,
            tokens=tuple(done.token_ids),
            ttft_ns=arrivals[0][0] - done.timings.began_ns,
            decode_ns=arrivals[-1][0] - arrivals[0][0],
            gaps_ns=shared_gaps(arrivals),
            counts=done.speculation,
            target=target.busy.since(read),
            draft=draft.busy.since(drafted) if draft and drafted else Busy(),
        )
