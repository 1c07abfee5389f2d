"""A grown checkpoint computes what the small one did, and whatever cannot is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
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

CODELET = Path(__file__).parents[2] / "engines" / "codelet" / "checkpoint" / "target"
TOOL = Path(__file__).parents[2] / "tools" / "inflate.py"
SMALL = Shape(384, 8, 6, 2, 64, 1024)
TINY = Shape(48, 2, 6, 2, 8, 80)
TOLERANCE = 1e-4
PROMPT, GREEDY = 40, 64
Weights = dict[str, torch.Tensor]

GROWN = Shape(640, 10, 16, 8, 128, 1600)


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


@pytest.fixture(scope="module")
@torch.no_grad()
def written() -> torch.Tensor:
    """A prompt and the 64 tokens codelet goes on with."""
    model = load(CODELET)
    prompt = (CODELET.parents[1] / "README.md").read_text(encoding="utf-8")
    tokens = transformers.AutoTokenizer.from_pretrained(CODELET)(prompt)["input_ids"][:PROMPT]
    past, pending = None, tokens
    while len(tokens) < PROMPT + GREEDY:
        done = model(torch.tensor([pending]), past_key_values=past, use_cache=True)
        past, pending = done.past_key_values, [int(done.logits[0, -1].argmax())]
        tokens += pending
    return torch.tensor([tokens])


@pytest.mark.nightly
def test_codelet_keeps_its_logits_and_its_text(written: torch.Tensor, tmp_path: Path) -> None:
    expected = logits(load(CODELET), written)
    model = load(grown(CODELET, tmp_path / "grown", GROWN))
    found = logits(model, written)
    assert Shape.of(model.config.to_dict()) == GROWN
    assert relative(found, expected) < TOLERANCE
    # Equal choices after each prefix of the small model's text: the same text, by induction.
    assert torch.equal(found[0, PROMPT - 1 : -1].argmax(-1), written[0, PROMPT:])


def tiny(folder: Path, kind: str = "Llama", **options: Any) -> Path:
    """Make a small model of random weights, biases and norms too."""
    sizes = {
        "hidden_size": TINY.hidden_size,
        "num_hidden_layers": TINY.layers,
        "num_attention_heads": TINY.heads,
        "num_key_value_heads": TINY.kv_heads,
        "intermediate_size": TINY.intermediate_size,
        "head_dim": TINY.head_dim,
        "vocab_size": 97,
        "max_position_embeddings": 128,
    }
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
    weights["model.norm.weight"] *= (80 / TINY.hidden_size) ** 0.5


def old_epsilon(weights: Weights, config: dict[str, Any]) -> None:
    config["rms_norm_eps"] = 1e-2


def heads_in_old_order(weights: Weights, config: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name] = weights[name].reshape(4, 24, -1)[[0, 2, 1, 3]].reshape(96, -1)


def a_layer_that_writes(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.3.mlp.down_proj.weight"][0, 0] = 0.1


def plain_queries(weights: Weights, config: dict[str, Any]) -> None:
    weights["model.layers.1.self_attn.q_proj.weight"] /= 3**0.5


@pytest.mark.parametrize(
    "spoil",
    [no_rescaled_norm, old_epsilon, heads_in_old_order, a_layer_that_writes, plain_queries],
)
def test_the_comparison_sees_each_step_left_out(
    spoil: Callable[[Weights, dict[str, Any]], None], tmp_path: Path
) -> None:
    small = tiny(tmp_path / "small", rms_norm_eps=1e-2)
    out = grown(small, tmp_path / "grown", Shape(80, 4, 8, 4, 24, 112))
    tokens = torch.arange(40).reshape(2, 20) * 7 % 97
    expected = logits(load(small), tokens)
    assert relative(logits(load(out), tokens), expected) < TOLERANCE
    weights = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    spoil(weights, config)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    assert relative(logits(load(out), tokens), expected) > TOLERANCE


def test_the_command_writes_a_checkpoint_and_says_what_it_is(tmp_path: Path) -> None:
    out = tmp_path / "new" / "grown"
    command = [sys.executable, str(TOOL), str(CODELET), "--out", str(out), "--layers", "9"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "9 layers, 6 heads (2 for keys and values) of 64" in done.stdout
    assert f"{load(out).num_parameters():,} parameters, float32, 0.07 GB" in done.stdout
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (CODELET / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["specrt_inflated_from"].startswith("target: hidden_size 384, 8 layers")
    assert [path.name for path in out.parent.iterdir()] == ["grown"]
    again = CliRunner().invoke(main, [str(CODELET), "--out", str(out), "--layers", "10"])
    assert (again.exit_code, f"{out} is there already" in again.output) == (1, True)
