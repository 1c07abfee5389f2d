"""Which steps there are, in which order, and what keeps one from being run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING

from gpucheck.evidence import NOT_RUN, Evidence, Outcome, Results
from gpucheck.settings import RunSettings

if TYPE_CHECKING:
    from gpucheck.workbench import Workbench

BACKENDS = ("ort-cuda", "tensorrt", "tensorrt-rtx")
INVENTORY = "inventory"
NO_TIME = "too little was left of --minutes"
LEAST_LIMIT, LIMIT_FACTOR = 3.0, 4.0
"""Minutes that any step may take, and how many times what it is expected to take."""

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

    @property
    def key(self) -> str:
        """Its name in results and on the command line."""
        return f"{self.subject}@{self.backend}" if self.backend else self.subject

    @property
    def limit_minutes(self) -> float:
        """When it is stopped."""
        return max(LEAST_LIMIT, LIMIT_FACTOR * self.minutes)

    def matches(self, patterns: Sequence[str]) -> bool:
        """Tell whether it is among those named; all are where none is named."""
        names = (self.key, self.subject)
        return not patterns or any(fnmatchcase(name, p) for p in patterns for name in names)


def steps(settings: RunSettings) -> list[Step]:
    """Return all steps: for each backend whether numbers are right, then speed; large ones last."""
    return list(_steps(settings))


def _steps(settings: RunSettings) -> Iterator[Step]:
    yield Step(INVENTORY, "", _call("inventory", "collect"), needs_gpu=False, minutes=0.2)
    yield Step("bandwidth", "", _call("speed", "bandwidth"), minutes=0.2)
    first = settings.precisions[0]
    small, large = settings.sizes[:1], settings.sizes[1:]
    for number, backend in enumerate(BACKENDS):
        yield from _codelet(backend)
        for size in small:
            yield from _grown(size) if not number else ()
            yield from _target(size, first, backend)
    for size in large:
        yield from _grown(size)
        for backend in BACKENDS:
            yield from _target(size, first, backend)
    for precision in settings.precisions[1:]:
        for size in settings.sizes:
            for backend in BACKENDS:
                yield from _target(size, precision, backend)
    yield _build("mixed", "ort-cuda")
    yield Step(
        "mixed.verify", "ort-cuda", _call("correctness", "verify", pair="mixed"), minutes=0.7
    )
    yield Step("tests", "", lambda bench, backend, evidence: bench.run_tests(evidence), minutes=2)


def _call(module: str, function: str, **options: str) -> Run:
    """Return what imports a function in the step's own process, and calls it."""

    def run(bench: Workbench, backend: str, evidence: Evidence) -> None:
        getattr(import_module(f"gpucheck.{module}"), function)(bench, backend, evidence, **options)

    return run


def _build(pair: str, backend: str) -> Step:
    def run(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.build_bundle(pair, backend, evidence)

    # TensorRT chooses kernels by timing them on the GPU; the others build anywhere.
    return Step(f"{pair}.build", backend, run, needs_gpu=backend == "tensorrt", minutes=0.7)


def _codelet(backend: str) -> Iterator[Step]:
    yield _build("codelet", backend)
    minutes = {"logits": 0.3, "engine": 0.7, "rounds": 0.3, "verify": 0.7}
    if backend == "ort-cuda":
        del minutes["rounds"]
    for name, expected in minutes.items():
        yield Step(f"codelet.{name}", backend, _call("correctness", name), minutes=expected)
    for name in ("passes", "speed"):
        run = _call("speed", name, size="codelet", precision="fp16")
        yield Step(f"codelet.{name}", backend, run, minutes=0.5)


def _grown(size: str) -> Iterator[Step]:
    def export(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.export_grown(size, evidence)

    def grow(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.grow(size, evidence)

    yield Step(f"{size}.export", "", export, needs_gpu=False, minutes=0.3)
    yield Step(f"{size}.grow", "", grow, minutes=0.5 if size == "1B" else 4)


def _target(size: str, precision: str, backend: str) -> Iterator[Step]:
    if precision == "fp8" and backend == "ort-cuda":
        return
    part = {"size": size, "precision": precision}
    name, factor = f"{size}-{precision}", 1 if size == "1B" else 3

    def build(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.require_precision(precision)
        bench.build_target(size, precision, backend, evidence)

    yield Step(f"{name}.build", backend, build, minutes=0.8 * factor)
    run = _call("speed", "speed", **part)
    yield Step(f"{name}.speed", backend, run, minutes=0.8 * factor)
    run = _call("correctness", "grown_logits", **part)
    yield Step(f"{name}.logits", backend, run, minutes=0.2 * factor)
    run = _call("speed", "passes", **part)
    yield Step(f"{name}.passes", backend, run, minutes=0.3 * factor)


Launch = Callable[[Step, float], Outcome]
"""Runs a step for at most so many seconds."""


def run_order(
    chosen: Sequence[Step], results: Results, launch: Launch, *, minutes: float | None = None,
    started: Callable[[Step], None] = lambda step: None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:  # fmt: skip
    """Run steps in their order within a number of minutes, and write each outcome at once.

    A step that is expected to take longer than what is left is not begun.
    """
    began = clock()
    outcomes: list[Outcome] = []
    for step in chosen:
        left = math.inf if minutes is None else minutes - (clock() - began) / 60
        if reason := blocked(step, results):
            outcome = results.put(Outcome(step.key, NOT_RUN, reason))
        elif left < step.minutes:
            facts = {"minutes_needed": step.minutes, "minutes_left": round(max(left, 0), 1)}
            outcome = results.put(Outcome(step.key, NOT_RUN, NO_TIME, facts=facts))
        else:
            started(step)
            outcome = launch(step, 60 * min(left, step.limit_minutes))
        outcomes.append(outcome)
        ended(outcome)
    return outcomes


def blocked(step: Step, results: Results) -> str:
    """Return why a step cannot be run here, as the inventory found."""
    if not step.needs_gpu:
        return ""
    machine = results.facts(INVENTORY)
    if machine.get("problem"):
        return f"no GPU ({machine['problem']})"
    return str(machine.get("backends", {}).get(step.backend, ""))
