"""What a recipe takes, from configs alone: equal to what is built, and to transformers' models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.cli import run
from specrt.errors import CheckpointError, RecipeError
from specrt_export.checkpoint.checkpoint import named_head
from specrt_export.estimate.estimate import ModelShape, estimate, main, weights_are_here
from specrt_export.recipe.recipe import read_recipe
from support.gguf_files import container
from support.quantized_folders import container as safetensors

ENGINES = Path(__file__).parents[2] / "engines"
SHAPES = {
    f"{path.parent.name} {role}": config
    for path in sorted(ENGINES.glob("*/shape.json"))
    for role, config in json.loads(path.read_text("utf-8")).items()
}
PUBLISHED = {
    "qwen3-8b target": 8_190_735_360,
    "qwen3-4b target": 4_022_468_096,
    "qwen3-30b-a3b target": 30_532_122_624,
    "qwen3-30b-a3b draft": 596_049_920,
    "qwen3-8b draft": 596_049_920,
    "llama3.1-8b target": 8_030_261_248,
    "llama3.1-8b draft": 1_235_814_400,
    "llama3.3-70b target": 70_553_706_496,
    "gemma3-12b draft": 999_885_952,
    "gemma3-4b draft": 268_098_176,
    "mistral-7b target": 7_248_023_552,
    "phi4-mini target": 3_836_021_760,
    "smollm3-3b target": 3_075_098_624,
    "smollm2-360m target": 361_821_120,
    "smollm2-360m draft": 134_515_008,
    "qwen3-0.6b target": 596_049_920,
    "qwen3-1.7b target": 1_720_574_976,
    "gemma3-1b target": 999_885_952,
    "gemma3-1b draft": 268_098_176,
    "lfm2.5-1.2b target": 1_170_340_608,
    "lfm2.5-2.6b target": 2_697_198_592,
    "falcon-h1-1.5b target": 1_554_859_392,
}
"""Parameters, as their owners count them. Those of Gemma 3 4B and 12B and of Gemma 4 are of the
whole, and those of LFM3 are rounded."""

BORROWED = {
    "lfm2.5-1.2b": 4 * 65536 * 2048, "lfm2.5-2.6b": 4 * 128000 * 2048,
    **{f"gemma4-{size}": 2 * 262144 * width
       for size, width in (("e2b", 1536), ("e4b", 2560), ("12b", 3840))},
}  # fmt: skip
"""Bytes of the tables that a head has of its target."""

CALL = """
import sys
from specrt.cli import run
status = run(sys.argv[1:])
heavy = {"onnx", "onnxruntime", "torch", "transformers", "onnx_ir"} & set(sys.modules)
sys.exit(status or sorted(heavy) or 0)
"""


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_that_are_published(name: str) -> None:
    shape = ModelShape.from_config(SHAPES[name], Path("shape.json"))
    assert PUBLISHED.get(name, shape.parameters) == shape.parameters


@pytest.mark.parametrize("name", ["another", "the same", "in its place"])
def test_a_head_in_the_weights_counts_where_the_config_says_tied(name: str, tmp_path: Path) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 1}
    config = SHAPES["llama3.1-8b draft"] | small
    table = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    own = name == "another"
    tables = {"lm_head.weight": table + own}
    tables |= {"model.embed_tokens.weight": table} if name != "in its place" else {}
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text(json.dumps(config))
    (tmp_path / "r.toml").write_text('[target]\ncheckpoint = "model"\n')
    recipe = read_recipe(tmp_path / "r.toml")
    before = estimate(recipe).models[0].parameters
    stored = safetensors({name: ("F32", array) for name, array in tables.items()})
    (home / "model.safetensors").write_bytes(stored)
    assert estimate(recipe).models[0].parameters - before == own * table.size


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in SHAPES if not named_head(SHAPES[name])])
def test_shapes_have_the_parameters_of_transformers_models(name: str) -> None:
    import torch
    import transformers

    shape = ModelShape.from_config(SHAPES[name], Path("shape.json"))
    config: Any = transformers.AutoConfig.for_model(**SHAPES[name])
    factory: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    kept = [b for name, b in model.named_buffers() if name in model.state_dict()]
    assert sum(p.numel() for p in (*model.parameters(), *kept)) == shape.parameters


def test_every_ready_recipe_is_estimated_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = sorted(path for p in ENGINES.glob("*/shape.json") for path in p.parent.glob("*.toml"))
    assert len(recipes) == 38
    monkeypatch.setattr("specrt_export.estimate.estimate.cached_file", lambda source, name: None)
    for path in recipes:
        recipe = read_recipe(path)
        found = estimate(recipe)
        named = found.models[:1] if recipe.seeks_head else found.models  # its own head comes along
        stored = sum(2 * model.parameters for model in named)
        assert found.download_bytes == stored - BORROWED.get(path.parent.name, 0)
        assert found.total_bytes > found.engine_bytes > found.models[0].step_bytes
        assert found.tokens_per_second(1e9) > found.tokens_per_second(1e9, full=True)


def test_layers_that_see_few_positions_keep_few_of_a_long_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gemma3-12b"
    shutil.copytree(ENGINES / folder.name, folder)
    recipe = folder / "recipe.toml"
    text = recipe.read_text("utf-8").replace("max_length = 4096", "max_length = 32768")
    recipe.write_text(text, "utf-8")
    target = estimate(read_recipe(recipe)).models[0]
    # 48 layers, of which each sixth sees all: 32768 positions there, 1024 + 256 elsewhere.
    row = 2 * 8 * 256 * 4
    assert target.whole_kv_bytes == 48 * 32768 * row
    assert target.kv_bytes == (8 * 32768 + 40 * (1024 + 256)) * row <= 0.3 * target.whole_kv_bytes
    assert target.seen_bytes < target.kv_bytes
    assert run(["build", "--dry-run", "--bandwidth", "50", str(recipe)]) == 0
    assert "KV buffers 5.13 GB (25.77 GB without rings)" in capsys.readouterr().out
    gpu = estimate(read_recipe(ENGINES / folder.name / "tensorrt.toml")).models[0]
    assert gpu.kv_bytes == gpu.whole_kv_bytes == gpu.seen_bytes
    assert "in rings, which tensorrt-rtx does not keep)" in next(gpu.lines())
    monkeypatch.setattr("specrt_export.estimate.estimate.missing_kernels", lambda: "none")
    (line,) = estimate(read_recipe(recipe)).models[0].lines()
    assert "KV buffers 25.77 GB (5.13 GB in rings, which ort-cpu without kernels does not" in line


def test_a_model_without_attention_is_estimated(tmp_path: Path) -> None:
    folder = tmp_path / "nemotron3-nano-4b"
    shutil.copytree(ENGINES / folder.name, folder)
    shapes = (folder / "shape.json").read_text("utf-8")
    (folder / "shape.json").write_text(shapes.replace("full_attention", "mlp"), "utf-8")
    assert estimate(read_recipe(folder / "recipe.toml")).models[0].working_bytes > 0


def test_a_dry_run_loads_nothing_heavy_and_prints_one_object(tmp_path: Path) -> None:
    recipe = ENGINES / "qwen3-8b" / "recipe.toml"
    arguments = ["build", "--dry-run", "--json", "--bandwidth", "50", str(recipe)]
    done = subprocess.run(
        [sys.executable, "-c", CALL, *arguments], env={**os.environ, "HF_HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    expected = estimate(read_recipe(recipe))
    assert said["total_bytes"] == expected.total_bytes
    assert said["tokens_per_second"] == pytest.approx(50e9 / expected.models[0].step_bytes)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen4"}, "model_type is 'qwen4'; sizes are known of llama"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; expected a whole number"),
    ],
)
def test_a_config_that_is_not_known_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ModelShape.from_config({**SHAPES["qwen3-8b target"], **change}, Path("config.json"))


def test_what_is_missing_comes_with_its_remedy(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = (ENGINES / "qwen3-8b" / "recipe.toml").read_text("utf-8")
    recipe.write_text(text.replace("Qwen/Qwen3-8B", "org/none"), "utf-8")
    with pytest.raises(RecipeError, match="alone with `hf download org/none"):
        estimate(read_recipe(recipe))


def test_pairs_whose_weights_are_not_here_are_a_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrt_export.estimate.estimate.cached_file", lambda source, name: None)
    recipes = sorted(str(path) for path in ENGINES.glob("*/recipe.toml"))
    assert main(recipes) == 0
    out, said = capsys.readouterr()
    here = [str(ENGINES / name / "recipe.toml") for name in ("codelet", "itn")]
    assert out.splitlines() == here
    lines = [line.split()[0] for line in said.splitlines() if line.startswith("  ")]
    assert lines == [Path(path).parent.name for path in recipes if path not in here]


def test_a_broken_recipe_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, codelet = tmp_path / "recipe.toml", ENGINES / "codelet" / "recipe.toml"
    broken.write_text("[targt]\n", "utf-8")
    assert main([str(broken), str(codelet)]) == 0
    out, said = capsys.readouterr()
    assert (out, str(broken) in said) == (f"{codelet}\n", True)


def test_a_file_beside_the_recipe_holds_weights(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('[target]\ncheckpoint = "tiny.gguf"\n', "utf-8")
    target = read_recipe(tmp_path / "recipe.toml").models["target"]
    assert not weights_are_here(target)
    (tmp_path / "tiny.gguf").write_bytes(container(tensors=[("a", [32], 0, bytes(128))]))
    assert weights_are_here(target)
