"""Training makes a T5 pair that loads and shares an encoder, and goes on where it was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

import torch
import transformers
from safetensors.torch import load_file

from train_pair import main

SMALL = ["--batch", "4", "--minutes", "1000", "--save-every", "0", "--tests", "2"]


def run(*arguments: object) -> Result:
    told = ["--threads", "1", *(str(argument) for argument in arguments)]
    return CliRunner().invoke(main, told)


def trained(out: Path, stage: str, steps: int, *options: object) -> dict[str, float]:
    """Train a stage for so many steps; return its figures."""
    result = run("train", "t5", stage, "--out", out, "--steps", steps, *SMALL, *options)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output.splitlines()[-1])[stage])


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair of two layers and one, three steps each."""
    folder = tmp_path_factory.mktemp("pair")
    made = run("draw", "--out", folder, "--pairs", 60, "--vocabulary", 300)
    assert made.exit_code == 0, made.output
    assert trained(folder, "target", 3, "--width", 64, "--layers", 2)["steps"] == 3
    assert trained(folder, "draft", 3)["steps"] == 3
    return folder


def test_a_pair_loads_in_transformers_and_its_draft_has_the_targets_encoder(out: Path) -> None:
    weights = {name: load_file(out / name / "model.safetensors") for name in ("target", "draft")}
    shared = [name for name in weights["draft"] if name.startswith(("encoder.", "shared."))]
    assert shared
    assert all(torch.equal(weights["draft"][name], weights["target"][name]) for name in shared)
    moved = [
        n for n in weights["draft"] if n.startswith("decoder.") and weights["draft"][n].ndim > 1
    ]
    assert not any(torch.equal(weights["draft"][name], weights["target"][name]) for name in moved)
    draft = transformers.AutoModelForSeq2SeqLM.from_pretrained(out / "draft")
    assert (draft.config.num_layers, draft.config.num_decoder_layers) == (2, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "target")
    text = "Anna paid £4.50 at 09:05."
    ids = tokenizer(text).input_ids
    assert (ids[-1], tokenizer.decode(ids, skip_special_tokens=True)) == (1, text)
    report = json.loads((out / "report.json").read_text())
    assert {"exact", "target_loss"} < set(report["target"])
    assert {"overlap", "same_first", "draft_loss"} < set(report["draft"])
