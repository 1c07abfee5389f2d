"""A run keeps what it found whatever happens to a step, and ends with what its minutes are for."""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpucheck import correctness, supervisor
from gpucheck.building import probe
from gpucheck.conclusion import summary
from gpucheck.evidence import FAILED, NOT_RUN, OK, Evidence, NotRunError, Outcome, Results
from gpucheck.settings import ROOT, SCRIPT, SIZES, RunSettings, environment
from gpucheck.steps import (
    BACKENDS,
    INVENTORY,
    LONG,
    NO_TIME,
    SHORT,
    Step,
    run_steps,
    steps,
    working_way,
)
from gpucheck.workbench import Workbench

from gpu.conftest import BenchDouble
from specrt.engine.tensorrt.plan import NO_SUCH_GPU
from specrt.errors import EngineError

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


def test_a_process_that_hangs_when_all_is_told_or_never_starts_is_not_waited_for(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = supervised(results, "pass", "time.sleep(600)")
    assert (outcome.status, outcome.facts) == (FAILED, {"found": 1})
    assert outcome.reason == "after its checks passed, the process did not end"
    command = ["/no/such/program"]
    assert "could not be started" in supervisor.supervise(results, "b", command, {}, 60).reason

    def interrupted() -> float:
        if results.outcome("a").facts:
            monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: 0.0))
            raise KeyboardInterrupt
        return 0.0

    results.path.unlink()
    results.put(Outcome("a", OK))
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=interrupted))
    with pytest.raises(KeyboardInterrupt):
        supervised(results, "time.sleep(600)")
    outcome = results.outcome("a")
    assert (outcome.reason, outcome.facts) == ("interrupted", {"found": 1})


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
    "hanging",
    [[], ["inventory", "bandwidth"], ["open.*@ort-cuda"], ["open.*@tensorrt-rtx", "codelet.*"],
     ["*@tensorrt"]],
)  # fmt: skip
@pytest.mark.parametrize(("minutes", "size"), [(SHORT, "1B"), (LONG, "8B")])
def test_a_run_ends_with_its_tokens_per_second_whatever_hangs(
    machine: Machine, minutes: float, size: str, hanging: list[str]
) -> None:
    machine.fate = lambda step: "hangs" if hanging and step.matches(hanging) else OK
    ended = machine.run(minutes)
    assert OK in {ended[f"{size}-fp16.speed@{backend}"].status for backend in BACKENDS}
    assert machine.now <= 60 * minutes + 1e-6
    assert NO_TIME in {outcome.reason for outcome in ended.values()}


@pytest.mark.parametrize(
    ("failing", "needing"),
    [("inventory", ()), ("bandwidth", ()), ("codelet.build@ort-cuda", ()), ("1B.grow", ()),
     ("open.provider", ("*@ort-cuda",)), ("open.plan", ("*@tensorrt",)), ("open.any", ()),
     ("open.*@tensorrt-rtx", ("*@tensorrt-rtx",))],
)  # fmt: skip
def test_a_step_that_fails_stops_only_those_that_need_it(
    machine: Machine, failing: str, needing: tuple[str, ...]
) -> None:
    machine.fate = lambda step: FAILED if step.matches([failing]) else OK
    ended = machine.run(1e6)
    for step in steps(RunSettings()):
        outcome = ended[step.key]
        if step.matches([failing]) or step.way:
            continue
        stops = bool(needing) and step.needs_gpu and step.matches(needing)
        assert outcome.status == (NOT_RUN if stops else OK), step.key
        assert not stops or "broke" in outcome.reason


def test_the_first_capability_that_works_is_what_plans_are_built_for(
    machine: Machine, tmp_path: Path
) -> None:
    machine.fate = lambda step: NOT_RUN if step.matches(["open.any", "open.current"]) else OK
    ended = machine.run(SHORT)
    ran = [key for key in machine.ran if key.endswith("@tensorrt-rtx")]
    assert ran[:4] == [*(f"open.{w}@tensorrt-rtx" for w in ("any", "current", "8.9")),
                       "codelet.build@tensorrt-rtx"]  # fmt: skip
    assert "capability 9.0" in ended["open.12.0@tensorrt-rtx"].reason
    assert "8.9 works" in ended["open.8.0@tensorrt-rtx"].reason
    way = working_way("tensorrt-rtx", machine.results.read()["steps"])
    settings = RunSettings(work=tmp_path).opened(way)
    assert settings.capabilities == ("8.9",)
    assert RunSettings().opened("any").capabilities == ()
    pytest.importorskip("tensorrt_rtx")
    built = probe(Workbench(settings), "tensorrt-rtx", way, Evidence())
    assert built.record.capabilities == ("8.9",)


def test_a_gpu_that_a_library_knows_nothing_of_is_said_once(
    double: BenchDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise EngineError(f"no engine.plan: TensorRT-RTX {NO_SUCH_GPU}, and more")

    monkeypatch.setattr(correctness, "probe", refuse)
    evidence, results = Evidence(), Results(tmp_path / "x.json")
    with pytest.raises(NotRunError, match=r"runs on no GPU of capability 8\.9, as Double") as told:
        correctness.opens(double, "tensorrt-rtx", evidence, "any")
    ended = [Outcome("open.any@tensorrt-rtx", NOT_RUN, str(told.value), facts=evidence.facts)]
    results.put(ended[0])
    chosen = [s for s in steps(RunSettings()) if s.needs_gpu and s.backend == "tensorrt-rtx"]
    never: Any = pytest.fail
    run_steps(chosen[1:], results, never, minutes=1e6, ended=ended.append)
    lines = summary(ended, results.read()["steps"], tmp_path).splitlines()
    assert sum("not run: tensorrt-rtx runs on no GPU" in line for line in lines) == 1
    assert {outcome.status for outcome in ended} == {NOT_RUN}


def test_numbers_of_every_backend_come_before_any_speed() -> None:
    keys = [step.key for step in steps(RunSettings())]
    numbers = [key for key in keys if key.startswith("codelet.") and ".speed" not in key]
    numbers = [key for key in numbers if ".passes" not in key]
    assert numbers[0].endswith("@ort-cuda")
    assert max(map(keys.index, numbers)) < min(keys.index(k) for k in keys if ".speed" in k)


def test_what_ended_well_is_not_run_again_but_what_leaves_files(machine: Machine) -> None:
    machine.run(SHORT)
    machine.fate = lambda step: OK if step.again else FAILED
    machine.now, machine.ran = 0.0, []
    ended = machine.run(LONG, resume=True)
    assert ended["codelet.logits@ort-cuda"].status == OK
    assert {key.partition("@")[0] for key in machine.ran} >= {INVENTORY, "1B.grow", "8B.grow"}


def test_no_fact_is_lost_for_its_type_or_to_another_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.json")
    facts: Any = {
        "n": np.int64(3), "p": Path("x"), "s": {1}, "a": np.ones(2), "nan": np.float32("nan"),
        (1, 2): float("inf"),
    }  # fmt: skip
    results.put(Outcome("kept", OK, facts=facts))
    results.put(Outcome("kept", NOT_RUN, "no time"))
    code = (
        "import sys; from pathlib import Path; from gpucheck.evidence import *\n"
        "for i in range(20): Results(Path(sys.argv[1])).put(Outcome(f'{sys.argv[2]}{i}', OK))"
    )
    command = [sys.executable, "-c", code, str(results.path)]
    runs = [subprocess.Popen([*command, name], cwd=SCRIPT) for name in "ab"]
    assert [run.wait() for run in runs] == [0, 0]
    text = results.path.read_text()
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len(read["steps"]) == 41
    kept = {"n": 3, "p": "x", "s": [1], "a": [1, 1], "nan": "nan", "(1, 2)": "inf"}
    assert results.outcome("kept") == Outcome("kept", OK, facts=kept)


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, lazily too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield str(node.module)


def test_a_device_needs_no_package_but_those_that_are_carried(tmp_path: Path) -> None:
    """Only exporting does, which other machines can."""
    files = [*(SCRIPT / "gpucheck").glob("*.py"), SCRIPT / "__main__.py"]
    modules = sorted({name for file in files for name in imported(file)})
    modules.remove("specrt_export.portable.exporter")
    lines = (ROOT / "requirements" / "gpu.txt").read_text().splitlines()
    carried = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    carried |= {"onnxruntime", "specrt"}
    away = [
        name for name, owners in packages_distributions().items()
        if not carried & {owner.lower().replace("_", "-") for owner in owners}
    ]  # fmt: skip
    assert "torch" in away
    code = (
        f"import sys, importlib\nfor name in {away}: sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(SCRIPT)!r})\n"
        f"for name in {modules}: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(tmp_path))


def test_the_script_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = runpy.run_path(str(SCRIPT / "__main__.py"))["main"]
    out, foreign = tmp_path / "x.json", tmp_path / "y"
    foreign.write_text("words")
    given = ["--work", str(tmp_path), "--out", str(out), "--only", "bandwidth"]
    assert main.__globals__["parser"]().parse_args([]).minutes == LONG, "there is always a limit"
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("SIGTERM was not taken"))
    try:
        assert main(given) == 0
        found = json.loads(out.read_text())["steps"]
        assert found[INVENTORY]["facts"]["versions"]["numpy"]
        if found[INVENTORY]["facts"]["problem"]:
            assert "bandwidth not run: no GPU" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="2"):
            main(["--work", str(tmp_path), "--only", INVENTORY, "--out", str(foreign)])
        assert "is not JSON" in capsys.readouterr().err
        assert foreign.read_text() == "words"
        stop = partial(os.kill, os.getpid(), signal.SIGTERM)
        monkeypatch.setitem(main.__globals__, "run_steps", lambda *_, **__: stop())
        assert main(given) == 130
        assert f"results: {out}" in capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, before)
