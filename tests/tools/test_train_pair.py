"""The training recipe makes a pair that loads, and goes on where it was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

import torch
import transformers

from pair.text import split_texts
from pair.training import Run
from train_pair import main

ORDER = ["--batch", "2", "--window", "32", "--tests", "2"]
SMALL = [*ORDER, "--device", "cpu", "--minutes", "1000", "--save-every", "0"]
SHAPE = ["--width", "64", "--layers", "1"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty different files of Python-like text, and three that the filters leave out."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(30):
        lines = (f"def f{i}_{n}(x):\n    return x * {i * n} + {i}\n" for i in range(12))
        (folder / f"{n}.py").write_text("\n".join(lines))
    (folder / "copy.py").write_text((folder / "3.py").read_text())
    (folder / "short.py").write_text("x = 1\n")
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
        made = figures(run("train", "llama", stage, "--out", out, "--steps", 3, *SMALL, *SHAPE))
        assert made["steps"] == 3
    return out


def test_a_pair_loads_in_transformers_and_is_reported(pair: Path) -> None:
    for name in ("target", "draft"):
        model = transformers.AutoModelForCausalLM.from_pretrained(pair / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(pair / name)
        assert (model.dtype, tokenizer.eos_token_id) == (torch.bfloat16, 0)
        text = "def f1(x):\n    return 1234\n"
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    report = json.loads((pair / "report.json").read_text())
    assert set(report) == {"text", "target", "draft", "distill"}
    assert report["target"]["tokens"] == 3 * 2 * 32
    measured = run("measure", "llama", "--out", pair, "--window", 32, "--tests", 3)
    assert {"target_loss", "draft_loss", "overlap"} < set(json.loads(measured.output))


@pytest.mark.nightly
def test_killed_run_continues_to_what_an_unbroken_one_gives(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizer.json", "train.bin", "held_out.bin"):
        (tmp_path / name).write_bytes((pair / name).read_bytes())
    arguments = ("train", "llama", "draft", "--out", tmp_path, "--steps", 4, *SMALL, *SHAPE)
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


def test_seen_text_is_never_held_out(texts: Path, tmp_path: Path) -> None:
    _, held_out = split_texts([texts], [], ".py", 0.3)
    (tmp_path / "other_name.py").write_text(held_out[0])
    train, fewer = split_texts([texts], [tmp_path], ".py", 0.3)
    assert fewer == held_out[1:]
    assert held_out[0] in train


def test_bad_input_is_one_line_and_status_2(pair: Path, texts: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert run("text", texts, "--out", other, "--vocabulary", 260, "--held-out", 0.3).exit_code == 0
    for arguments, message in (
        (["text", tmp_path / "none", "--out", out], "not a folder"),
        (["train", "t5", "distill", "--out", out], "t5 has no stage 'distill'"),
        (["train", "llama", "target", "--out", out], "run `text` first"),
        (
            ["train", "llama", "target", "--out", other, "--init", pair, *SMALL],
            "tokenizer mismatch",
        ),
        (["train", "llama", "draft", "--out", pair, "--seed", 2, *SMALL, *SHAPE], "other settings"),
    ):
        result = run(*arguments)
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert message in result.output
