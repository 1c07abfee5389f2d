"""Runs prompts at every configuration in turn, and times them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from numpy.typing import ArrayLike

from specrt.bench.samples import Busy, Configuration, Sample, in_turn, shared_gaps
from specrt.bundle import Manifest, ModelRecord
from specrt.completion import Stream
from specrt.engine.backends import backend_named
from specrt.engine.protocol import Drafted, Engine, Feed, FusedRounds, Output, PackedEngine
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.pool import Models
from specrt.system import Machine, this_machine


class TimedEngine:
    """An engine that adds up the time spent inside its forward passes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._forward = engine.forward
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self._ns = 0
        self._passes = 0

    @property
    def busy(self) -> Busy:
        """All passes so far."""
        return Busy(self._ns, self._passes)

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        output = self._forward(tokens, start, rows)
        self.add(perf_counter_ns() - began, 1)
        return output

    def add(self, ns: int, passes: int) -> None:
        """Count what ran elsewhere on this engine's behalf."""
        self._ns += ns
        self._passes += passes

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


class TimedPacked(TimedEngine):
    """The same of an engine that packs rows."""

    def __init__(self, engine: PackedEngine) -> None:
        super().__init__(engine)
        self._forward_rows = engine.forward_rows
        self.copy_row = engine.copy_row

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass and count its time."""
        began = perf_counter_ns()
        outputs = self._forward_rows(feeds)
        self.add(perf_counter_ns() - began, 1)
        return outputs


def timed(engine: Engine) -> TimedEngine:
    """Return an engine that tells how long its passes took."""
    return TimedPacked(engine) if isinstance(engine, PackedEngine) else TimedEngine(engine)


class TimedRounds:
    """Whole rounds whose time is the target's: nobody can tell the two models' apart."""

    def __init__(self, rounds: FusedRounds, target: TimedEngine) -> None:
        self._rounds = rounds
        self._target = target
        self.fits = rounds.fits

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Run one round and count its time; its pass is counted when its scores are asked for."""
        began = perf_counter_ns()
        drafted = self._rounds.run(pending, draft_start, last, target_start, gamma)
        self._target.add(perf_counter_ns() - began, 0)
        return drafted


@dataclass(frozen=True)
class Environment:
    """The bundle, the machine and the options of one run."""

    bundle: str
    name: str
    backend: str
    precision: str
    """Of the target, and of the draft where it is another."""
    machine: Machine
    threads: int
    repeats: int
    params: SamplingParams

    @classmethod
    def of(
        cls, bundle: Path, manifest: Manifest, params: SamplingParams, threads: int, repeats: int
    ) -> Environment:
        """Describe a run on this machine."""
        m, machine = manifest, this_machine(backend_named(manifest.backend).library())
        target, draft = target_precision(m), _stored(m.draft) if m.draft else ""
        precision = f"{target}, draft {draft}" if draft not in ("", target) else target
        return cls(str(bundle), m.name, m.backend, precision, machine, threads, repeats, params)

    def __str__(self) -> str:
        """Return a line that tells a reader what the figures hold for."""
        p = self.params
        options = [f"temperature {p.temperature:g}"] + [
            f"{name.replace('_', '-')} {value:g}"
            for name, value, unset in (
                ("top_k", p.top_k, 0), ("top_p", p.top_p, 1.0), ("min_p", p.min_p, 0.0),
            )
            if value != unset
        ]  # fmt: skip
        drawn = "greedy" if p.greedy else f"{', '.join(options)} ({p.verifier})"
        return (
            f"{self.name}, {self.backend} {self.precision}, {self.threads} "
            f"thread{'s' if self.threads > 1 else ''} of {self.machine.cpu}, "
            f"{self.machine.library}; {p.max_tokens} tokens a prompt, {drawn}, "
            f"{self.repeats} repeat{'s' if self.repeats > 1 else ''} in turn"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the setting as plain JSON types."""
        p = self.params
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "verifier")
        return {
            "bundle": self.bundle,
            "name": self.name,
            "backend": self.backend,
            "precision": self.precision,
            "machine": asdict(self.machine),
            "threads": self.threads,
            "repeats": self.repeats,
            "sampling": {name: getattr(p, name) for name in names},
        }


def target_precision(manifest: Manifest) -> str:
    """Return what the weights that decide the output are stored as; `fp32` where all are."""
    return _stored(manifest.target)


def _stored(model: ModelRecord) -> str:
    # Looking up a row of the embedding table rounds nothing: it is the same for every width.
    alike = model.head == model.precision
    return model.precision if alike else f"{model.precision} with a head of {model.head}"


_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Footprint:
    """The memory of a process that opened a bundle. Units: bytes."""

    before: int
    """Resident before the bundle was opened: the interpreter and its libraries so far."""
    peak: int
    """Most that was resident at once."""
    weights: int
    caches: int
    """KV buffers with every position filled; those never written take no memory."""

    @property
    def ratio(self) -> float:
        """Peak over weights and caches; interpreter and libraries count against it."""
        return self.peak / (self.weights + self.caches)

    @property
    def opened_ratio(self) -> float:
        """What opening and running added, over weights and caches."""
        return (self.peak - self.before) / (self.weights + self.caches)

    def __str__(self) -> str:
        """Return a sentence."""
        mib = 1 << 20
        return (
            f"peak memory {self.peak / mib:.0f} MiB, {self.before / mib:.0f} of them there before "
            f"the bundle was opened; weights {self.weights / mib:.0f} and caches "
            f"{self.caches / mib:.0f}: {self.ratio:.2f} times them, {self.opened_ratio:.2f} "
            "without what was there"
        )

    def to_json(self) -> dict[str, Any]:
        """Return bytes and ratios."""
        return {
            "before_bytes": self.before,
            "peak_bytes": self.peak,
            "weight_bytes": self.weights,
            "kv_bytes": self.caches,
            "ratio": round(self.ratio, 4),
            "opened_ratio": round(self.opened_ratio, 4),
        }


def footprint(manifest: Manifest, before: int, has_draft: bool) -> Footprint:
    """Return the memory taken so far, for a bundle whose draft may have stayed closed."""
    models = [manifest.target, *([manifest.draft] if manifest.draft and has_draft else [])]
    caches = (
        m.geometry.kv_bytes(manifest.batch, manifest.max_length, m.kv_item_bytes) for m in models
    )
    return Footprint(before, peak_bytes(), sum(m.weight_bytes for m in models), sum(caches))


def resident_bytes(status: Path = _STATUS) -> int:
    """Return the bytes of this process in memory now; its peak where the system does not tell."""
    return _told("VmRSS", status) or peak_bytes(status)


def peak_bytes(status: Path = _STATUS) -> int:
    """Return the most bytes this process had in memory at once."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _told("VmHWM", status) or kib << 10


def _told(name: str, status: Path) -> int:
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    sizes = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0][1]) << 10 if sizes else 0


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
    runners = {c: PromptRunner(c, clocks, _uncached(wrapped, generator)) for c in compared}
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
