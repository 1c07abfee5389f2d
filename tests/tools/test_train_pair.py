"""The training recipe makes a pair that loads, and goes on where it was killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

import torch
import transformers

from pair.schedule import FINAL_RATE, Clock, next_time, rate
from pair.text import split_texts
from pair.tokens import training_starts
from pair.training import Run
from train_pair import main

TOOL = Path(__file__).parents[2] / "tools" / "train_pair.py"
ORDER = ["--batch", "2", "--window", "32", "--test-windows", "2"]
SMALL = [*ORDER, "--device", "cpu", "--minutes", "1000", "--save-every", "0"]
SHAPE = ["--width", "64", "--layers", "1"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty different files of Python-like text, and four that the filters leave out."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(30):
        lines = (f"def f{i}_{n}(x):\n    return x * {i * n} + {i}\n" for i in range(12))
        (folder / f"{n}.py").write_text("\n".join(lines))
    (folder / "copy.py").write_text((folder / "3.py").read_text())
    (folder / "short.py").write_text("x = 1\n")
    (folder / "wide.py").write_text("x" * 2000)
    (folder / "binary.py").write_bytes(b"\xff" * 500)
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def figures(result: Result) -> dict[str, float]:
    """Return what a successful command printed last."""
    assert result.exit_code == 0, result.output
    (values,) = json.loads(result.output.splitlines()[-1]).values()
    return dict(values)


@pytest.fixture(scope="module")
def pair(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair through all stages, three steps each."""
    out = tmp_path_factory.mktemp("pair")
    cut = figures(run("text", texts, "--out", out, "--vocabulary", 300, "--held-out", 0.3))
    assert cut["files"] + cut["held_out_files"] == 30
    for stage in ("target", "draft", "distill"):
        made = figures(run("train", stage, "--out", out, "--steps", 3, *SMALL, *SHAPE))
        assert made["steps"] == 3
    return out


def test_script_runs_in_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "train", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "{target|draft|distill}" in done.stdout


def test_checkpoints_load_in_transformers(pair: Path) -> None:
    for name in ("target", "draft"):
        model = transformers.AutoModelForCausalLM.from_pretrained(pair / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(pair / name)
        assert model.dtype == torch.bfloat16
        assert (pair / name / "generation_config.json").is_file()
        assert tokenizer.eos_token_id == 0
        text = "def f1(x):\n    return 1234\n"
        assert tokenizer.decode(tokenizer(text).input_ids) == text
        assert len(tokenizer("1234").input_ids) == 4


def test_report_has_every_stage(pair: Path) -> None:
    report = json.loads((pair / "report.json").read_text())
    assert set(report) == {"text", "target", "draft", "distill"}
    assert report["target"]["tokens"] == 3 * 2 * 32
    assert 0 < report["distill"]["overlap"] <= 1


def test_killed_run_continues_to_what_an_unbroken_one_gives(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizer.json", "train.bin", "held_out.bin"):
        (tmp_path / name).write_bytes((pair / name).read_bytes())
    arguments = ("train", "draft", "--out", tmp_path, "--steps", 4, *SMALL, *SHAPE)
    state = tmp_path / "state" / "draft.pt"
    whole = figures(run(*arguments))
    weights = torch.load(state, weights_only=True)["model"]
    state.unlink()

    step = Run.step
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", lambda run: 1 / 0 if run.clock.steps == 2 else step(run))
        assert isinstance(run(*arguments).exception, ZeroDivisionError)
    assert torch.load(state, weights_only=True)["clock"][1] == 2

    resumed = figures(run(*arguments))
    assert resumed["steps"] == 4
    assert resumed["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-3)
    for name, weight in torch.load(state, weights_only=True)["model"].items():
        torch.testing.assert_close(weight, weights[name])


def test_init_continues_from_a_pair_with_its_tokenizer(
    pair: Path, texts: Path, tmp_path: Path
) -> None:
    cut = run("text", texts, "--out", tmp_path, "--init", pair, "--held-out", 0.3)
    assert figures(cut)["held_out_tokens"] == (pair / "held_out.bin").stat().st_size / 2
    assert (tmp_path / "held_out.bin").read_bytes() == (pair / "held_out.bin").read_bytes()
    done = run("train", "target", "--out", tmp_path, "--init", pair, "--steps", 0, *SMALL)
    assert figures(done)["train_loss"] is None
    saved = [(path / "target" / "model.safetensors").read_bytes() for path in (pair, tmp_path)]
    assert saved[0] == saved[1]


def test_measure_prints_losses_of_both(pair: Path) -> None:
    result = run("measure", "--out", pair, "--window", 32, "--test-windows", 3)
    assert result.exit_code == 0, result.output
    assert set(json.loads(result.output)) == {"target_loss", "draft_loss", "overlap", "same_first"}


def test_seen_text_is_never_held_out(texts: Path) -> None:
    _, held_out = split_texts([texts], [], ".py", 0.3)
    seen = next(path for path in texts.glob("*.py") if path.read_bytes() == held_out[0].encode())
    copy = texts.parent / "seen"
    copy.mkdir(exist_ok=True)
    (copy / "other_name.py").write_text(seen.read_text())
    train, fewer = split_texts([texts], [copy], ".py", 0.3)
    assert fewer == held_out[1:]
    assert held_out[0] in train


def test_windows_of_a_pass_are_each_taken_once() -> None:
    order = {"batch": 3, "window": 10, "seed": 5}
    count = (100 - 1 - 10) // 10
    starts = [s for step in range(3) for s in training_starts(100, step, **order)][:count]
    assert sorted(starts) == [10 * n for n in range(count)]
    later = [s for step in range(40) for s in training_starts(100, step, **order)]
    assert max(later) + 10 + 1 <= 100


def test_clock_leaves_pauses_out_and_plans_for_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    clock = Clock(budget=100.0, deadline=1400.0, limit=10**9, last=now[0])
    for seconds in (5.0, 5.0, 300.0):
        now[0] += seconds
        clock.tick()
    assert clock.active == 15.0
    assert clock.done() == pytest.approx(0.15)
    now[0] = 1385.0  # 15 s to the deadline, 85 s of budget
    assert clock.done() == pytest.approx(0.5)
    now[0] = 1400.0
    assert clock.done() == 1.0
    assert rate(1.0, 1000, 0.4) == pytest.approx(FINAL_RATE)


def test_deadline_is_the_nearest_such_time() -> None:
    now = datetime.now(timezone.utc)
    for hours in (-11, -1, 1, 11):
        then = now + timedelta(hours=hours)
        assert abs(next_time(then) - then.timestamp()) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text", "{tmp}/none"], "not a folder"),
        (["text", "{tmp}"], "too little text"),
        (["train", "target"], "run `text` first"),
        (["measure"], "run `text` first"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    result = run(*filled, "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


def test_other_tokenizer_is_refused(pair: Path, texts: Path, tmp_path: Path) -> None:
    cut = run("text", texts, "--out", tmp_path, "--vocabulary", 260, "--held-out", 0.3)
    assert cut.exit_code == 0
    result = run("train", "target", "--out", tmp_path, "--init", pair, "--steps", 1, *SMALL)
    assert result.exit_code == 2
    assert "tokenizer mismatch" in result.output


def test_state_of_other_settings_is_refused(pair: Path) -> None:
    result = run("train", "draft", "--out", pair, "--seed", 2, "--steps", 1, *SMALL, *SHAPE)
    assert result.exit_code == 2
    assert "other settings" in result.output
