"""A run keeps what it found whatever happens to a step, and ends with what its minutes are for."""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gpucheck import supervisor
from gpucheck.conclusion import summary
from gpucheck.correctness import opens
from gpucheck.evidence import FAILED, NOT_RUN, OK, Evidence, NotRunError, Outcome, Results, plain
from gpucheck.orders import BACKENDS, INVENTORY, LONG, SHORT, Step, run_order, steps, working_way
from gpucheck.settings import ROOT, SCRIPT, SIZES, RunSettings, environment
from gpucheck.supervisor import command, report, supervise
from gpucheck.workbench import Workbench

from gpu.gpu_double import GpuDouble
from shared import nightly_but
from specrt.engine.tensorrt.plan import NO_SUCH_GPU
from specrt.errors import EngineError

ALIKE = ["codelet.*@tensorrt-rtx", "*B-*@tensorrt", "8B*"]
"""Steps that are as others on doubles, where both TensorRT libraries and all sizes are one."""


class PanicError(BaseException):
    """What a library of another language may raise."""


@dataclass
class Forked:
    """A child forked from the test's process; time leaps once it says that it hangs."""

    pid: int
    hangs: Path = Path("nowhere")
    stop: BaseException | None = None
    leaps: list[float] = field(default_factory=lambda: [1e6])
    now: float = 0.0
    code: int | None = None

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        while (code := self.poll()) is None:
            if self.leaps and self.hangs.exists():
                self.now += self.leaps.pop(0)
                raise self.stop or subprocess.TimeoutExpired("forked", 0)
            time.sleep(0.001)
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


def supervised(results: Results, key: str, work: Callable[[], None], **child: Any) -> Outcome:
    """Supervise work in a forked child."""
    children: list[Forked] = []

    def start(log: Path) -> Forked:
        children.append(Forked(fork(work), **child))
        return children[0]

    with suppress(KeyboardInterrupt):
        supervise(results, key, start, 600, lambda: children[0].now if children else 0.0)
    assert children[0].code is not None, "the child has ended"
    outcome = results.outcome(key)
    assert outcome is not None
    return outcome


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

    different = [step for step in steps(double.settings) if not step.matches(ALIKE)]
    outcomes = run_order(different, results, launch, minutes=LONG)
    ended = {outcome.key: outcome for outcome in outcomes}
    wrong = [(o.key, o.reason) for o in ended.values() if o.status != OK]
    assert all("works" in reason for _, reason in wrong), wrong
    assert all(outcome.facts for outcome in ended.values() if outcome.status == OK)
    timed = {key for key, outcome in ended.items() if "device_ms" in outcome.facts}
    assert timed == {
        "codelet.passes@tensorrt", "1B-fp16.passes@tensorrt-rtx", "grouped.passes@tensorrt-rtx",
        "lengths.passes@tensorrt-rtx",
    }, "on the device"  # fmt: skip
    assert "device_round_ms" in ended["codelet.speed@tensorrt"].facts
    end = summary(outcomes, results.read(), results.path).rpartition("tokens per second")[2]
    assert "1B-fp16.speed@ort-cuda" in end


def hang(hangs: Path) -> None:
    hangs.touch()
    time.sleep(30)


def fail(hangs: Path) -> None:
    raise OSError("a cable\nwas pulled")


def panic(hangs: Path) -> None:
    raise PanicError("index out of bounds")


def die_writing(hangs: Path) -> None:
    """End while the next fact is written, as where the system is short of memory."""
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[Callable[[Path], None], str] = {
    fail: "OSError: a cable was pulled",
    panic: "PanicError: index out of bounds",
    lambda hangs: os._exit(3): "ended with 3",
    die_writing: "ended by SIGKILL",
    hang: "stopped at its limit of 600 s",
}


@pytest.mark.parametrize(
    ("end", "said"),
    nightly_but([(hang, ENDS[hang])], ENDS.items()),
    ids=map(str, range(len(ENDS))),
)
def test_every_step_that_ends_early_leaves_all_facts_found_before(
    double: GpuDouble, tmp_path: Path, end: Callable[[Path], None], said: str
) -> None:
    results, found, hangs = Results(tmp_path / "x.json"), tmp_path / "found", tmp_path / "hangs"
    expected: dict[str, Any] = {}
    every = steps(replace(double.settings, sizes=SIZES))
    for step in (step for step in every if not step.matches(ALIKE)):

        def work(evidence: Evidence, step: Step = step) -> None:
            """End early at one of the first facts, or when all are found."""
            left, save = 1 + zlib.crc32(step.key.encode()) % 5, evidence.save

            def saved() -> None:
                nonlocal left
                save()
                found.write_text(json.dumps(plain(evidence.facts)))
                left -= 1
                if not left:
                    end(hangs)

            evidence.save = saved
            step.run(double, step.backend, evidence)
            end(hangs)

        found.write_text("{}")
        hangs.unlink(missing_ok=True)
        outcome = supervised(
            results, step.key, partial(report, results, step.key, work), hangs=hangs
        )
        assert (outcome.status, outcome.key) == (FAILED, step.key)
        assert said in outcome.reason
        expected[step.key] = json.loads(found.read_text())
        assert outcome.facts == expected[step.key]
    assert {key: entry["facts"] for key, entry in results.read()["steps"].items()} == expected
    assert sum(map(bool, expected.values())) > len(expected) / 2


def test_a_process_that_hangs_when_all_is_told_or_never_starts_is_not_waited_for(
    tmp_path: Path,
) -> None:
    results, hangs = Results(tmp_path / "x.json"), tmp_path / "hangs"

    def found(evidence: Evidence) -> None:
        evidence.add(found=1)

    def child() -> None:
        report(results, "a", found)
        hang(hangs)

    outcome = supervised(results, "a", child, hangs=hangs, leaps=[1.0, 60.0])
    assert (outcome.status, outcome.seconds, outcome.facts) == (FAILED, 61, {"found": 1})
    assert "after its checks passed" in outcome.reason

    def interrupted(evidence: Evidence) -> None:
        found(evidence)
        hang(hangs)

    hangs.unlink()
    child = partial(report, results, "a", interrupted)  # type: ignore[assignment]
    outcome = supervised(results, "a", child, hangs=hangs, stop=KeyboardInterrupt())
    assert (outcome.reason, outcome.facts) == ("interrupted", {"found": 1})
    outcome = supervise(results, "b", command(["/no/such/program"], {}), 600)
    assert "could not be started" in outcome.reason


Fate = Callable[[Step], str]


@dataclass
class Machine:
    """Runs steps by a clock of its own; a fate is how a step ends: a status, or that it hangs."""

    results: Results
    fate: Fate = lambda step: OK
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
        ended = run_order(
            steps(settings), self.results, self.launch, minutes=minutes, clock=lambda: self.now,
            **more,
        )  # fmt: skip
        return {outcome.key: outcome for outcome in ended}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return Machine(Results(tmp_path / "x.json"))


def speeds(size: str, ended: dict[str, Outcome]) -> list[str]:
    keys = [f"{size}-fp16.speed@{backend}" for backend in BACKENDS]
    return [key for key in keys if ended[key].status == OK]


@pytest.mark.parametrize(
    "hanging",
    [[], ["inventory", "bandwidth"], ["open.*@ort-cuda"], ["open.*@tensorrt-rtx", "codelet.*"],
     ["*@tensorrt"]],
)  # fmt: skip
@pytest.mark.parametrize(("minutes", "size"), [(SHORT, "1B"), (LONG, "8B")])
def test_an_order_ends_with_its_tokens_per_second_whatever_hangs(
    machine: Machine, minutes: float, size: str, hanging: list[str]
) -> None:
    machine.fate = lambda step: "hangs" if hanging and step.matches(hanging) else OK
    ended = machine.run(minutes)
    assert speeds(size, ended)
    assert machine.now <= 60 * minutes + 1e-6
    assert {outcome.reason for outcome in ended.values() if outcome.status == NOT_RUN} >= {
        "too little was left of --minutes"
    }


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
    built = Workbench(settings).build_probe("tensorrt-rtx", way, Evidence())
    assert built.record.capabilities == ("8.9",)


def test_a_gpu_that_a_library_knows_nothing_of_is_said_once(
    double: GpuDouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusal = EngineError(f"no engine.plan: TensorRT-RTX {NO_SUCH_GPU}, and more")
    monkeypatch.setattr(double, "build_probe", Mock(side_effect=refusal))
    evidence, results = Evidence(), Results(tmp_path / "x.json")
    with pytest.raises(NotRunError, match=r"runs on no GPU of capability 8\.9, as Double") as told:
        opens(double, "tensorrt-rtx", evidence, "any")
    refused = Outcome("open.any@tensorrt-rtx", NOT_RUN, str(told.value), facts=evidence.facts)
    results.put(refused)
    chosen = [s for s in steps(RunSettings()) if s.needs_gpu and s.backend == "tensorrt-rtx"]
    ended = run_order(chosen[1:], results, pytest.fail, minutes=1e6)  # type: ignore[arg-type]
    assert {outcome.reason for outcome in ended} == {refused.reason}
    lines = summary([refused, *ended], results.read(), tmp_path).splitlines()
    assert sum("runs on no GPU" in line for line in lines) == 1


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


def test_no_fact_is_lost_for_its_type_or_to_a_slice_beside(tmp_path: Path) -> None:
    results = Results(tmp_path / "x.json")
    facts = {
        "n": np.int64(3), "p": Path("x"), "s": {1}, "a": np.ones(2), "nan": np.float32("nan"),
        (1, 2): float("inf"),
    }  # fmt: skip
    results.put(Outcome("kept", OK, facts=facts))  # type: ignore[arg-type]
    results.put(Outcome("kept", NOT_RUN, "no time"))

    def slice_of(name: str) -> Callable[[], None]:
        return lambda: [results.put(Outcome(f"{name}{i}", OK)) for i in range(20)] and None

    children = [Forked(fork(slice_of(name))) for name in "ab"]
    assert [child.wait() for child in children] == [0, 0]
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
            assert "no GPU" in found["bandwidth"]["reason"]
            assert "bandwidth not run: no GPU" in capsys.readouterr().out
        with pytest.raises(SystemExit, match="2"):
            main(["--work", str(tmp_path), "--only", INVENTORY, "--out", str(foreign)])
        assert "is not JSON" in capsys.readouterr().err
        assert foreign.read_text() == "words"
        stop = partial(os.kill, os.getpid(), signal.SIGTERM)
        monkeypatch.setitem(main.__globals__, "run_order", lambda *_, **__: stop())
        assert main(given) == 130
        assert f"results: {out}" in capsys.readouterr().out
    finally:
        signal.signal(signal.SIGTERM, before)
