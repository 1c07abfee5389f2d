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
