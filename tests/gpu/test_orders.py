"""A run keeps what it found whatever happens to a step, within its minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forked import fork
from gpu_double import GpuDouble
from gpucheck.conclusion import figures, summary
from gpucheck.evidence import FAILED, NOT_RUN, OK, Evidence, Outcome, Results
from gpucheck.orders import BACKENDS, INVENTORY, Step, run_order, steps
from gpucheck.settings import SCRIPT, RunSettings
from gpucheck.supervisor import report, supervise

Fail = Callable[[Path], None]


def nothing(hangs: Path) -> None:
    """Let the step go on."""


def exception(hangs: Path) -> None:
    raise OSError("a cable\nwas pulled")


def time_out(hangs: Path) -> None:
    hangs.touch()
    time.sleep(600)


def non_zero(hangs: Path) -> None:
    os._exit(3)


def killed(hangs: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


REASONS = {
    exception: "OSError: a cable was pulled", time_out: "stopped at its limit",
    non_zero: "ended with 3", killed: "ended by SIGKILL",
}  # fmt: skip


def different(double: GpuDouble) -> list[Step]:
    """Return the steps whose work differs; on doubles both TensorRT libraries are one."""
    alike = ["*@tensorrt-rtx", "1B-*@tensorrt"]
    return [step for step in steps(double.settings) if not step.matches(alike)]


def walk(
    double: GpuDouble, results: Results, fails: dict[str, tuple[Fail, int]]
) -> dict[str, list[dict[str, Any]]]:
    """Run every step in a child, some of which fail at some fact.

    Returns the facts of each step after each time that it added some.
    """
    folder = double.settings.work
    marks = {step.key: folder / f"{number}" for number, step in enumerate(different(double))}

    def launch(step: Step, seconds: float) -> Outcome:
        mark, hangs = marks[step.key], folder / f"{marks[step.key].name}.hangs"
        mark.write_text("")
        fail, last = fails.get(step.key, (nothing, 0))

        def work(evidence: Evidence) -> None:
            save, pid = evidence.save, os.getpid()

            def saved() -> None:
                save()
                with mark.open("a") as file:
                    file.write(json.dumps(evidence.facts, default=str) + "\n")
                if os.getpid() == pid and mark.read_text().count("\n") == last:
                    fail(hangs)

            evidence.save = saved
            step.run(double, step.backend, evidence)

        child = lambda log: fork(lambda: report(results, step.key, work), hangs)  # noqa: E731
        return supervise(results, step.key, child, seconds)

    run_order(different(double), results, launch)
    return {key: [json.loads(line) for line in m.read_text().splitlines()]
            for key, m in marks.items() if m.exists()}  # fmt: skip


def test_every_step_keeps_its_facts_when_it_fails_and_stops_no_other(
    double: GpuDouble, tmp_path: Path
) -> None:
    """Each step fails in one of the ways, halfway through its facts."""
    every = [step.key for step in different(double)]
    results = Results(tmp_path / "whole.json")
    whole = walk(double, results, {})
    assert {
        key: (o["status"], o["reason"]) for key, o in results.read()["steps"].items()
    } == dict.fromkeys(every, (OK, ""))
    assert min(map(len, whole.values())) > 0, "every step finds something"
    timed = {key for key, facts in whole.items() if "device_ms" in facts[-1]}
    assert timed == {"codelet.passes@tensorrt"}, "captured passes are timed on the device"
    assert "device_round_ms" in whole["codelet.speed@tensorrt"][-1]
    ways = list(REASONS)
    fails = {
        key: (ways[number % len(ways)], (len(whole[key]) + 1) // 2)
        for number, key in enumerate(every)
    }
    results = Results(tmp_path / "failed.json")
    found = walk(double, results, fails)
    kept = results.read()["steps"]
    assert list(kept) == every
    for key, (fail, half) in fails.items():
        assert kept[key]["facts"] == found[key][-1], (fail, key)
        # Of independent checks in one step, those after an exception are run as well.
        more = fail is exception and key.startswith("codelet.engine")
        assert more or len(found[key]) == half, (fail, key)
        assert kept[key]["status"] == FAILED
        assert REASONS[fail] in kept[key]["reason"]
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Results]:
    """Returns the results of a machine's inventory: what each backend lacks."""

    def make(**lacks: str) -> Results:
        results = Results(tmp_path / "machine.json")
        backends = {name: lacks.get(name.replace("-", "_"), "") for name in BACKENDS}
        results.put(Outcome(INVENTORY, OK, facts={"problem": "", "backends": backends}))
        return results

    return make


@pytest.mark.parametrize("minutes", [0.1, 10, 30])
@pytest.mark.parametrize("slow", [0.3, 6])
def test_no_step_begins_that_is_not_done_by_its_minutes(
    machine: Callable[..., Results], minutes: float, slow: float
) -> None:
    now = 0.0

    def launch(step: Step, seconds: float) -> Outcome:
        nonlocal now
        assert 60 * step.minutes <= seconds <= 60 * minutes - now + 1e-6
        now += min(60 * step.minutes * slow, seconds)
        return Outcome(step.key, OK)

    every = steps(RunSettings())
    ended = run_order(every, machine(), launch, minutes=minutes, clock=lambda: now)
    assert now <= 60 * minutes + 1e-6
    status = [outcome.status for outcome in ended]
    assert len(status) == len(every)
    assert (OK in status) == (minutes > 1)
    assert NOT_RUN in status or minutes * slow < 10


def test_what_the_machine_lacks_is_not_run_and_says_why(machine: Callable[..., Results]) -> None:
    results = machine(tensorrt="no library")
    chosen = [s for s in steps(RunSettings()) if s.matches(["codelet.logits*"])]
    ended = run_order(chosen, results, lambda step, seconds: Outcome(step.key, OK))
    found = {outcome.key: (outcome.status, outcome.reason) for outcome in ended}
    assert found["codelet.logits@ort-cuda"] == (OK, "")
    assert found["codelet.logits@tensorrt"] == (NOT_RUN, "no library")
    assert "no library" in summary(ended, results.read(), results.path)


def test_slices_side_by_side_lose_nothing(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.json")
    facts = {"n": np.int64(3), "p": Path("x"), "s": {1}}  # not all of them known to JSON
    results.put(Outcome("kept", OK, facts=facts))
    results.put(Outcome("kept", NOT_RUN, "no time"))

    def slice_of(name: str) -> Callable[[], None]:
        return lambda: [results.put(Outcome(f"{name}{i}", OK)) for i in range(20)] and None

    children = [fork(slice_of(name)) for name in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    assert len(results.read()["steps"]) == 41
    assert results.outcome("kept") == Outcome("kept", OK, facts={"n": 3, "p": "x", "s": "{1}"})


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        (["--minutes", "nan"], "--minutes: nan"), (["--only", "codelet.verfy"], "codelet.verfy"),
        (["--only", INVENTORY, "--out", "{}"], "names another"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(tmp_path: Path, given_: list[str], said: str) -> None:
    foreign = tmp_path / "y"
    foreign.write_text("words")
    done = run_script("--work", str(tmp_path), *(a.format(foreign) for a in given_))
    expected = "is not JSON" if said == "names another" else said
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert expected in done.stderr
    assert foreign.read_text() == "words"


def test_the_script_on_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    done = run_script("--work", str(tmp_path), "--out", str(out), "--only", "bandwidth")
    steps_ = json.loads(out.read_text())["steps"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_[INVENTORY]["facts"]["versions"]["numpy"]
    assert steps_[INVENTORY]["facts"]["backends"].keys() == set(BACKENDS)
    if steps_[INVENTORY]["facts"]["problem"]:
        assert "no GPU" in steps_["bandwidth"]["reason"]
        assert "bandwidth not run: no GPU" in done.stdout


def test_ctrl_c_ends_the_step_and_keeps_its_facts(tmp_path: Path) -> None:
    results, mark = Results(tmp_path / "x.json"), tmp_path / "pid"

    def step(evidence: Evidence) -> None:
        evidence.add(found=1)
        mark.write_text(str(os.getpid()))
        time.sleep(600)

    def run() -> None:
        try:
            supervise(results, "a", lambda log: fork(lambda: report(results, "a", step)), 600)
        except KeyboardInterrupt:
            os._exit(130)

    running = fork(run)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.01)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert results.facts("a") == {"found": 1}
    assert results.outcome("a") == replace(results.outcome("a"), status=FAILED)  # type: ignore[type-var]


def test_figures_are_those_of_the_8b_target() -> None:
    rate = {"tokens_per_second": 200.0, "speedup": 1.0, "round_us": 5000.0, "outside_share": 0.01}
    passes = {"bound_ms": 4.0, "device_verify_over_decode": {"1": 1.0, "5": 1.2}}
    speed = {"0": rate, "4": {**rate, "speedup": 2.6}, "device_round_ms": {"4": {"median": 4.9}}}
    found = figures({
        "8B-fp16.passes@ort-cuda": {"status": OK, "facts": passes},
        "8B-fp16.speed@ort-cuda": {"status": OK, "facts": speed},
    })  # fmt: skip
    assert [(f.value, f.met) for f in found] == [
        (0.8, True), (1.2, False), (0.02, True), (2.6, True)
    ]  # fmt: skip
    assert {f.met for f in figures({})} == {None}
