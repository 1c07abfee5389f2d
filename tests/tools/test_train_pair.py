"""The training recipes make pairs that load: of decoders, and of a T5 whose encoder is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="training needs torch")
pytest.importorskip("transformers", reason="training needs transformers")

import torch
import transformers
from safetensors.torch import load_file

from train_pair import main

SMALL = ["--minutes", "1000", "--save-every", "0", "--tests", "2", "--steps", "3"]
LLAMA = ["--batch", "2", "--window", "32", "--device", "cpu", "--width", "64", "--layers", "1"]


def figures(*arguments: object) -> dict[str, Any]:
    """Run a command that must succeed; return what it printed last."""
    told = ["--threads", "1", *(str(argument) for argument in arguments)]
    result = CliRunner().invoke(main, told)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output.splitlines()[-1]))


def save_texts(folder: Path) -> None:
    """Write thirty different files of Python-like text, and three that the filters leave out."""
    folder.mkdir()
    for n in range(30):
        lines = (f"def f{i}_{n}(x):\n    return x * {i * n} + {i}\n" for i in range(12))
        (folder / f"{n}.py").write_text("\n".join(lines))
    (folder / "copy.py").write_text((folder / "3.py").read_text())
    (folder / "short.py").write_text("x = 1\n")
    (folder / "binary.py").write_bytes(b"\xff" * 500)


def test_a_pair_loads_in_transformers_and_is_reported(tmp_path: Path) -> None:
    pair, texts = tmp_path / "pair", tmp_path / "texts"
    save_texts(texts)
    (cut,) = figures("text", texts, "--out", pair, "--vocabulary", 300, "--held-out", 0.3).values()
    assert cut["files"] + cut["held_out_files"] == 30
    for stage in ("target", "draft", "distill"):
        figures("train", "llama", stage, "--out", pair, *SMALL, *LLAMA)
    for name in ("target", "draft"):
        model = transformers.AutoModelForCausalLM.from_pretrained(pair / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(pair / name)
        assert (model.dtype, tokenizer.eos_token_id) == (torch.bfloat16, 0)
        text = "def f1(x):\n    return 1234\n"
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    report = json.loads((pair / "report.json").read_text())
    assert set(report) == {"text", "target", "draft", "distill"}
    assert (report["target"]["steps"], report["target"]["tokens"]) == (3, 3 * 2 * 32)
    measured = figures("measure", "llama", "--out", pair, "--window", 32, "--tests", 3)
    assert {"target_loss", "draft_loss", "overlap"} < set(measured)


def test_the_draft_of_an_encoder_decoder_has_its_targets_encoder(tmp_path: Path) -> None:
    figures("draw", "--out", tmp_path, "--pairs", 60, "--vocabulary", 300)
    for stage, sizes in (("target", ["--width", "64", "--layers", "2"]), ("draft", [])):
        figures("train", "t5", stage, "--out", tmp_path, "--batch", 4, *SMALL, *sizes)
    pair = {name: load_file(tmp_path / name / "model.safetensors") for name in ("target", "draft")}
    same = {name: torch.equal(one, pair["target"][name]) for name, one in pair["draft"].items()}
    shared = [name for name in same if name.startswith(("encoder.", "shared."))]
    assert shared
    assert all(same[name] for name in shared)
    moved = [n for n in same if n.startswith("decoder.") and pair["draft"][n].ndim > 1]
    assert not any(same[name] for name in moved)
    draft = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "draft")
    assert (draft.config.num_layers, draft.config.num_decoder_layers) == (2, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "target")
    text = "Anna paid £4.50 at 09:05."
    ids = tokenizer(text).input_ids
    assert (ids[-1], tokenizer.decode(ids, skip_special_tokens=True)) == (1, text)
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["target"]["steps"], report["draft"]["steps"]) == (3, 3)
    assert {"exact", "target_loss"} < set(report["target"])
    assert {"overlap", "same_first", "draft_loss"} < set(report["draft"])
