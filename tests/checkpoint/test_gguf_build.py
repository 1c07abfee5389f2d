"""Bundles built from GGUF files, target and draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf", exc_type=ImportError)

from click.testing import CliRunner

import specrt
from specrt.cli.export import command as export
from specrt.errors import SpecrtError
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from specrt_export.builder import build, is_fresh
from specrt_export.recipe import read_recipe
from support import gguf_files
from support.gguf_files import SCORED_VOCABULARY, brain, half, write_model

pytestmark = pytest.mark.export

RECIPE = """
name = "tiny"

[target]
checkpoint = "target.gguf"

[draft]
checkpoint = "draft.gguf"

[engine]
precision = "fp32"
max_length = 128
prefill = 32
gammas = [1, 3]
gamma = 3
"""


@pytest.fixture
def target(tmp_path: Path) -> Any:
    """A model whose weights fp16 holds, in a folder with a draft and the recipe of the pair."""
    model = gguf_files.made("llama").to(torch.float16).to(torch.float32)
    values: dict[str, Any] = {"vocabulary": SCORED_VOCABULARY}
    write_model(tmp_path / "target.gguf", model, half, **values)
    write_model(tmp_path / "draft.gguf", gguf_files.made("qwen3"), brain, **values)
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return model


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Return the likeliest tokens, one after another, up to the EOS token."""
    with torch.no_grad():
        for _ in range(count):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids[-count:]


def test_a_pair_of_floats_gives_transformers_text(target: Any, tmp_path: Path) -> None:
    recipe, out = read_recipe(tmp_path / "recipe.toml"), tmp_path / "bundle"
    stages: list[str] = []
    build(recipe, out, lambda stage, done: stages.append(stage))
    assert "compare target with transformers" in stages
    assert is_fresh(recipe, out)
    ids = Tokenizer(out / "tokenizer.json").encode("hello world, the")
    assert ids[0] == 1
    wanted = greedy(target, ids, 40)
    with specrt.load(out, threads=1) as generator:
        for gamma in (0, 3):
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            made = generator.generate("hello world, the", params, gamma=gamma).token_ids
            assert made == wanted
    write_model(tmp_path / "draft.gguf", gguf_files.made("qwen3"), half, SCORED_VOCABULARY)
    assert not is_fresh(recipe, out)


def test_a_graph_of_a_file_is_one_without_weights(target: Any, tmp_path: Path) -> None:
    command = [str(tmp_path / "target.gguf"), "--out", str(tmp_path / "graph.onnx")]
    refused = CliRunner().invoke(export, command)
    assert isinstance(refused.exception, SpecrtError)
    assert "--config-only" in str(refused.exception)
    assert CliRunner().invoke(export, [*command, "--config-only"]).exit_code == 0
    assert (tmp_path / "graph.onnx").stat().st_size > 0
