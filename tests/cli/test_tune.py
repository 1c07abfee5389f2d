"""`specrt tune`: what it keeps is used where it was measured, and nowhere else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import specrt
from cli.conftest import Run
from specrt.bundle import Bundle
from specrt.cli.build import tune_quickly
from specrt.cli.options import ProgressLine
from specrt.params import AUTO, SamplingParams
from specrt.tuning.sweep import PLAIN, Candidate, SweepPlan
from specrt.tuning.tuning_record import FILE_NAME, read_tuning


@pytest.fixture
def bundle(codelet: Path, tmp_path: Path) -> Path:
    """A copy of codelet that may be tuned."""
    return Path(shutil.copytree(codelet, tmp_path / "codelet"))


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as can be measured: no test looks at what comes out."""
    contenders = (PLAIN, Candidate("model", 2), Candidate("model", AUTO))
    effort = SweepPlan(contenders, 4, 6, 1)
    monkeypatch.setattr("specrt.cli.tune.plan_effort", lambda *_, **__: effort)
    for name in ("_QUICK_S", "_THOROUGH_S"):
        monkeypatch.setattr(f"specrt.cli.tune.{name}", 0.01)


@pytest.fixture
def four_prompts(tmp_path: Path) -> Path:
    path = tmp_path / "four.jsonl"
    path.write_text('{"prompt": "def number(x):\\n"}\n' * 4, encoding="utf-8")
    return path


def test_prompts_give_defaults_that_are_used(cli: Run, bundle: Path, four_prompts: Path) -> None:
    place = bundle / FILE_NAME
    ran = cli("tune", bundle, "--prompts", four_prompts, "--threads", 1, "--quick", "--json")
    assert (ran.status, ran.out.count("\n")) == (0, 1)
    shown = json.loads(ran.out)
    assert len(shown["verify_ns"]) == len(shown["draft_ns"]) == 9
    tuning, _ = read_tuning(Bundle.open(bundle), 1)
    assert tuning is not None
    assert [(s.drafter, s.gamma) for s in tuning.settings] == [
        ("none", 0), ("model", 2), ("model", AUTO),
    ]  # fmt: skip
    assert all(s.emitted == 4 * 5 for s in tuning.settings)
    ran = cli("tune", bundle, "--threads", 1, "--quick")  # costs alone leave the rest
    again, _ = read_tuning(Bundle.open(bundle), 1)
    assert again is not None
    assert again.settings == tuning.settings
    assert (again.drafter, again.fixed_gamma) == (tuning.drafter, tuning.fixed_gamma)
    assert "plain steps: " in ran.out
    assert ran.err.startswith("tune: ")
    assert ran.out.splitlines()[-1] == f"written to {place}"

    record: dict[str, Any] = json.loads(place.read_text())
    plain_is_best = {**record, "drafter": "none", "fixed_gamma": 0}
    place.write_text(json.dumps(plain_is_best))
    with specrt.load(bundle, threads=1) as generator:
        assert generator.notices == ()
        assert generator.models.costs == again.costs
        params = SamplingParams(max_tokens=8)
        for gamma, used in ((None, 0), (4, 4)):
            counts = generator.generate("import os\n", params, gamma=gamma).speculation
            assert (counts.gamma, counts.drafted > 0) == (used, used > 0)
    for tuned, default in (("", "cascade"), ("ngram", "ngram")):  # the recipe names cascade
        place.write_text(json.dumps({**record, "drafter": tuned}))
        with specrt.load(bundle, threads=1) as generator:
            assert generator.models.drafter == default
    record["machine"]["cpu"] = "Abacus"
    place.write_text(json.dumps(record))
    ran = cli("generate", bundle, "--prompt", "import os\n", "--max-tokens", 4, "--threads", 1)
    assert ran.status == 0
    assert "is ignored: it was measured on another machine (cpu Abacus, not " in ran.err


def test_one_percentage_says_first_how_long_it_takes(
    cli: Run, bundle: Path, four_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(ProgressLine, "update", lambda _, share, stage: shares.append(share))
    assert cli("tune", bundle, "--prompts", four_prompts, "--threads", 1).status == 0
    assert (shares == sorted(shares), shares[0], shares[-1]) == (True, 0.0, 1.0)
    monkeypatch.undo()
    monkeypatch.setattr("specrt.cli.tune.measure_costs", Mock(side_effect=KeyboardInterrupt))
    for prompts, settings in ((("--prompts", four_prompts), True), ((), False)):
        first, *_ = cli("tune", bundle, *prompts).err.splitlines()
        assert re.search(r"0% costs, about \d+ s", first)
        assert ("settings, about 90 s" in first) is settings


def test_an_interrupted_tuning_keeps_the_old_one(
    cli: Run, bundle: Path, four_prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bundle / FILE_NAME).write_text("the old one")
    monkeypatch.setattr("specrt.cli.tune.sweep", Mock(side_effect=KeyboardInterrupt))
    ran = cli("tune", bundle, "--prompts", four_prompts, "--threads", 1)
    assert (ran.status, ran.err.splitlines()[-1]) == (130, "specrt: interrupted")
    assert (bundle / FILE_NAME).read_text() == "the old one"
    assert len(list(bundle.glob(f"*{FILE_NAME}*"))) == 1


def test_refused_before_measuring(cli: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / FILE_NAME).mkdir()
    monkeypatch.setattr("specrt.cli.tune.measure_costs", None)
    assert "copy the bundle to a place" in cli("tune", bundle).refusal
    (bundle / FILE_NAME).rmdir()
    monkeypatch.setattr("specrt.loading.available_bytes", lambda: 1 << 20)
    assert "free memory, and tune again" in cli("tune", bundle).refusal
    assert not list(bundle.glob(f"*{FILE_NAME}*"))


def test_tuning_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = tune_quickly(tmp_path / "-none")[1] or ""
    assert "is not tuned" in reason
    assert "does not exist" in reason
    assert "\n" not in reason

    hang = Mock(side_effect=subprocess.TimeoutExpired("specrt", 600))
    monkeypatch.setattr(subprocess, "run", hang)
    assert "timed out" in (tune_quickly(tmp_path)[1] or "")
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("measured", [True, False])
def test_a_fresh_bundle_without_costs_gets_them(
    cli: Run, engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """As Ctrl-C leaves it while costs are measured."""
    tune = Mock(return_value=(None, None))
    monkeypatch.setattr("specrt_export.plan.build_plan.BuildPlan.is_fresh", lambda plan: True)
    monkeypatch.setattr("specrt_export.builder.build", None)
    monkeypatch.setattr("specrt.cli.build.tune_quickly", tune)
    manifest = Mock(target=None, draft=None, acceptance=None)
    monkeypatch.setattr("specrt.cli.build.read_manifest", lambda place: manifest)
    if measured:
        (tmp_path / FILE_NAME).write_text("{}")
    recipe = engines / "codelet" / "recipe.toml"
    ran = cli("build", recipe, "--out", tmp_path, "--if-stale")
    assert ran.status == 0
    assert tune.called is not measured
    assert ("is up to date" in ran.out) is measured
