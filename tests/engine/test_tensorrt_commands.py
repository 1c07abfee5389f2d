"""The commands over a bundle of plans in NumPy: verify, tune and bench run through whole rounds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.tensorrt_double import NumpyPlan
from engine.tensorrt_site import Site, make_site, pair
from specrt.bundle import Bundle
from specrt.cli import run
from specrt.engine.protocol import Drafted
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt import engine_record as fingerprint
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.loading import load
from specrt.system import Survey
from specrt.tuning.tuning_record import read_tuning

TEXTS = ("the thing in the sea", "a b c d", "in the end", "xyz", "the the the", "0123456789")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = make_site(tmp_path, monkeypatch)
    yield made
    made.hold_closed()


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the gammas of whole rounds."""
    gammas: list[int] = []
    whole = CapturedRounds.run

    def noted(self: CapturedRounds, *given: Any) -> Drafted:
        gammas.append(given[-1])
        return whole(self, *given)

    monkeypatch.setattr(CapturedRounds, "run", noted)
    return gammas


def test_verify_finds_every_gamma_identical(
    site: Site, prompts: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.bundle(*pair(0.9))
    assert run(["verify", str(folder), "--prompts", str(prompts), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["divergences"] == []
    assert said["drafted"] > 100
    assert set(ran) >= set(range(1, 9))


def test_verify_tells_of_a_target_that_rounds_otherwise(
    site: Site,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = pair(0.9)
    folder = site.bundle(target, draft)

    def plan(*given: Any) -> NumpyPlan:
        made = site.plan(*given)
        tell = made._tell

        def wrong(at: Any, logits: Any) -> None:
            tell(at, logits)
            if logits.shape[1] == 4:
                made.device.at(at["argmax"], 8)[:1] ^= 1

        made._tell = wrong  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(opening, "open_plan", plan)
    command = ["verify", str(folder), "--prompts", str(prompts), "--gammas", "3", "--json"]
    assert run(command) == 1
    assert json.loads(capsys.readouterr().out)["unexplained"] > 0


def test_tune_keeps_costs_that_are_used_afterwards(
    site: Site, prompts: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.bundle(*pair(0.9), gammas=(0, 1, 2, 4))
    assert run(["tune", str(folder), "--quick", "--prompts", str(prompts)]) == 0
    assert "written to" in capsys.readouterr().out
    assert set(ran) == {1, 2, 4}
    with load(folder) as generator:
        assert generator.notices == ()
        assert generator.models.measure is not None
        costs = generator.models.measure(generator.models)
    kept, ignored = read_tuning(Bundle.open(folder), len(os.sched_getaffinity(0)))
    assert ignored is None
    assert kept is not None
    assert kept.costs == costs
    assert len(costs.verify_ns) == len(costs.draft_ns) == 5
    assert all(costs.draft_ns[1:])
    assert list(costs.verify_ns) == sorted(costs.verify_ns)


def test_bench_reports_rounds_and_equal_outputs(
    site: Site, prompts: Path, ran: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.bundle(*pair(0.9))
    command = ["bench", str(folder), "--prompts", str(prompts), "--gammas", "0,4,auto"]
    assert run([*command, "--max-tokens", "24", "--repeats", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert ran.count(4) > 10
    for row in said["tasks"][0]["results"]:
        assert min(row["round_us"][stage]["median"] for stage in row["round_us"]) >= 0
        assert row["outside_us"]["median"] >= 0


@pytest.mark.parametrize("verb", ["verify", "tune", "bench"])
def test_a_machine_without_a_gpu_is_one_line(
    site: Site,
    prompts: Path,
    verb: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = site.bundle(*pair())
    monkeypatch.setattr(fingerprint, "survey", lambda: Survey(problem="no NVIDIA driver"))
    assert run([verb, str(folder), "--prompts", str(prompts)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "runs on an NVIDIA GPU only: no NVIDIA driver" in said.err
