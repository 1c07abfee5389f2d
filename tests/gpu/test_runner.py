"""A run keeps what it found whatever happens to a step, and ends with what its minutes are for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpucheck import supervisor
from gpucheck.conclusion import summary
from gpucheck.evidence import FAILED, OK, Evidence, Outcome, Results
from gpucheck.settings import SCRIPT, SIZES, RunSettings, environment
from gpucheck.steps import BACKENDS, INVENTORY, LONG, NO_TIME, SHORT, Step, run_steps, steps

from gpu.conftest import BenchDouble

ALIKE = ["codelet.*@tensorrt-rtx", "*B-*@tensorrt", "*.build", "1B.export", "1B.grow"]
"""Steps that are as others on doubles, where both TensorRT libraries are one, or build files."""


def test_every_step_finds_something(double: BenchDouble, tmp_path: Path) -> None:
    results = Results(tmp_path / "x.json")
    for step in steps(double.settings):
        if not step.matches(ALIKE):
            evidence = Evidence()
            step.run(double, evidence)
            assert evidence.facts, step.key
            results.put(Outcome(step.key, OK, facts=evidence.facts))
    found = results.read()["steps"]
    timed = {key for key, entry in found.items() if "device_ms" in entry["facts"]}
    assert timed == {
        "codelet.passes@tensorrt", "1B-fp16.passes@tensorrt-rtx", "grouped.passes@tensorrt-rtx",
        "lengths.passes@tensorrt-rtx",
    }, "on the device"  # fmt: skip
    assert "device_round_ms" in found["codelet.speed@tensorrt"]["facts"]
    end = summary([], found, results.path).rpartition("tokens per second")[2]
    assert "1B-fp16.speed@ort-cuda" in end


CHILD = """
import os, signal, sys, time
from pathlib import Path
from gpucheck.evidence import Results
from gpucheck.supervisor import report

class PanicError(BaseException): pass

def work(evidence):
    evidence.add(found=1)
    {end}

results = Results(Path(sys.argv[1]))
report(results, "a", work)
{after}
"""
ENDS = {
    "raise OSError('a cable\\nwas pulled')": "OSError: a cable was pulled",
    "raise PanicError('out of bounds')": "PanicError: out of bounds",
    "print('last words', flush=True); os._exit(3)": "ended with 3; last words",
    # While the next fact is written, as where the system is short of memory.
    "os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL); evidence.add(lost=1)":
        "ended by SIGKILL",
    "time.sleep(600)": "stopped at its limit of 60 s",
}  # fmt: skip


def supervised(results: Results, end: str, after: str = "") -> Outcome:
    command = [sys.executable, "-c", CHILD.format(end=end, after=after), str(results.path)]
    surroundings = environment(results.path.parent)
    surroundings["PYTHONPATH"] += f"{os.pathsep}{SCRIPT}"
    return supervisor.supervise(results, "a", command, surroundings, 60)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    """Results of children, whose time passes once their first fact is written."""
    made = Results(tmp_path / "x.json")
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 20 * bool(made.read()["steps"].get("a", {}).get("facts"))
        return now

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(supervisor, "LOOK_S", 0.05)
    return made


@pytest.mark.parametrize("end", ENDS)
def test_a_step_that_ends_early_leaves_all_facts_found_before(
    results: Results, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    if "sleep" not in end:  # its end is waited for
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: 0.0))
    outcome = supervised(results, end)
    assert (outcome.status, outcome.facts) == (FAILED, {"found": 1})
    assert ENDS[end] in outcome.reason


@dataclass
class Machine:
    """Runs steps by a clock of its own; a fate is how a step ends: a status, or that it hangs."""

    results: Results
    fate: Callable[[Step], str] = lambda step: OK
    capability: str = "9.0"
    now: float = 0.0
    ran: list[str] = field(default_factory=list)

    def launch(self, step: Step, seconds: float) -> Outcome:
        assert 60 * step.minutes - 1e-6 <= seconds <= 60 * step.limit_minutes
        assert seconds <= 120 or not step.way
        fate = self.fate(step)
        self.now += seconds if fate == "hangs" else 60 * step.minutes
        self.ran.append(step.key)
        facts = {"gpus": [{"capability": self.capability}]} if step.key == INVENTORY else {}
        status = FAILED if fate == "hangs" else fate
        return self.results.put(Outcome(step.key, status, f"{step.key} broke", facts=facts))

    def run(self, minutes: float, **more: Any) -> dict[str, Outcome]:
        settings = RunSettings(sizes=SIZES if minutes >= LONG else SIZES[:1])
        ended: list[Outcome] = []
        run_steps(
            steps(settings), self.results, self.launch, minutes=minutes, clock=lambda: self.now,
            ended=ended.append, **more,
        )  # fmt: skip
        return {outcome.key: outcome for outcome in ended}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return Machine(Results(tmp_path / "x.json"))


@pytest.mark.parametrize(
    ("minutes", "size", "hanging"),
    [
        (LONG, "8B", ["inventory", "bandwidth"]),
        (SHORT, "1B", ["open.*@ort-cuda"]),
        (LONG, "8B", ["open.*@tensorrt-rtx", "codelet.*"]),
        (SHORT, "1B", ["*@tensorrt"]),
    ],
)
def test_a_run_ends_with_its_tokens_per_second_whatever_hangs(
    machine: Machine, minutes: float, size: str, hanging: list[str]
) -> None:
    machine.fate = lambda step: "hangs" if hanging and step.matches(hanging) else OK
    ended = machine.run(minutes)
    assert OK in {ended[f"{size}-fp16.speed@{backend}"].status for backend in BACKENDS}
    assert machine.now <= 60 * minutes + 1e-6
    assert NO_TIME in {outcome.reason for outcome in ended.values()}
