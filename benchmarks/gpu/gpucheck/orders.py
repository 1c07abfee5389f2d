"""Which steps there are, in which order, and what keeps one from being run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

from gpucheck.evidence import NOT_RUN, OK, Evidence, Outcome, Results
from gpucheck.settings import ATTENTION, HEAD, RunSettings

if TYPE_CHECKING:
    from gpucheck.workbench import Workbench

WAYS = {
    "ort-cuda": ("provider",),
    "tensorrt": ("plan",),
    "tensorrt-rtx": ("any", "current", "12.1", "12.0", "8.9", "8.6", "8.0", "7.5"),
}
"""How each backend may be opened, tried in this order until one works. For tensorrt-rtx the compute
capabilities that plans are built for: all that it knows, the GPU's own, then one by one."""
BACKENDS = tuple(WAYS)
INVENTORY = "inventory"
NO_TIME = "too little was left of --minutes"
SHORT, LONG = 10.0, 30.0
"""Minutes of the two orders: the one ends with tokens per second at 1 B, the other at 8 B too."""
WAY_LIMIT, LEAST_LIMIT, LIMIT_FACTOR = 1.0, 2.0, 4.0
"""Minutes that one way of several may take, and any step; and how many times what is expected."""
RESERVE = 1.25
"""How many times what goals are expected to take is kept for them."""

Run = Callable[["Workbench", str, Evidence], None]
"""Called with the workbench, the backend and the evidence; the inventory needs no workbench."""


@dataclass(frozen=True)
class Step:
    """One thing to verify, in a process of its own."""

    subject: str
    """As in `codelet.logits` or `8B-fp16.speed`."""
    backend: str
    """Empty where no engine takes part."""
    run: Run
    needs_gpu: bool = True
    minutes: float = 1.0
    """About what it takes on a data-centre GPU; it is not begun with less time left."""
    goal: bool = False
    """Whether its order ends with it: other steps leave it its time, on one backend."""

    @property
    def key(self) -> str:
        """Its name in results and on the command line."""
        return f"{self.subject}@{self.backend}" if self.backend else self.subject

    @property
    def way(self) -> str:
        """The way to open its backend that it tries; empty for other steps."""
        return self.subject.removeprefix("open.") if self.subject.startswith("open.") else ""

    @property
    def again(self) -> bool:
        """Whether it is run although it ended well: others need what it finds, or fresh files."""
        return self.subject.endswith((INVENTORY, ".build", ".export", ".grow"))

    @property
    def limit_minutes(self) -> float:
        """When it is stopped."""
        if self.way and len(WAYS[self.backend]) > 1:
            return WAY_LIMIT
        return max(LEAST_LIMIT, LIMIT_FACTOR * self.minutes)

    def matches(self, patterns: Sequence[str]) -> bool:
        """Tell whether it is among those named; all are where none is named."""
        names = (self.key, self.subject)
        return not patterns or any(fnmatchcase(name, p) for p in patterns for name in names)


def steps(settings: RunSettings) -> list[Step]:
    """Return all steps: what opens, whether numbers are right, tokens per second, then the rest."""
    return list(_steps(settings))


def _steps(settings: RunSettings) -> Iterator[Step]:
    yield Step(INVENTORY, "", _call("inventory", "collect"), needs_gpu=False, minutes=0.1)
    yield Step("bandwidth", "", _call("speed", "bandwidth"), minutes=0.1)
    for backend, ways in WAYS.items():
        for way in ways:
            run = _call("correctness", "opens", way=way)
            yield Step(f"open.{way}", backend, run, minutes=0.3)
    for backend in BACKENDS:
        yield from _codelet(backend)
    first, others = settings.precisions[0], settings.precisions[1:]
    for size in settings.sizes:
        yield from _grown(size)
        for backend in BACKENDS:
            yield from _target(size, first, backend, goal=True)
    for size, backend in product(settings.sizes, BACKENDS):
        yield from _passes(size, first, backend)
    for backend, name in product(BACKENDS, ("passes", "speed")):
        run = _call("speed", name, size="codelet", precision="fp16")
        yield Step(f"codelet.{name}", backend, run, minutes=0.5)
    for precision, size, backend in product(others, settings.sizes, BACKENDS):
        yield from _target(size, precision, backend)
        yield from _passes(size, precision, backend)
    for pair in ATTENTION:
        yield from _attention(pair, "tensorrt-rtx")
    yield from _head("tensorrt")
    yield from _head("tensorrt-rtx")
    yield _build("mixed", "ort-cuda")
    run = _call("correctness", "verify", pair="mixed")
    yield Step("mixed.verify", "ort-cuda", run, minutes=0.5)


def _call(module: str, function: str, **options: str) -> Run:
    """Return what imports a function in the step's own process, and calls it."""

    def run(bench: Workbench, backend: str, evidence: Evidence) -> None:
        getattr(import_module(f"gpucheck.{module}"), function)(bench, backend, evidence, **options)

    return run


def _build(pair: str, backend: str) -> Step:
    def run(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.build_bundle(pair, backend, evidence)

    # TensorRT chooses kernels by timing them on the GPU; the others build anywhere.
    return Step(f"{pair}.build", backend, run, needs_gpu=backend == "tensorrt", minutes=0.5)


def _codelet(backend: str) -> Iterator[Step]:
    yield _build("codelet", backend)
    minutes = {"logits": 0.2, "engine": 0.4, "rounds": 0.2, "verify": 0.5}
    if backend == "ort-cuda":
        del minutes["rounds"]
    for name, expected in minutes.items():
        yield Step(f"codelet.{name}", backend, _call("correctness", name), minutes=expected)


def _attention(pair: str, backend: str) -> Iterator[Step]:
    yield _build(pair, backend)
    yield Step(f"{pair}.verify", backend, _call("correctness", "verify", pair=pair), minutes=0.5)
    run = _call("speed", "passes", size=pair, precision="fp16")
    yield Step(f"{pair}.passes", backend, run, minutes=0.5)


def _head(backend: str) -> Iterator[Step]:
    yield _build(HEAD, backend)
    yield Step(f"{HEAD}.logits", backend, _call("correctness", "head"), minutes=0.3)
    run = _call("correctness", "verify", pair=HEAD)
    yield Step(f"{HEAD}.verify", backend, run, minutes=0.5)


def _grown(size: str) -> Iterator[Step]:
    def export(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.export_grown(size, evidence)

    def grow(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.grow(size, evidence)

    minutes = 0.4 if size == "1B" else 4
    yield Step(f"{size}.export", "", export, needs_gpu=False, minutes=0.3)
    yield Step(f"{size}.grow", "", grow, minutes=minutes, goal=True)


def _target(size: str, precision: str, backend: str, goal: bool = False) -> Iterator[Step]:
    if precision == "fp8" and backend == "ort-cuda":
        return
    name, factor = f"{size}-{precision}", 1 if size == "1B" else 4

    def build(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.require_precision(precision)
        bench.build_target(size, precision, backend, evidence)

    yield Step(f"{name}.build", backend, build, minutes=0.8 * factor, goal=goal)
    run = _call("speed", "speed", size=size, precision=precision)
    yield Step(f"{name}.speed", backend, run, minutes=0.6 * factor, goal=goal)


def _passes(size: str, precision: str, backend: str) -> Iterator[Step]:
    if precision == "fp8" and backend == "ort-cuda":
        return
    for module, name in (("correctness", "logits"), ("speed", "passes")):
        function = "grown_logits" if name == "logits" else name
        run = _call(module, function, size=size, precision=precision)
        yield Step(f"{size}-{precision}.{name}", backend, run, minutes=0.2 if size == "1B" else 0.6)


Launch = Callable[[Step, float], Outcome]
"""Runs a step for at most so many seconds."""
Known = Mapping[str, Mapping[str, Any]]
"""What is known of steps, by their keys, as `Results` keeps it."""


def run_order(
    chosen: Sequence[Step], results: Results, launch: Launch, *, minutes: float,
    resume: bool = False,
    started: Callable[[Step], None] = lambda step: None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:  # fmt: skip
    """Run steps in their order within a number of minutes, and write each outcome at once.

    A step that is expected to take longer than what is left is not begun, and what hangs leaves the
    goals of the order their time. With `resume` what ended well before is not run again.
    """
    began = clock()
    outcomes: list[Outcome] = []
    for number, step in enumerate(chosen):
        known: Known = results.read()["steps"]
        left = minutes - (clock() - began) / 60
        free = left - _reserved(chosen[number + 1 :], known)
        if resume and not step.again and known.get(step.key, {}).get("status") == OK:
            outcome = Outcome(step.key, **known[step.key])
        elif reason := blocked(step, known):
            outcome = results.put(Outcome(step.key, NOT_RUN, reason))
        elif (left if step.goal else free) < step.minutes:
            facts = {"minutes_needed": step.minutes, "minutes_left": round(max(left, 0), 1)}
            outcome = results.put(Outcome(step.key, NOT_RUN, NO_TIME, facts=facts))
        else:
            started(step)
            outcome = launch(step, 60 * min(max(free, step.minutes), step.limit_minutes))
        outcomes.append(outcome)
        ended(outcome)
    return outcomes


def _reserved(later: Sequence[Step], known: Known) -> float:
    """Return the minutes of the goals to come, each on the first backend that may run it."""
    goals: dict[str, float] = {}
    for step in later:
        if step.goal and step.subject not in goals and not blocked(step, known):
            goals[step.subject] = RESERVE * step.minutes
    return sum(goals.values())


def blocked(step: Step, known: Known) -> str:
    """Return why a step cannot be run here, by what earlier ones found."""
    if not step.needs_gpu:
        return ""
    machine = known.get(INVENTORY, {}).get("facts", {})
    if machine.get("problem"):
        return f"no GPU ({machine['problem']})"
    if not step.backend:
        return ""
    if step.way:
        gpus = machine.get("gpus") or [{}]
        return _needless(step, known, gpus[0].get("capability", ""))
    tried = [known.get(f"open.{way}@{step.backend}") for way in WAYS[step.backend]]
    if working_way(step.backend, known) or None in tried:
        return ""
    reasons = list(dict.fromkeys(one["reason"] for one in tried if one))
    if len(reasons) == 1:
        return str(reasons[0])
    return f"{step.backend} opens in no way: {'; '.join(reasons)}"


def working_way(backend: str, known: Known) -> str:
    """Return the first way to open a backend that worked; empty where none did yet."""
    keys = {way: f"open.{way}@{backend}" for way in WAYS[backend]}
    return next((way for way, key in keys.items() if known.get(key, {}).get("status") == OK), "")


def _needless(step: Step, known: Known, capability: str) -> str:
    """Return why a way need not be tried: an earlier one works, or none can."""
    earlier = WAYS[step.backend][: WAYS[step.backend].index(step.way)]
    for way in earlier:
        entry = known.get(f"open.{way}@{step.backend}", {})
        if entry.get("status") == OK:
            return f"{way} works"
        if lacks := entry.get("facts", {}).get("lacks"):
            return str(lacks)
    if step.way[0].isdigit() and capability and _number(step.way) > _number(capability):
        return f"this GPU has capability {capability}"
    return ""


def _number(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
