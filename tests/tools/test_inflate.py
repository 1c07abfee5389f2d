"""A grown checkpoint computes what the small one did, and whatever cannot is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the models grown are compared in torch")
pytest.importorskip("transformers", reason="the models grown are compared in transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

from growth.shape import Shape
from inflate import inflate
from specrt_export.checkpoint.checkpoint import Checkpoint

TOLERANCE = 1e-4
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 97
Weights = dict[str, torch.Tensor]


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def error(folder: Path, small: Path) -> float:
    """Return how far the logits of two models are apart, as a part of the largest."""
    found, expected = load(folder)(TOKENS).logits, load(small)(TOKENS).logits
    return float((found - expected).abs().max() / expected.abs().max())


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_the_whole_family_keeps_its_logits(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    small = tiny(tmp_path / "small", kind, **options)
    inflate(Checkpoint.open(small), tmp_path / "grown", Shape(80, 5, 16, 8, 24, 112), "float32")
    assert error(tmp_path / "grown", small) < TOLERANCE


@pytest.mark.parametrize(
    ("hybrid", "spoilt"),
    [
        ("conv", ""), ("conv", "conv.out_proj"), ("conv", "self_attn.q_layernorm"),
        ("recurrent", ""), ("recurrent", "mamba.out_proj"),
    ],
)  # fmt: skip
def test_a_hybrid_keeps_them_unless_a_mixer_writes_or_a_norm_of_heads_is_not_undone(
    hybrid: str, spoilt: str, tmp_path: Path
) -> None:
    small, out = tiny(tmp_path / "small", rms_norm_eps=1e-5), tmp_path / "grown"
    inflate(Checkpoint.open(small), out, Shape(96, 5, 16, 8, 8, 112), "float32", hybrid=hybrid)
    assert load(out).config.layer_types.count("full_attention") == 2
    weights = load_file(out / "model.safetensors")
    for key in weights:
        if spoilt and spoilt in key:
            weights[key] += weights[key].abs().mean() + 0.1
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    assert (error(out, small) < TOLERANCE) is (spoilt == "")


@pytest.mark.parametrize("hybrid", ["conv", "recurrent"])
def test_codelet_as_a_hybrid_writes_codelets_text(
    hybrid: str, engines: Path, tmp_path: Path
) -> None:
    small, out = engines / "codelet" / "checkpoint" / "target", tmp_path / "grown"
    grown = replace(Shape.of(Checkpoint.open(small).config), layers=11)
    inflate(Checkpoint.open(small), out, grown, "bfloat16", hybrid=hybrid)
    texts = [
        load(each).generate(TOKENS[:1] + 200, max_new_tokens=24, do_sample=False).tolist()
        for each in (small, out)
    ]
    assert texts[0] == texts[1]


V, Q = "model.layers.0.self_attn.v_proj.weight", "model.layers.1.self_attn.q_proj.weight"
SPOILS: dict[str, Callable[[Weights, dict[str, Any]], object]] = {
    "no rescaled norm": lambda w, _: w["model.norm.weight"].mul_((80 / 48) ** 0.5),
    "old epsilon": lambda _, config: config.update(rms_norm_eps=1e-2),
    "old heads": lambda w, _: w.update({V: w[V].reshape(4, 24, -1)[[0, 2, 1, 3]].reshape(96, -1)}),
    "a layer that writes": lambda w, _: w["model.layers.3.mlp.down_proj.weight"][0, :1].fill_(0.1),
    "plain queries": lambda w, _: w[Q].div_(3**0.5),
}


def test_the_comparison_sees_each_step_left_out(tmp_path: Path) -> None:
    small, out = tiny(tmp_path / "small", rms_norm_eps=1e-2), tmp_path / "grown"
    inflate(Checkpoint.open(small), out, Shape(80, 4, 8, 4, 24, 112), "float32")
    assert error(out, small) < TOLERANCE
    for name, spoil in SPOILS.items():
        weights = load_file(out / "model.safetensors")
        config = json.loads((out / "config.json").read_text())
        spoil(weights, config)
        bad = tmp_path / name
        bad.mkdir()
        save_file(weights, bad / "model.safetensors", {"format": "pt"})
        (bad / "config.json").write_text(json.dumps(config))
        assert error(bad, small) > TOLERANCE, name
