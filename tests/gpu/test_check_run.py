"""Steps run apart from each other, in slices, within their time, and into one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpucheck import run
from gpucheck.place import HERE, Place
from gpucheck.probe import verdict
from gpucheck.results import add, read_results, slug
from gpucheck.run import NO_TIME, Backends, apart, perform, run_all
from gpucheck.step import CheckError, NotRunError, Outcome, Step
from gpucheck.steps import steps
from gpucheck.wanted import figures

from specrt.system.gpu import Gpu, Survey

SCRIPT = HERE / "check.py"


def step(name: str, **options: Any) -> Step:
    return Step(name, "", lambda place, backend: {}, **{"needs_gpu": False, **options})


def outcome(name: str, status: str = "ok", backend: str = "", **facts: Any) -> Outcome:
    return Outcome(name, backend, status, "" if status == "ok" else "why", 1.0, "now", facts)


def raising(error: BaseException) -> Step:
    def fail(place: Place, backend: str) -> dict[str, Any]:
        raise error

    return Step("one", "", fail, needs_gpu=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NotRunError("no room"), "not run"),
        (CheckError("off", {"by": 1}), "failed"),
        (ValueError("a\nb"), "failed"),
        (MemoryError(), "failed"),
    ],
)
def test_whatever_a_step_raises_is_its_outcome(
    place: Place, error: BaseException, status: str
) -> None:
    done = perform(raising(error), place)
    assert done["status"] == status
    assert done["facts"] == ({"by": 1} if isinstance(error, CheckError) else {})
    assert "\n" not in done["reason"]


CHILD = """
import json, os, signal, sys, time
from pathlib import Path
what, answer = sys.argv[-2], Path(sys.argv[-1])
if what == "crashes": os.kill(os.getpid(), signal.SIGSEGV)
if what == "hangs": time.sleep(60)
if what == "ends": print("so it goes"); sys.exit(3)
answer.write_text(json.dumps({"status": "ok", "reason": "", "facts": {"argv": sys.argv[1:-3]}}))
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(run, "SCRIPT", script)


@pytest.mark.parametrize(
    ("what", "said"),
    [("crashes", "ended by SIGSEGV"), ("hangs", "time was up"), ("ends", "with 3; so it goes")],
)
def test_a_step_that_crashes_or_hangs_ends_itself_alone(child: None, what: str, said: str) -> None:
    began = time.monotonic()
    done = apart(step(what), [], 5 if what != "hangs" else 1)
    assert time.monotonic() - began < 30
    assert (done.status, said in done.reason) == ("failed", True), done.reason


def test_the_rest_is_run_after_a_failure(child: None, place: Place) -> None:
    told: list[str] = []

    def begun(step: Step) -> None:
        told.append(step.key)

    def note(done: Outcome) -> dict[str, Any]:
        told.append(f"{done.step} {done.status}")
        return {}

    done = run_all([step("crashes"), step("fine")], ["--laps", "3"], None, place, note, begun)
    assert told == ["crashes", "crashes failed", "fine", "fine ok"]
    assert done[1].facts == {"argv": ["--laps", "3"]}


def test_no_step_is_begun_without_time_for_it(child: None, place: Place) -> None:
    asked = [step("long", minutes=5), step("short", minutes=0.1)]
    begun: list[Step] = []
    long, short = run_all(asked, [], 1, place, lambda done: {}, begun.append)
    assert (long.status, short.status) == ("not run", "ok")
    assert (long.reason, long.facts["minutes_needed"]) == (NO_TIME, 5)
    assert begun == asked[1:]


class Seen(Place):
    """A place with a GPU that is not there."""

    found = Survey(gpus=(Gpu(0, "NVIDIA H200", "9.0"),))


def test_what_the_probe_found_decides_about_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "why_not", lambda backend, found: "")
    backends = Backends(Seen())
    probe = {"gpu": ["NVIDIA H200"], "default": {"ended": "deserialize: refused"}}
    assert backends.why_not("tensorrt-rtx") == ""
    for ways, left_out in (([], True), (["SM89"], True), (["default"], False)):
        backends.known = {"probe@tensorrt-rtx": {"facts": {**probe, "ways_that_run": ways}}}
        assert ("deserialize: refused" in backends.why_not("tensorrt-rtx")) is left_out
    assert backends.why_not("ort-cuda") == ""
    assert verdict({}, "tensorrt-rtx") == ""
    other = Backends(replace(Seen(), capabilities=("8.9",)))
    other.known = {"probe@tensorrt-rtx": {"facts": {**probe, "ways_that_run": ["SM89"]}}}
    assert other.why_not("tensorrt-rtx") == ""


def test_without_a_gpu_what_needs_one_is_not_run(place: Place) -> None:
    if place.has_gpu:
        pytest.skip("there is a GPU")
    begun: list[Step] = []
    asked = [step("one", needs_gpu=True)]
    (done,) = run_all(asked, [], None, place, lambda done: {}, begun.append)
    assert (done.status, done.reason.startswith("no GPU (")) == ("not run", True)
    assert begun == []


def test_steps_have_names_of_their_own_and_the_telling_ones_first() -> None:
    keys = [one.key for one in steps(Place())]
    assert len(set(keys)) == len(keys)
    order = [
        "bandwidth", "probe@tensorrt-rtx", "codelet.verify@tensorrt", "1B-fp16.bench@tensorrt",
        "8B-fp16.bench@tensorrt", "filled.measure@tensorrt", "8B-int8.bench@tensorrt",
    ]  # fmt: skip
    assert sorted(order, key=keys.index) == order
    assert "8B-fp8.build@ort-cuda" not in keys
    assert steps(Place())[0].asked(["env*"])
    assert not steps(Place())[0].asked(["codelet.*"])


def test_slices_are_merged_and_nothing_that_ran_is_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    add(out, [outcome("a", x=1), outcome("b", "failed", "ort-cuda")], {"command": "1"})
    data = add(out, [outcome("a", "not run"), outcome("b", "ok", "ort-cuda"), outcome("c")], {})
    assert {key: one["status"] for key, one in data["steps"].items()} == {
        "a": "ok", "b@ort-cuda": "ok", "c": "ok",
    }  # fmt: skip
    assert data["steps"]["a"]["facts"] == {"x": 1}
    assert read_results(out) == data == {**data, "command": "1"}


def test_slices_side_by_side_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from gpucheck.results import add; from gpucheck.step import Outcome\n"
        "for i in range(20): add(Path(sys.argv[2]), [Outcome(f'{sys.argv[3]}{i}', '', 'ok')], {})"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(HERE), str(out), name]) for name in "ab"
    ]
    assert [one.wait(timeout=60) for one in running] == [0, 0]
    assert len(read_results(out)["steps"]) == 40


@pytest.mark.parametrize(
    ("place", "said"),
    [("none/x.json", "cannot be written"), (".", "cannot be written"), ("y", "is not JSON"),
     ("z", "no results of this script")],
)  # fmt: skip
def test_a_file_that_must_not_be_written_is_refused_before_any_step(
    tmp_path: Path, place: str, said: str
) -> None:
    (tmp_path / "y").write_text("words")
    (tmp_path / "z").write_text('{"format": 1}')
    kept = (tmp_path / "y").read_text()
    command = [sys.executable, str(SCRIPT), "--only", "environment", "--out", str(tmp_path / place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr, done.stdout) == (2, True, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "y").read_text() == kept


def test_a_step_that_is_not_there_is_refused() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "codelet.verfy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no step is called codelet.verfy" in done.stderr


def test_the_script_as_it_is_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [
        sys.executable, str(SCRIPT), "--work", str(tmp_path / "work"), "--out", str(out),
        "--rehearse", "--only", "environment", "backends", "bandwidth", "rehearsal",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    data = json.loads(out.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    assert data["steps"]["environment"]["facts"]["versions"]["numpy"]
    assert data["steps"]["rehearsal"]["facts"]["rounds"]["rounds"] > 0
    assert len(data["figures"]) == 4
    assert "8B fp16 verify pass" in done.stdout
    assert done.stdout.startswith("environment: ok, ")
    if not Place().has_gpu:
        assert done.stdout.count("\nbandwidth") == 1
        assert "\n3 ok, 0 failed, 1 not run\n" in done.stdout
    assert f"results: {out} (" in done.stdout
    assert [p.name for p in tmp_path.iterdir() if "part" in p.name] == []


def test_ctrl_c_leaves_no_step_behind(tmp_path: Path) -> None:
    script, mark = tmp_path / "child.py", tmp_path / "pid"
    script.write_text(f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
                      "time.sleep(60)\n")  # fmt: skip
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from gpucheck import run\n"
        "from pathlib import Path; from gpucheck.step import Step\n"
        f"run.SCRIPT = Path({str(script)!r})\n"
        "run.apart(Step('x', '', None, needs_gpu=False), [], 50)"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    running.wait(timeout=20)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


SPEED = {"tokens_per_second": 200.0, "speedup": 1.0, "round_us": 5000.0, "outside_share": 0.01}
PASSES = {"bound_ms": 4.0, "device_verify_over_decode": {"1": 1.0, "5": 1.1}}


def found(**changes: Any) -> list[Any]:
    bench = {
        "0": SPEED, "4": {**SPEED, "speedup": 2.6}, "auto": {**SPEED, "speedup": 9.0},
        "device_round_ms": {"4": {"median": 4.9}}, **changes,
    }  # fmt: skip
    made = {
        "8B-fp16.passes@ort-cuda": {"status": "ok", "facts": PASSES},
        "8B-fp16.bench@ort-cuda": {"status": "ok", "facts": bench},
    }
    return figures(made)


def test_figures_that_are_wanted() -> None:
    bound, verify, host, speedup = found()
    assert (bound.found, bound.met) == (0.8, True)
    assert (verify.found, verify.met) == (1.1, True)
    assert (host.found, host.met) == (0.02, True)
    assert (speedup.found, speedup.met) == (2.6, True)
    assert {one.backend for one in found()} == {"ort-cuda"}
    slow = found(device_round_ms={"4": {"median": 4.5}})[2]
    assert (slow.found, slow.met) == (0.1, False)
    assert found(device_round_ms={})[2].found == 0.01
    assert [(one.found, one.met) for one in figures({})] == [(None, None)] * 4


def test_names_of_gpus_in_file_names() -> None:
    assert slug("NVIDIA H200") == "h200"
    assert slug("") == "none"
