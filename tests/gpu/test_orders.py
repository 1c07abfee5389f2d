"""A run keeps what it found whatever happens to a step, within its minutes."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gpucheck import supervisor
from gpucheck.conclusion import summary
from gpucheck.evidence import FAILED, NOT_RUN, OK, Evidence, Outcome, Results
from gpucheck.orders import BACKENDS, INVENTORY, Step, run_order, steps
from gpucheck.settings import SCRIPT, RunSettings
from gpucheck.supervisor import report, supervise

from gpu.gpu_double import GpuDouble

TIME_OUT = subprocess.TimeoutExpired("forked", 600)


@dataclass
class Forked:
    """A child forked from the test's process; its time is up as soon as it says that it hangs."""

    pid: int
    hangs: Path = Path("nowhere")
    stop: BaseException = TIME_OUT
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            if timeout is not None and self.hangs.exists():
                self.hangs.unlink()
                raise self.stop
            time.sleep(0.002)
        return code


def fork(work: Callable[[], None]) -> int:
    """Run work in a child, which leads a process group of its own as those of a run do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child runs nothing but this thread
        pid = os.fork()
    os.setpgid(pid, pid or os.getpid())  # here and there: whoever comes first
    if not pid:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def test_every_step_finds_something(
    double: GpuDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "end_with_parent", lambda: None)
    results = Results(tmp_path / "x.json")

    def launch(step: Step, seconds: float) -> Outcome:
        report(results, step.key, partial(step.run, double, step.backend))
        outcome = results.outcome(step.key)
        assert outcome is not None
        return outcome

    alike = ["*@tensorrt-rtx", "1B-*@tensorrt"]  # on doubles both libraries are one
    different = [step for step in steps(double.settings) if not step.matches(alike)]
    ended = {outcome.key: outcome for outcome in run_order(different, results, launch)}
    assert [(o.key, o.status, o.reason) for o in ended.values() if o.status != OK] == []
    assert all(outcome.facts for outcome in ended.values())
    timed = {key for key, outcome in ended.items() if "device_ms" in outcome.facts}
    assert timed == {"codelet.passes@tensorrt"}, "captured passes are timed on the device"
    assert "device_round_ms" in ended["codelet.speed@tensorrt"].facts


def hang(hangs: Path) -> None:
    hangs.touch()
    time.sleep(600)


def fail(hangs: Path) -> None:
    raise OSError("a cable\nwas pulled")


@pytest.mark.parametrize(
    ("end", "stop", "code", "reason"),
    [
        (hang, TIME_OUT, -signal.SIGKILL, "stopped at its limit"),
        (hang, KeyboardInterrupt(), 1, "interrupted"),
        (fail, TIME_OUT, 0, "OSError: a cable was pulled"),
        (lambda hangs: os._exit(3), TIME_OUT, 3, "ended with 3"),
        (lambda hangs: os.kill(os.getpid(), 9), TIME_OUT, -signal.SIGKILL, "ended by SIGKILL"),
    ],
)
def test_a_step_whose_process_ends_early_keeps_its_facts(
    tmp_path: Path, end: Callable[[Path], None], stop: BaseException, code: int, reason: str
) -> None:
    results, children = Results(tmp_path / "x.json"), []

    def step(evidence: Evidence) -> None:
        evidence.add(found=1)
        end(tmp_path / "hangs")

    def start(log: Path) -> Forked:
        child = Forked(fork(lambda: report(results, "a", step)), tmp_path / "hangs", stop)
        children.append(child)
        return child

    with suppress(KeyboardInterrupt):
        supervise(results, "a", start, 600)
    outcome = results.outcome("a")
    assert outcome is not None
    assert (outcome.status, outcome.facts, children[0].code) == (FAILED, {"found": 1}, code)
    assert reason in outcome.reason


@pytest.mark.parametrize(("minutes", "slow"), [(0.1, 1), (10, 0.3), (10, 6)])
def test_no_step_begins_that_is_not_done_by_its_minutes_or_lacks_its_library(
    tmp_path: Path, minutes: float, slow: float
) -> None:
    now = 0.0

    def launch(step: Step, seconds: float) -> Outcome:
        nonlocal now
        assert 60 * step.minutes <= seconds <= 60 * minutes - now + 1e-6
        now += min(60 * step.minutes * slow, seconds)
        return Outcome(step.key, FAILED if step.key == "bandwidth" else OK)

    results = Results(tmp_path / "machine.json")
    lacks = {name: "no library" if name == "tensorrt" else "" for name in BACKENDS}
    results.put(Outcome(INVENTORY, OK, facts={"problem": "", "backends": lacks}))
    every = steps(RunSettings())
    ended = run_order(every, results, launch, minutes=minutes, clock=lambda: now)
    assert now <= 60 * minutes + 1e-6
    assert [outcome.key for outcome in ended] == [step.key for step in every]
    assert any(outcome.status == OK for outcome in ended) == (minutes > 1)
    assert any("--minutes" in outcome.reason for outcome in ended) or minutes * slow < 10
    without = [outcome for outcome in ended if outcome.key.endswith("@tensorrt")]
    assert {(outcome.status, outcome.reason) for outcome in without} == {(NOT_RUN, "no library")}
    assert "no library" in summary(ended, results.read(), results.path)


def test_slices_side_by_side_lose_nothing(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.json")
    facts = {"n": np.int64(3), "p": Path("x"), "s": {1}}  # not all of them known to JSON
    results.put(Outcome("kept", OK, facts=facts))
    results.put(Outcome("kept", NOT_RUN, "no time"))

    def slice_of(name: str) -> Callable[[], None]:
        return lambda: [results.put(Outcome(f"{name}{i}", OK)) for i in range(20)] and None

    children = [Forked(fork(slice_of(name))) for name in "ab"]
    assert [child.wait() for child in children] == [0, 0]
    assert len(results.read()["steps"]) == 41
    assert results.outcome("kept") == Outcome("kept", OK, facts={"n": 3, "p": "x", "s": "{1}"})


def test_the_script_on_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(SCRIPT / "__main__.py"))["main"]
    out, foreign = tmp_path / "x.json", tmp_path / "y"
    foreign.write_text("words")
    assert main(["--work", str(tmp_path), "--out", str(out), "--only", "bandwidth"]) == 0
    found = json.loads(out.read_text())["steps"]
    machine = found[INVENTORY]["facts"]
    assert machine["versions"]["numpy"]
    assert machine["backends"].keys() == set(BACKENDS)
    if machine["problem"]:
        assert "no GPU" in found["bandwidth"]["reason"]
        assert "bandwidth not run: no GPU" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["--work", str(tmp_path), "--only", INVENTORY, "--out", str(foreign)])
    assert "is not JSON" in capsys.readouterr().err
    assert foreign.read_text() == "words"
