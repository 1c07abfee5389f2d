"""Runs prompts at every configuration in turn, and times them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

from numpy.typing import ArrayLike

from specrt.completion import SpeculationStats, Stream
from specrt.engine.protocol import (
    ConditionedEngine,
    Drafted,
    Engine,
    Feed,
    FusedRounds,
    Output,
    PackedEngine,
    RowsEngine,
)
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.speculation.drafters import NO_DRAFTER
from specrt.speculation.pool import Models


class Configuration(NamedTuple):
    """One way to decode: the tokens drafted per round, and the drafter."""

    gamma: Gamma
    drafter: str

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted: the baseline of every other configuration."""
        return self.gamma == 0

    def __str__(self) -> str:
        """Return it in words."""
        if self.is_plain:
            return "plain decoding"
        return f"{AUTO if self.gamma == AUTO else f'gamma {self.gamma}'} ({self.drafter})"


PLAIN = Configuration(0, NO_DRAFTER)


def configurations(gammas: Iterable[Gamma], drafters: Iterable[str]) -> list[Configuration]:
    """Return every gamma with every drafter, without repeats; plain decoding is always first."""
    pairs = [Configuration(g, d) for d in drafters for g in gammas]
    drafting = [c for c in pairs if not c.is_plain and c.drafter != PLAIN.drafter]
    return list(dict.fromkeys([PLAIN, *drafting]))


def in_turn(compared: list[Configuration], turn: int) -> list[Configuration]:
    """Return the order for one turn, so that none is always first, or always after the same one.

    In as many turns as there are configurations each has every place once; in the next as many
    turns the order is reversed.
    """
    cycle, shift = divmod(turn, len(compared))
    order = compared[shift:] + compared[:shift]
    return order[::-1] if cycle % 2 else order


class PassTime(NamedTuple):
    """Time inside forward passes, and the number of passes."""

    ns: int = 0
    passes: int = 0

    def since(self, before: PassTime) -> PassTime:
        """Return what came after an earlier reading."""
        return PassTime(self.ns - before.ns, self.passes - before.passes)


class Stages(NamedTuple):
    """Where the time of a round goes. Units: microseconds a round; the stages add up to it."""

    draft: float
    """Proposing, the draft model's passes included."""
    verify: float
    """Inside the target's passes."""
    accept: float
    """The target's side outside its passes."""
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
    """All emitted tokens, the prefill's first."""
    ttft_ns: int
    decode_ns: int
    gaps_ns: tuple[float, ...]
    """Per token after the first delivery, its share of the gap before it."""
    counts: SpeculationStats
    target: PassTime
    draft: PassTime

    @property
    def pair(self) -> tuple[int, int]:
        """Prompt and repeat: the completions that ran back to back share it."""
        return self.prompt, self.repeat

    @property
    def tokens_per_second(self) -> float:
        """Decode throughput."""
        return self.counts.emitted / (self.decode_ns / 1e9)

    @cached_property
    def stages(self) -> Stages:
        """The mean round."""
        draft = sum(r.draft_ns for r in self.counts.log)
        verify = sum(r.verify_ns for r in self.counts.log)
        parts = (draft, self.target.ns, verify - self.target.ns, self.decode_ns - draft - verify)
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
        """Median time of one drafted token; None where none was drafted apart from verifying.

        The median leaves out the first round, in which a draft model reads the prompt.
        """
        costs = [r.draft_ns / r.drafted for r in self.counts.log if r.drafted and r.draft_ns]
        return median(costs) if costs else None


def shared_gaps(arrivals: Iterable[tuple[int, int]]) -> tuple[float, ...]:
    """Return each gap between deliveries, shared by the tokens delivered at its end.

    Shapes: arrivals are (ns, tokens delivered), the prefill first -> one gap a token after it.
    """
    gaps: list[float] = []
    for (before, _), (now, count) in pairwise(arrivals):
        gaps += [(now - before) / count] * count
    return tuple(gaps)


class TimedEngine:
    """An engine that adds up the time spent inside its forward passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._forward = engine.forward
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.max_rows, self.traits = engine.max_rows, engine.traits
        self._ns = 0
        self._passes = 0

    @property
    def time(self) -> PassTime:
        """All passes so far."""
        return PassTime(self._ns, self._passes)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        output = self._forward(tokens, start, rows)
        self.add(perf_counter_ns() - began, 1)
        return output

    def add(self, ns: int, passes: int) -> None:
        """Count time and passes that ran outside `forward`."""
        self._ns += ns
        self._passes += passes

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class TimedRows(TimedEngine):
    """The same of an engine that is fed rows, and copies them where that one does."""

    def __init__(self, engine: Engine, rows: RowsEngine) -> None:
        super().__init__(engine)
        self._forward_rows = rows.forward_rows
        if isinstance(engine, PackedEngine):
            self.copy_row = engine.copy_row

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        outputs = self._forward_rows(feeds)
        self.add(perf_counter_ns() - began, 1)
        return outputs


class TimedConditioned(TimedRows):
    """The same of the decoder of an encoder-decoder, whose encoder's time is not counted."""

    def __init__(self, engine: ConditionedEngine) -> None:
        super().__init__(engine, engine)
        self.max_source = engine.max_source
        self.condition = engine.condition


def timed(engine: Engine) -> TimedEngine:
    """Return an engine that times its passes."""
    if isinstance(engine, ConditionedEngine):
        return TimedConditioned(engine)
    return TimedRows(engine, engine) if isinstance(engine, RowsEngine) else TimedEngine(engine)


class TimedRounds:
    """Fused rounds, whose time counts as the target's: one launch runs both models."""

    def __init__(self, rounds: FusedRounds, target: TimedEngine) -> None:
        self._rounds = rounds
        self._target = target
        self.fits = rounds.fits

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Run one round and count its time; `forward` counts its pass when the scores are read."""
        began = perf_counter_ns()
        drafted = self._rounds.run(pending, draft_start, last, target_start, gamma)
        self._target.add(perf_counter_ns() - began, 0)
        return drafted


WARM_UP_TOKENS = 8
"""Enough for every prompt's prefill and the first rounds to have been bound once."""

Samples = Mapping[Configuration, Sequence[Sample]]


def _uncached(models: Models, generator: Generator) -> Generator:
    """Return a generator without a prompt cache: every prompt is read whole."""
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
        """Return the pair with timed engines."""
        rounds = models.rounds and TimedRounds(models.rounds, self.target)
        return replace(models, target=self.target, draft=self.draft, rounds=rounds)


def measure(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    compared: Sequence[Configuration],
    params: SamplingParams,
    *,
    repeats: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Samples:
    """Complete every prompt at every configuration back to back, `repeats` times.

    Each configuration has a generator of its own, so that a gamma policy learns from its own
    rounds alone. A warm-up completes the first prompt whole and the others for a few tokens.
    Ctrl-C ends it early, and what every configuration has completed is returned.
    Raises: RequestError for no prompts or no repeats, KeyboardInterrupt before the first samples.
    """
    if repeats < 1 or not prompts:
        raise RequestError(
            f"{repeats} repeats of {len(prompts)} prompts is nothing to measure; expected 1 or "
            "more of both"
        )
    clocks = Clocks.of(generator.models)
    wrapped = clocks.models(generator.models)
    runners = {c: PromptRunner(c, clocks, _uncached(wrapped, generator)) for c in compared}
    samples: dict[Configuration, list[Sample]] = {c: [] for c in compared}
    turns = len(prompts) * (repeats + 1)
    for number, prompt in enumerate(prompts):
        brief = replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens))
        for runner in runners.values():
            warm = runner.stream(prompt, brief if number else params).finish()
            if len(warm.timings.arrivals) < 2:
                raise RequestError(
                    f"the text of prompt {number + 1} ends with its first token, so there is "
                    "nothing to time; leave it out"
                )
        progress((number + 1) / turns)
    try:
        for turn in range(len(prompts) * repeats):
            repeat, number = divmod(turn, len(prompts))
            taken = {
                c: runners[c].run(prompts[number], params, number, repeat)
                for c in in_turn(list(compared), turn)
            }
            for configuration, sample in taken.items():
                samples[configuration].append(sample)
            progress((len(prompts) + turn + 1) / turns)
    except KeyboardInterrupt:
        if not samples[PLAIN]:
            raise
    return samples


@dataclass(frozen=True)
class PromptRunner:
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
        prefill, drafted = target.time, draft.time if draft else PassTime()
        completion = stream.finish()
        arrivals = completion.timings.arrivals
        return Sample(
            prompt=number,
            repeat=repeat,
            tokens=tuple(completion.token_ids),
            ttft_ns=arrivals[0][0] - completion.timings.began_ns,
            decode_ns=arrivals[-1][0] - arrivals[0][0],
            gaps_ns=shared_gaps(arrivals),
            counts=completion.speculation,
            target=target.time.since(prefill),
            draft=draft.time.since(drafted) if draft else PassTime(),
        )
