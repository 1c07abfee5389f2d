"""What a benchmark reports: its setting, a row per class and configuration, and a verdict."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from specrt.bench.lossless import Comparison
from specrt.bench.measure import PLAIN, Configuration, Sample, Samples, Stages
from specrt.bundle import Manifest, ModelRecord
from specrt.completion import SpeculationStats
from specrt.engine.backends import backend_named
from specrt.params import AUTO, SamplingParams
from specrt.system.machine import Machine, this_machine
from specrt.system.memory import Bandwidth, size

ALL = "all"
"""The class of every prompt, where there is more than one."""


class Spread(NamedTuple):
    """The median of some values and their quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value or more."""
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(middle, low, high)

    def __str__(self) -> str:
        """Return the quartiles."""
        return f"{self.low:.2f}-{self.high:.2f}"

    def to_json(self, digits: int = 4) -> dict[str, Any]:
        """Return the three numbers by name."""
        return {name: round(value, digits) for name, value in self._asdict().items()}


@dataclass(frozen=True)
class BenchRow:
    """All samples of one configuration, each paired with the plain one of its prompt and repeat."""

    configuration: Configuration
    samples: Sequence[Sample]
    plain: Mapping[tuple[int, int], Sample]
    """Plain completions by prompt and repeat."""
    weight_bytes: int = 0
    """Of the target: each of its passes reads them all."""

    def _over(self, value: Callable[[Sample], float]) -> Spread:
        return Spread.of([value(s) for s in self.samples])

    @cached_property
    def tokens_per_second(self) -> Spread:
        """Decode throughput."""
        return self._over(lambda s: s.tokens_per_second)

    @cached_property
    def _speedups(self) -> list[float]:
        return [s.tokens_per_second / self.plain[s.pair].tokens_per_second for s in self.samples]

    @cached_property
    def speedup(self) -> Spread:
        """Decode throughput over the plain completion's, for the same prompt and repeat."""
        return Spread.of(self._speedups)

    @property
    def overall(self) -> float:
        """The speedup of all samples run one after another: total tokens over total time."""
        plain = [self.plain[s.pair] for s in self.samples]
        return _throughput(self.samples) / _throughput(plain)

    @property
    def standing(self) -> str:
        """`faster` or `slower` where at least three quarters of the pairs are, else `even`."""
        if self.configuration.is_plain:
            return "plain"
        enough = 0.75 * len(self._speedups)
        if sum(ratio > 1.0 for ratio in self._speedups) >= enough:
            return "faster"
        return "slower" if sum(ratio < 1.0 for ratio in self._speedups) >= enough else "even"

    @cached_property
    def ttft_ms(self) -> Spread:
        """Time to first token."""
        return self._over(lambda s: s.ttft_ns / 1e6)

    @cached_property
    def itl_ms(self) -> tuple[float, float]:
        """Gap between tokens, 50th and 95th percentile."""
        gaps = [gap for s in self.samples for gap in s.gaps_ns]
        p50, p95 = np.quantile(gaps, (0.5, 0.95)).tolist()
        return p50 / 1e6, p95 / 1e6

    @cached_property
    def stages(self) -> dict[str, Spread]:
        """Microseconds a round, stage by stage."""
        rounds = [s.stages for s in self.samples]
        return {
            name: Spread.of(values)
            for name, values in zip(Stages._fields, zip(*rounds, strict=True), strict=True)
        }

    @cached_property
    def outside_us(self) -> Spread:
        """Microseconds a round outside both engines."""
        return self._over(lambda s: s.outside_us)

    @cached_property
    def weights_per_second(self) -> Spread:
        """Bytes of the target's weights that its passes read in a second of their time."""
        return self._over(lambda s: self.weight_bytes * s.target.passes / (s.target.ns / 1e9))

    @property
    def draft_steps(self) -> float | None:
        """Cost of drafting one token, in plain steps; None where none was drafted."""
        costs = [
            s.drafted_token_ns / self.plain[s.pair].verify_ns
            for s in self.samples
            if s.drafted_token_ns is not None
        ]
        return median(costs) if costs else None

    @property
    def verify_steps(self) -> float:
        """Cost of the target's side of a drafting round, in plain steps."""
        return self._over(lambda s: s.verify_ns / self.plain[s.pair].verify_ns).median

    @cached_property
    def counts(self) -> SpeculationStats:
        """The rounds of all samples."""
        total = SpeculationStats(*self.configuration)
        for sample in self.samples:
            total.merge(sample.counts)
        total.fallback = next((s.counts.fallback for s in self.samples if s.counts.fallback), None)
        return total

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted / evaluated at each place in the draft."""
        both = zip(self.counts.accepted_at, self.counts.evaluated_at, strict=True)
        return [accepted / evaluated for accepted, evaluated in both]

    def to_json(self) -> dict[str, Any]:
        """Return counts, rates, medians and quartiles as plain JSON types."""
        p50, p95 = self.itl_ms
        draft = self.draft_steps
        return {
            **self.counts.to_json(),
            "acceptance_by_position": [round(rate, 4) for rate in self.acceptance_by_position],
            "standing": self.standing,
            "speedup": self.speedup.to_json(),
            "speedup_overall": round(self.overall, 4),
            "tokens_per_second": self.tokens_per_second.to_json(2),
            "ttft_ms": self.ttft_ms.to_json(),
            "itl_ms": {"p50": round(p50, 4), "p95": round(p95, 4)},
            "round_us": {name: spread.to_json(2) for name, spread in self.stages.items()},
            "outside_us": self.outside_us.to_json(2),
            "draft_steps": None if draft is None else round(draft, 4),
            "verify_steps": round(self.verify_steps, 4),
            "weight_bytes_per_second": self.weights_per_second.to_json(0),
        }


def _throughput(samples: Sequence[Sample]) -> float:
    return sum(s.counts.emitted for s in samples) / sum(s.decode_ns for s in samples)


def repeated_tokens(tokens: Sequence[int], run: int = 16) -> int:
    """Count the tokens that end a run of `run` tokens seen earlier in the same text."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(run, len(tokens) + 1):
        window = tuple(tokens[end - run : end])
        repeated += window in seen
        seen.add(window)
    return repeated


@dataclass(frozen=True)
class Task:
    """One class of prompts: code, prose, text copied from the prompt."""

    category: str
    prompts: int
    rows: tuple[BenchRow, ...]
    """Plain decoding first."""
    repetition: float
    """Share of plain output inside a 16-token run seen earlier: text that loops."""

    @property
    def plain(self) -> BenchRow:
        """Plain decoding."""
        return self.rows[0]

    def to_json(self) -> dict[str, Any]:
        """Return the class as plain JSON types."""
        return {
            "category": self.category,
            "prompts": self.prompts,
            "repetition": round(self.repetition, 4),
            "results": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True)
class BenchReport:
    """Each class, and all of them together where there are several."""

    tasks: tuple[Task, ...]
    outputs: Comparison

    @property
    def total(self) -> Task:
        """All prompts."""
        return self.tasks[-1]

    def to_json(self) -> dict[str, Any]:
        """Return everything measured as plain JSON types."""
        return {"outputs": self.outputs.to_json(), "tasks": [task.to_json() for task in self.tasks]}


def report(
    samples: Samples, categories: Sequence[str], outputs: Comparison, weight_bytes: int
) -> BenchReport:
    """Sort samples by the category of their prompt.

    `categories` holds one entry a prompt, measured or not; `weight_bytes` are the target's.
    """
    measured = sorted({sample.prompt for sample in samples[PLAIN]})
    names = list(dict.fromkeys(categories[number] for number in measured))
    members = {name: {n for n in measured if categories[n] == name} for name in names}
    if len(names) > 1:
        members[ALL] = set(measured)
    tasks = (_task(name, samples, prompts, weight_bytes) for name, prompts in members.items())
    return BenchReport(tuple(tasks), outputs)


def _task(name: str, samples: Samples, prompts: set[int], weight_bytes: int) -> Task:
    of_class = {c: [s for s in each if s.prompt in prompts] for c, each in samples.items()}
    plain = {s.pair: s for s in of_class[PLAIN]}
    rows = tuple(BenchRow(c, each, plain, weight_bytes) for c, each in of_class.items())
    texts = [s.tokens for s in of_class[PLAIN] if s.repeat == 0]
    repetition = sum(map(repeated_tokens, texts)) / sum(map(len, texts))
    return Task(name, len(prompts), rows, repetition)


@dataclass(frozen=True)
class Environment:
    """What the figures of one run hold for: bundle, machine and options."""

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
        """Return one line: model, machine, library, lengths, sampling and repeats."""
        p = self.params
        options = [f"temperature {p.temperature:g}"] + [
            f"{name.replace('_', '-')} {value:g}"
            for name, value, unset in (
                ("top_k", p.top_k, 0), ("top_p", p.top_p, 1.0), ("min_p", p.min_p, 0.0),
            )
            if value != unset
        ]  # fmt: skip
        sampling = "greedy" if p.greedy else f"{', '.join(options)} ({p.verifier})"
        return (
            f"{self.name}, {self.backend} {self.precision}, {self.threads} "
            f"thread{'s' if self.threads > 1 else ''} of {self.machine.cpu}, "
            f"{self.machine.library}; {p.max_tokens} tokens a prompt, {sampling}, "
            f"{self.repeats} repeat{'s' if self.repeats > 1 else ''} in turn"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
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
        return (
            f"peak memory {size(self.peak)}, {size(self.before)} of it before the bundle was "
            f"opened; weights take {size(self.weights)} and full caches {size(self.caches)}"
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
    weights = sum(model.weight_bytes for model in models)
    return Footprint(before, peak_bytes(), weights, manifest.kv_bytes(*models))


def resident_bytes(status: Path = _STATUS) -> int:
    """Return the bytes of this process in memory now; its peak where the system has no figure."""
    return _status_bytes("VmRSS", status) or peak_bytes(status)


def peak_bytes(status: Path = _STATUS) -> int:
    """Return the most bytes this process had in memory at once."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status_bytes("VmHWM", status) or kib << 10


def _status_bytes(name: str, status: Path) -> int:
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    sizes = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(sizes[0][1]) << 10 if sizes else 0


COLUMNS = (
    "prompts", "gamma", "drafter", "tokens/s", "speedup", "quartiles", "acceptance rate", "yield",
    "tokens/round", "TTFT ms", "ITL p50", "p95 ms",
)  # fmt: skip

CAPTION = (
    "speedup: median of each completion's tokens/s over that of plain decoding on the same prompt, "
    "not the ratio of the tokens/s above"
)


def table_rows(report: BenchReport) -> list[tuple[str, ...]]:
    """Return the cells below `COLUMNS`, a line for each class and configuration."""
    return [_cells(task, row) for task in report.tasks for row in task.rows]


def _cells(task: Task, row: BenchRow) -> tuple[str, ...]:
    counts, (p50, p95) = row.counts, row.itl_ms
    is_plain = row.configuration.is_plain
    return (
        f"{task.category} {task.prompts}" if row is task.plain else "",
        f"{row.configuration.gamma}",
        "" if is_plain else row.configuration.drafter,
        f"{row.tokens_per_second.median:.0f}",
        f"{row.speedup.median:.2f}",
        "" if is_plain else str(row.speedup),
        f"{counts.acceptance_rate:.3f}" if counts.drafted else "",
        f"{counts.draft_yield:.3f}" if counts.drafted else "",
        f"{counts.tokens_per_round:.2f}",
        f"{row.ttft_ms.median:.1f}",
        f"{p50:.2f}",
        f"{p95:.2f}",
    )


@dataclass(frozen=True)
class Summary:
    """A report, its setting, and the memory after it."""

    setting: Environment
    report: BenchReport
    memory: Footprint
    bandwidth: Bandwidth

    @property
    def sentences(self) -> list[str]:
        """The verdict on each class, whether outputs were identical, bandwidth and memory."""
        tasks = self.report.tasks
        whose = {t.category: f"{t.category}: " if len(tasks) > 1 else "" for t in tasks}
        verdicts = [f"{whose[t.category]}{sentence}" for t in tasks for sentence in verdict(t)]
        return [*verdicts, str(self.report.outputs), self._reading(), str(self.memory)]

    def _reading(self) -> str:
        """Compare what plain decoding reads, all weights a token, with what memory can give."""
        rate = self.report.total.plain.weights_per_second.median
        share = rate / self.bandwidth.bytes_per_second
        cached = "; more than memory gives, so weights stay in the cache" if share > 1 else ""
        return (
            f"plain decoding reads {rate / 1e9:.1f} GB/s of weights in the target's passes, "
            f"{share:.0%} of {self.bandwidth}{cached}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain JSON types."""
        return {
            **self.setting.to_json(),
            **self.report.to_json(),
            "memory": self.memory.to_json(),
            "bandwidth": self.bandwidth.to_json(),
            "verdict": self.sentences,
        }


def verdict(task: Task) -> list[str]:
    """Return sentences: the best configuration, what `auto` makes of it, what qualifies both."""
    drafting = [row for row in task.rows if not row.configuration.is_plain]
    found = [_best(drafting)] if drafting else ["plain decoding alone was measured"]
    autos = [row for row in drafting if row.configuration.gamma == AUTO]
    fixed = [row for row in drafting if row.configuration.gamma != AUTO]
    if autos and fixed:
        auto, best = (max(rows, key=lambda row: row.overall) for rows in (autos, fixed))
        found.append(
            f"in total time {auto.configuration} is {auto.overall:.2f} times as fast, and the best "
            f"fixed one, {best.configuration}, {best.overall:.2f} times"
        )
    for row in drafting:
        if row.counts.fallback:
            count = sum(s.counts.fallback is not None for s in row.samples)
            found.append(
                f"{row.configuration} stopped drafting in {count} of {len(row.samples)} "
                f"completions: {row.counts.fallback}"
            )
    if task.repetition >= 0.01:
        found.append(f"{task.repetition:.0%} of the plain output repeats itself")
    return found


def _best(drafting: Sequence[BenchRow]) -> str:
    best = max(drafting, key=lambda row: row.speedup.median)
    ratio = f"{best.speedup.median:.2f} times plain decoding (quartiles {best.speedup})"
    if best.speedup.median <= 1.0:
        return f"speculation does not pay here: the best, {best.configuration}, is {ratio}"
    return f"{best.configuration} is {ratio}"
