"""What a run says while it runs, at its end, when it is interrupted, and of wrong options."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpucheck.options import parser
from gpucheck.place import HERE, Place
from gpucheck.report import kept, progress, report, taken
from gpucheck.results import add, read_results
from gpucheck.step import Outcome
from gpucheck.steps import steps
from gpucheck.wanted import figures


def outcome(name: str, status: str = "ok", **facts: Any) -> Outcome:
    return Outcome(name, "", status, "" if status == "ok" else "why", 1.0, "now", facts)


def test_a_report_shows_what_this_run_did(tmp_path: Path) -> None:
    out = tmp_path / "x"
    add(out, [outcome("old"), outcome("again"), outcome("late", "not run")], {})
    now = [outcome("a", "failed"), outcome("b", bytes_per_second=4e12)]
    now += [outcome("again", "not run"), *(outcome(f"c{i}", "not run") for i in range(8))]
    now.append(replace(outcome("d", "not run"), backend="ort-cuda", reason="no room"))
    shown = report(now, add(out, now, {}), figures({}), out)
    assert "a     -        failed  1.0      why" in shown
    assert "4000 GB/s" in shown
    assert shown.count("not measured") == 4
    assert "\n9 steps not run: why\nd@ort-cuda not run: no room\n" in shown
    assert not any(f"\n{name}" in shown for name in ("old", "again", "late", "c1"))
    assert shown.endswith(f"\n1 ok, 1 failed, 10 not run\n2 more in {out} from earlier runs")
    alone = report(now[:1], {"steps": {"a": {"status": "failed"}}}, [], out)
    assert alone.endswith("0 ok, 1 failed, 0 not run")


def test_a_line_for_a_step_says_nothing_twice() -> None:
    assert progress(outcome("a")) == "ok, 1.0 s"
    assert progress(outcome("a", "failed")) == "failed, 1.0 s: why"
    assert progress(outcome("a", "not run")) == "not run"


def test_what_is_kept_is_told_with_its_size(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "x.json"
    out.write_text("{}")
    assert kept(work, out) == f"results: {out} ({taken(out) / 1000:.0f} kB)"
    (work / "deep").mkdir(parents=True)
    folders = taken(work)
    (work / "deep" / "plan").write_bytes(b"x" * 3_000_000)
    (work / "link").symlink_to(out)
    assert 3_000_000 <= taken(work) - folders < 3_100_000
    assert f"bundles and plans: {work} (3." in kept(work, out)


def test_what_a_step_can_do_without_is_told_in_full() -> None:
    told = {one.key: one.needed for one in steps(Place())}
    assert told["provider@ort-cuda"] == "no GPU needed, but onnxruntime-gpu"
    assert told["codelet.build@ort-cuda"] == "no GPU needed"
    for subject in ("codelet.build", "filled.build", "grouped.build", "streams.build"):
        assert told[f"{subject}@tensorrt"] == ""
        assert told[f"{subject}@tensorrt-rtx"] == "no GPU needed, but tensorrt-rtx"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *((["--minutes", m], f"--minutes: {m} is no number of minutes above 0")
          for m in ("0", "-1", "nan", "inf", "soon")),
        (["--laps", "0"], "--laps: 0 is no whole number from 1 on"),
        (["--gammas", "1", "x"], "--gammas: x is no whole number from 1 on"),
        (["--sizes", "2B"], "--sizes: invalid choice"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parser(None).parse_args(given)
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, shown.err.count("\n")) == (2, "", 1)
    assert shown.err.startswith("check.py: ")
    assert said in shown.err


STUCK = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import check
from gpucheck import run
from gpucheck.step import Step

def hang(place, backend):
    try:
        Path({begun!r}).touch()
        time.sleep(60)
    finally:
        Path({begun!r}).unlink()

run.SCRIPT = Path(__file__)
check._steps = lambda place: [
    Step("first", "", lambda place, backend: dict(), needs_gpu=False),
    Step("stuck", "", hang, needs_gpu=False),
    Step("never", "", hang, needs_gpu=False),
]
sys.exit(check.main())
"""


def test_ctrl_c_ends_with_what_ran(tmp_path: Path) -> None:
    script = tmp_path / "stuck.py"
    script.write_text(STUCK.format(here=str(HERE), begun=str(tmp_path / "begun")))
    where = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "x.json")]
    running = subprocess.Popen(
        [sys.executable, str(script), *where],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    seen = running.stdout.readline() + running.stdout.read(len("stuck: "))
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    shown, said = running.communicate(timeout=60)
    assert not (tmp_path / "begun").exists(), "the step was not let tidy up"
    assert re.fullmatch(r"first: ok, .* s\nstuck: ", seen)
    assert (running.returncode, said) == (130, "check.py: interrupted\n")
    assert re.search(r"^first +- +ok ", shown, re.MULTILINE)
    assert "\nstuck, never not run: interrupted\n" in shown
    assert "\n1 ok, 0 failed, 2 not run\n" in shown
    assert list(read_results(tmp_path / "x.json")["steps"]) == ["first"]
