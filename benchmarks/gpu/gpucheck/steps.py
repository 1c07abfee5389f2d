"""Which steps there are, in which order, and what keeps one from being run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from itertools import chain, product
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


@dataclass(frozen=True)
class Step:
    """One thing to verify, in a process of its own."""

    subject: str
    """As in `codelet.logits` or `8B-fp16.speed`."""
    backend: str
    """Empty where no engine takes part."""
    function: str
    """As in `speed.passes`; called with the workbench, the backend, the evidence and `options`."""
    minutes: float
    """About what it takes on a data-centre GPU; it is not begun with less time left."""
    needs_gpu: bool = True
    goal: bool = False
    """Whether its order ends with it: other steps leave it its time, on one backend."""
    options: Mapping[str, str] = field(default_factory=dict)

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

    def run(self, bench: Workbench | None, evidence: Evidence) -> None:
        """Import its function, in the step's own process, and call it."""
        module, _, name = self.function.partition(".")
        function: Callable[..., None] = getattr(import_module(f"gpucheck.{module}"), name)
        function(bench, self.backend, evidence, **self.options)


def steps(settings: RunSettings) -> list[Step]:
    """Return all steps: what opens, whether numbers are right, tokens per second, then the rest."""
    first, others = settings.precisions[0], settings.precisions[1:]
    return [
        Step(INVENTORY, "", "inventory.collect", 0.1, needs_gpu=False),
        Step("bandwidth", "", "speed.bandwidth", 0.1),
        *(
            Step(f"open.{way}", backend, "correctness.opens", 0.3, options={"way": way})
            for backend, ways in WAYS.items()
            for way in ways
        ),
        *chain.from_iterable(map(_codelet, BACKENDS)),
        *chain.from_iterable(_grown(size, first) for size in settings.sizes),
        *(
            step
            for size, backend in product(settings.sizes, _running(first))
            for step in _passes(size, first, backend)
        ),
        *(_timed("codelet", name, one) for one, name in product(BACKENDS, ("passes", "speed"))),
        *(
            step
            for precision, size in product(others, settings.sizes)
            for backend in _running(precision)
            for step in (*_target(size, precision, backend), *_passes(size, precision, backend))
        ),
        *chain.from_iterable(_attention(pair, "tensorrt-rtx") for pair in ATTENTION),
        *_head("tensorrt"),
        *_head("tensorrt-rtx"),
        _build("mixed", "ort-cuda"),
        _verify("mixed", "ort-cuda"),
    ]


def _codelet(backend: str) -> Iterator[Step]:
    yield _build("codelet", backend)
    yield Step("codelet.logits", backend, "correctness.logits", 0.2)
    yield Step("codelet.engine", backend, "correctness.engine", 0.4)
    if backend != "ort-cuda":
        yield Step("codelet.rounds", backend, "correctness.rounds", 0.2)
    yield _verify("codelet", backend)


def _attention(pair: str, backend: str) -> Iterator[Step]:
    yield _build(pair, backend)
    yield _verify(pair, backend)
    yield _timed(pair, "passes", backend)


def _head(backend: str) -> Iterator[Step]:
    yield _build(HEAD, backend)
    yield Step(f"{HEAD}.logits", backend, "correctness.head", 0.3)
    yield _verify(HEAD, backend)


def _grown(size: str, precision: str) -> Iterator[Step]:
    named, minutes = {"size": size}, 0.4 if size == "1B" else 4
    yield Step(f"{size}.export", "", "building.export", 0.3, needs_gpu=False, options=named)
    yield Step(f"{size}.grow", "", "building.grow", minutes, goal=True, options=named)
    for backend in _running(precision):
        yield from _target(size, precision, backend, goal=True)


def _running(precision: str) -> list[str]:
    """Return the backends that run a precision."""
    return [name for name in BACKENDS if (precision, name) != ("fp8", "ort-cuda")]


def _build(pair: str, backend: str) -> Step:
    # TensorRT chooses kernels by timing them on the GPU; the others build anywhere.
    needs_gpu, named = backend == "tensorrt", {"pair": pair}
    return Step(f"{pair}.build", backend, "building.bundle", 0.5, needs_gpu, options=named)


def _verify(pair: str, backend: str) -> Step:
    return Step(f"{pair}.verify", backend, "correctness.verify", 0.5, options={"pair": pair})


def _timed(pair: str, name: str, backend: str) -> Step:
    named = {"size": pair, "precision": "fp16"}
    return Step(f"{pair}.{name}", backend, f"speed.{name}", 0.5, options=named)


def _target(size: str, precision: str, backend: str, goal: bool = False) -> Iterator[Step]:
    step = partial(Step, goal=goal, options={"size": size, "precision": precision})
    name, factor = f"{size}-{precision}", 1 if size == "1B" else 4
    yield step(f"{name}.build", backend, "building.target", 0.8 * factor)
    yield step(f"{name}.speed", backend, "speed.speed", 0.6 * factor)


def _passes(size: str, precision: str, backend: str) -> Iterator[Step]:
    step = partial(Step, minutes=0.2 if size == "1B" else 0.6)
    named, name = {"size": size, "precision": precision}, f"{size}-{precision}"
    yield step(f"{name}.logits", backend, "correctness.grown_logits", options=named)
    yield step(f"{name}.passes", backend, "speed.passes", options=named)


Launch = Callable[[Step, float], Outcome]
"""Runs a step for at most so many seconds."""
Known = Mapping[str, Mapping[str, Any]]
"""What is known of steps, by their keys, as `Results` keeps it."""


def run_steps(
    chosen: Sequence[Step], results: Results, launch: Launch, *, minutes: float,
    resume: bool = False, ended: Callable[[Outcome], None] = lambda outcome: None,
    clock: Callable[[], float] = time.monotonic,
) -> None:  # fmt: skip
    """Run steps in their order within a number of minutes, and write each outcome at once.

    A step that is expected to take longer than what is left is not begun, and what hangs leaves the
    goals of the order their time. With `resume` what ended well before is not run again.
    """
    began = clock()
    for number, step in enumerate(chosen):
        known: Known = results.read()["steps"]
        left = minutes - (clock() - began) / 60
        free = left - _reserved(chosen[number + 1 :], known)
        if resume and not step.again and known.get(step.key, {}).get("status") == OK:
            outcome = results.outcome(step.key)
        elif reason := blocked(step, known):
            outcome = results.put(Outcome(step.key, NOT_RUN, reason))
        elif (left if step.goal else free) < step.minutes:
            facts = {"minutes_needed": step.minutes, "minutes_left": round(max(left, 0), 1)}
            outcome = results.put(Outcome(step.key, NOT_RUN, NO_TIME, facts=facts))
        else:
            outcome = launch(step, 60 * min(max(free, step.minutes), step.limit_minutes))
        ended(outcome)


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
    for way in WAYS[step.backend][: WAYS[step.backend].index(step.way)]:
        entry = known.get(f"open.{way}@{step.backend}", {})
        if entry.get("status") == OK:
            return f"{way} works"
        if lacks := entry.get("facts", {}).get("lacks"):
            return str(lacks)
    if step.way[0].isdigit() and capability and float(step.way) > float(capability):
        return f"this GPU has capability {capability}"
    return ""
