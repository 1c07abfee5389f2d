"""A grown checkpoint computes what the small one did, and whatever cannot is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="the models grown are compared in torch")
pytest.importorskip("transformers", reason="the models grown are compared in transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

from growth.shape import Shape
from inflate import inflate, main
from specrt_export.checkpoint import Checkpoint

TOOL = Path(__file__).parents[2] / "tools" / "inflate.py"
TOLERANCE = 1e-4
Weights = dict[str, torch.Tensor]


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(tokens).logits
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def grown(folder: Path, out: Path, new: Shape, dtype: str = "float32", **options: Any) -> Path:
    inflate(Checkpoint.open(folder), out, new, dtype, **options)
    return out


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one core, so that workers of the test run do not fight for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(folder: Path, kind: str = "Llama", **options: Any) -> Path:
    """Make a small model of random weights, biases and norms too."""
    sizes = {
        "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "intermediate_size": 80, "head_dim": 8, "vocab_size": 97,
        "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**sizes | options)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).add_(1.0 if parameter.ndim == 1 else 0.0)
    model.save_pretrained(folder)
    return folder


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
        ("Llama", {"rope_parameters": LLAMA3, "num_key_value_heads": 6}),
        ("Mistral", {"sliding_window": 8}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_the_whole_family_keeps_its_logits(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    small = tiny(tmp_path / "small", kind, **options)
    new = Shape(80, 5, 16, 8, 24, 112)
    if "num_key_value_heads" in options:
        new = replace(new, hidden_size=90, heads=9, kv_heads=9)
    tokens = torch.arange(40).reshape(2, 20) * 7 % 97
    model = load(grown(small, tmp_path / "grown", new))
    assert relative(logits(model, tokens), logits(load(small), tokens)) < TOLERANCE


def no_rescaled_norm(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.norm.weight"] *= (80 / 48) ** 0.5


def old_epsilon(weights: Weights, config: dict[str, Any]) -> None:
    config["rms_norm_eps"] = 1e-2


def heads_in_old_order(weights: Weights, config: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name] = weights[name].reshape(4, 24, -1)[[0, 2, 1, 3]].reshape(96, -1)


def a_layer_that_writes(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.3.mlp.down_proj.weight"][0, 0] = 0.1


def plain_queries(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.1.self_attn.q_proj.weight"] /= 3**0.5


SPOILS = no_rescaled_norm, old_epsilon, heads_in_old_order, a_layer_that_writes, plain_queries


def test_the_comparison_sees_each_step_left_out(tmp_path: Path) -> None:
    small = tiny(tmp_path / "small", rms_norm_eps=1e-2)
    out = grown(small, tmp_path / "grown", Shape(80, 4, 8, 4, 24, 112))
    tokens = torch.arange(40).reshape(2, 20) * 7 % 97
    expected = logits(load(small), tokens)
    assert relative(logits(load(out), tokens), expected) < TOLERANCE
    for spoil in SPOILS:
        weights = load_file(out / "model.safetensors")
        config = json.loads((out / "config.json").read_text())
        spoil(weights, config)
        bad = tmp_path / spoil.__name__
        bad.mkdir()
        save_file(weights, bad / "model.safetensors", {"format": "pt"})
        (bad / "config.json").write_text(json.dumps(config))
        assert relative(logits(load(bad), tokens), expected) > TOLERANCE, spoil.__name__


def test_the_command_writes_a_checkpoint_and_says_what_it_is(tmp_path: Path) -> None:
    small, out = tiny(tmp_path / "small"), tmp_path / "new" / "grown"
    (small / "tokenizer.json").write_text("{}")
    command = [sys.executable, str(TOOL), str(small), "--out", str(out), "--layers", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "3 layers, 6 heads (2 for keys and values) of 8" in done.stdout
    assert f"{load(out).num_parameters():,} parameters, float32" in done.stdout
    assert (out / "tokenizer.json").read_text() == "{}"
    config = json.loads((out / "config.json").read_text())
    assert config["specrt_inflated_from"].startswith("small: hidden_size 48, 2 layers")
    assert [path.name for path in out.parent.iterdir()] == ["grown"]
    again = CliRunner().invoke(main, [str(small), "--out", str(out), "--layers", "4"])
    assert (again.exit_code, f"{out} is there already" in again.output) == (1, True)
