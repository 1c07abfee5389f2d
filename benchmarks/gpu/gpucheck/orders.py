"""Which steps there are, in which order, and how a number of minutes is spent on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING

from gpucheck.evidence import NOT_RUN, OK, Evidence, Outcome, Results
from gpucheck.settings import RunSettings

if TYPE_CHECKING:
    from gpucheck.workbench import Workbench

BACKENDS = ("ort-cuda", "tensorrt", "tensorrt-rtx")
RTX = "tensorrt-rtx"
LONG_MINUTES = 30.0
"""From here on a run with `--minutes` ends with the largest target, below with the smallest."""
INVENTORY = "inventory"
NO_TIME = "too little was left of --minutes"
LEAST_LIMIT, LIMIT_FACTOR = 3.0, 4.0
"""Minutes that any step may take, and how many times what it is expected to take."""
GOAL_MARGIN = 1.2
"""How much more is kept for a goal than its steps are expected to take."""

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
    """Whether time is kept for it: a short run is to end with it."""

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


def sizes_for(minutes: float | None, sizes: Sequence[str]) -> tuple[str, ...]:
    """Return the targets that a run of so many minutes measures."""
    return tuple(sizes if minutes is None or minutes >= LONG_MINUTES else sizes[:1])


def steps(settings: RunSettings) -> list[Step]:
    """Return all steps: what is certain first, then whether numbers are right, then speed."""
    return list(_steps(settings))


def _steps(settings: RunSettings) -> Iterator[Step]:
    yield Step(INVENTORY, "", _call("inventory", "collect"), needs_gpu=False, minutes=0.2)
    yield Step("bandwidth", "", _call("speed", "bandwidth"), minutes=0.2)
    yield from _codelet("ort-cuda")
    yield Step("probe", RTX, _call("probe", "probe"), needs_gpu=False, minutes=0.8)
    yield from _codelet("tensorrt")
    yield from _codelet(RTX)
    first = settings.precisions[0]
    for size in settings.sizes:
        goal = size == settings.sizes[-1]
        yield from _grown(size, goal)
        for backend in BACKENDS:
            yield from _target(size, first, backend, goal)
    for backend in BACKENDS:
        for name in ("passes", "speed"):
            run = _call("speed", name, size="codelet", precision="fp16")
            yield Step(f"codelet.{name}", backend, run, minutes=0.5)
    for backend in BACKENDS[1:]:
        yield Step("codelet.forms", backend, _call("correctness", "forms"), minutes=0.7)
    for precision in settings.precisions[1:]:
        for size in settings.sizes:
            for backend in BACKENDS:
                yield from _target(size, precision, backend, goal=False)
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


def _grown(size: str, goal: bool) -> Iterator[Step]:
    def export(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.export_grown(size, evidence)

    def grow(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.grow(size, evidence)

    yield Step(f"{size}.export", "", export, needs_gpu=False, minutes=0.3, goal=goal)
    yield Step(f"{size}.grow", "", grow, minutes=0.5 if size == "1B" else 4, goal=goal)


def _target(size: str, precision: str, backend: str, goal: bool) -> Iterator[Step]:
    if precision == "fp8" and backend == "ort-cuda":
        return
    part = {"size": size, "precision": precision}
    name, factor = f"{size}-{precision}", 1 if size == "1B" else 3

    def build(bench: Workbench, backend: str, evidence: Evidence) -> None:
        bench.require_precision(precision)
        bench.build_target(size, precision, backend, evidence)

    yield Step(f"{name}.build", backend, build, minutes=0.8 * factor, goal=goal)
    run = _call("speed", "speed", **part)
    yield Step(f"{name}.speed", backend, run, minutes=0.8 * factor, goal=goal)
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
    """Run steps in their order within a number of minutes, and write each outcome at once."""
    began = clock()
    outcomes: list[Outcome] = []
    for number, step in enumerate(chosen):
        left = None if minutes is None else minutes - (clock() - began) / 60
        needed = goal_minutes(chosen, number, outcomes, results)
        limit = step.limit_minutes if left is None else time_for(step, left, needed)
        if reason := blocked(step, results):
            outcome = results.put(Outcome(step.key, NOT_RUN, reason))
        elif not limit:
            facts = {"minutes_needed": step.minutes, "minutes_left": round(max(left or 0, 0), 1)}
            outcome = results.put(Outcome(step.key, NOT_RUN, NO_TIME, facts=facts))
        else:
            started(step)
            outcome = launch(step, 60 * limit)
        outcomes.append(outcome)
        ended(outcome)
    return outcomes


def time_for(step: Step, left: float, needed: float) -> float:
    """Return how many of the minutes left a step may take; 0 where it must not begin.

    `needed` is what goals still take; it is kept for them while they can be reached. A goal begins
    with half of what it is expected to take: it writes what it measured as it goes.
    """
    spare = left - GOAL_MARGIN * needed if needed <= left else left
    if spare >= step.minutes:
        return min(spare, step.limit_minutes)
    return min(left, step.limit_minutes) if step.goal and left >= step.minutes / 2 else 0.0


def goal_minutes(
    chosen: Sequence[Step], number: int, outcomes: Sequence[Outcome], results: Results
) -> float:
    """Return the minutes that one goal needs after a step: shared steps and the cheapest backend's.

    Once a goal was reached, or where no backend can reach one, that is 0.
    """
    step, ended = chosen[number], {outcome.key: outcome.status for outcome in outcomes}
    goals: dict[str, list[Step]] = {}
    for one in chosen:
        if one.goal:
            goals.setdefault(one.backend, []).append(one)
    shared = goals.pop("", [])
    possible = [
        mine
        for backend, mine in goals.items()
        if all(ended.get(one.key, OK) == OK for one in [*shared, *mine])
        and not blocked(mine[0], results)
        and (not step.goal or step.backend in ("", backend))
    ]
    if any(one.key in ended for mine in possible for one in mine[-1:]):
        return 0.0
    ahead = set(chosen[number + 1 :])
    needs = [sum(one.minutes for one in [*shared, *mine] if one in ahead) for mine in possible]
    return min(needs, default=0.0)


def blocked(step: Step, results: Results) -> str:
    """Return why a step cannot be run here, as the inventory and the probe found."""
    if not step.needs_gpu:
        return ""
    machine = results.facts(INVENTORY)
    if machine.get("problem"):
        return f"no GPU ({machine['problem']})"
    reason = str(machine.get("backends", {}).get(step.backend, ""))
    probed = results.facts(f"probe@{RTX}") if step.backend == RTX else {}
    tried = [way for way in probed.get("ways", ()) if way in probed]
    if not reason and tried and "chosen" not in probed:
        why = probed[tried[0]].get("reason", "")
        return f"the probe found no plan that runs here; {tried[0]}: {why}"
    return reason
