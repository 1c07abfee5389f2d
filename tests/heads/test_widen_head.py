"""A head for a grown target drafts what it drafted for the small one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from growth.shape import Shape
from heads.conftest import VOCABULARY, save_head
from inflate import inflate
from specrt_export.check.equivalence import Reference
from specrt_export.check.head_equivalence import entering, run_head
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.heads.eagle3_format import read_head
from specrt_export.heads.head_formats import load_head
from widen_head import main

TOLERANCE = 1e-4
TOKENS = np.arange(40).reshape(2, 20) * 7 % VOCABULARY


@pytest.fixture(scope="module")
def grown(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with more columns, layers, heads and intermediate units."""
    folder = tmp_path_factory.mktemp("grown") / "target"
    inflate(Checkpoint.open(target), folder, Shape(48, 6, 8, 4, 8, 64), "float32")
    return folder


def scores(head: Path, target: Path) -> NDArray[np.float32]:
    """Return the logits of a head on the states of a target."""
    opened = Checkpoint.open(target)
    read = read_head(Checkpoint.open(head), opened)
    feature, model = load_head(read)
    with torch.no_grad():
        hidden = feature(entering(Reference(opened), read.config.inputs, TOKENS)).numpy()
    return run_head(model, TOKENS, hidden)[0]


def widened(head: Path, target: Path, grown: Path, out: Path) -> tuple[int, str]:
    """Run the command; return its status and what it said."""
    named = ["--target", str(target), "--grown", str(grown), "--out", str(out)]
    done = CliRunner().invoke(main, [str(head), *named])
    return done.exit_code, done.output


def test_scores_are_those_of_the_small_target(target: Path, grown: Path, tmp_path: Path) -> None:
    head, out = save_head(tmp_path / "head"), tmp_path / "wide"
    status, said = widened(head, target, grown, out)
    assert (status, "inflated" in said) == (0, True)
    wanted = scores(head, target)
    bound = TOLERANCE * float(np.abs(wanted).max())
    assert float(np.abs(scores(out, grown) - wanted).max()) < bound
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert "specrt_widened_from" in config
    weights = load_file(out / "model.safetensors")  # a shift of the columns shows
    weights["fc.weight"] = weights["fc.weight"].roll(1, 1)
    save_file(weights, out / "model.safetensors")
    assert float(np.abs(scores(out, grown) - wanted).max()) > bound


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_norms_over_what_is_read_are_refused(
    target: Path, grown: Path, tmp_path: Path, flag: str
) -> None:
    head = save_head(tmp_path / "head", flag)
    status, said = widened(head, target, grown, tmp_path / "wide")
    assert (status, flag in said, (tmp_path / "wide").exists()) == (1, True, False)
