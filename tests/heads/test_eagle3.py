"""Heads of both formats: the same graphs, every flag, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from heads.conftest import INPUTS, LAYER, RECIPE, SCORED, VOCABULARY, WIDTH, save_head, tensors
from specrt.errors import CheckpointError, SpecrtError
from specrt_export.check.head_equivalence import check_head, run_head
from specrt_export.checkpoint.checkpoint import Checkpoint, linked
from specrt_export.checkpoint.safetensors_file import map_array
from specrt_export.heads.eagle3_format import Head, read_head
from specrt_export.heads.head_checkpoint import own_weights
from specrt_export.heads.head_formats import is_head, load_head
from specrt_export.portable.exporter import export_head
from specrt_export.recipe.recipe import read_recipe
from support.builds import build, once


def opened(folder: Path, target: Path, layers: tuple[int, ...] = ()) -> Head:
    return read_head(Checkpoint.open(folder), Checkpoint.open(target), layers)


def exported(head: Head, folder: Path) -> tuple[Path, Path]:
    """Export a head; return its graph and the folder of its weights."""
    own = own_weights(head, folder / "rotated.bin")
    checkpoint = linked(head.checkpoint, own, folder / "weights")
    graph = once(export_head)(head, checkpoint, folder / "head.onnx", 64)
    return graph.path, folder / "weights"


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: Tensor) -> Tensor:
    """Turn heads [S, heads, D] by their positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin = (t.repeat(1, 2)[:, None] for t in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def written_out(
    w: dict[str, Tensor], embeds: Tensor, hidden: Tensor, flags: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """Compute a head of one layer from the paper: logits [S, entries], and what it feeds back."""
    normed = rms(hidden, w["layers.0.hidden_norm.weight"])
    residual = normed if "norm_before_residual" in flags else hidden
    x = torch.cat([rms(embeds, w["layers.0.input_layernorm.weight"]), normed], -1)
    state = layer_written_out(w, residual, x)
    last = rms(state, w["norm.weight"])
    return last @ w["lm_head.weight"].T, last if "norm_output" in flags else state


def layer_written_out(w: dict[str, Tensor], residual: Tensor, x: Tensor) -> Tensor:
    """Compute a layer of Llama, whose attention reads x [S, read]; returns states [S, width]."""
    heads, kv, length = LAYER["num_attention_heads"], LAYER["num_key_value_heads"], len(x)

    def part(name: str, count: Any) -> Tensor:
        return (x @ w[f"layers.0.self_attn.{name}.weight"].T).view(length, count, -1)

    q, k, v = rotated(part("q_proj", heads)), rotated(part("k_proj", kv)), part("v_proj", kv)
    attended = scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1).repeat_interleave(2, 0),
        v.transpose(0, 1).repeat_interleave(2, 0), is_causal=True,
    )  # fmt: skip
    a = attended.transpose(0, 1).reshape(length, -1) @ w["layers.0.self_attn.o_proj.weight"].T
    a = residual + a
    y = rms(a, w["layers.0.post_attention_layernorm.weight"])
    gate, up, down = (w[f"layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return a + (silu(y @ gate.T) * (y @ up.T)) @ down.T


FLAGS = [(), ("norm_before_residual", "norm_before_fc"), ("fc_norm", "norm_output")]


@pytest.mark.parametrize(
    "flags", [FLAGS[1], *(pytest.param(f, marks=pytest.mark.nightly) for f in FLAGS[::2])], ids=str
)
def test_each_flag_computes_what_it_says(
    tmp_path: Path, target: Path, flags: tuple[str, ...]
) -> None:
    """Module against a few lines of algebra; graph against module."""
    weights = tensors(*flags)
    head = opened(save_head(tmp_path / "head", *flags, weights=weights), target)
    feature, model = load_head(head)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (1, 11))
    hidden = rng.normal(size=(1, 11, WIDTH)).astype(np.float32)
    logits, _, fed_back = run_head(model, tokens, hidden)
    embeds = model.embed_tokens(torch.from_numpy(tokens[0])).detach()
    expected = written_out(weights, embeds, torch.from_numpy(hidden[0]), flags)
    assert np.allclose(logits[0], expected[0], atol=1e-4)
    assert np.allclose(fed_back[0], expected[1], atol=1e-4)
    states = [torch.from_numpy(rng.normal(size=(3, WIDTH)).astype(np.float32)) for _ in INPUTS]
    read = states
    if "fc_norm" in flags:
        read = [rms(s, weights[f"fc_norm.{i}.weight"]) for i, s in enumerate(states)]
    joined = torch.cat(read, -1)
    if "norm_before_fc" in flags:
        joined = rms(joined, weights["input_norm.weight"])
    found = feature(states).detach()
    assert torch.allclose(found, joined @ weights["fc.weight"].T, atol=1e-4)
    assert check_head(head, *exported(head, tmp_path)) < 1e-4


def test_both_formats_say_the_same(tmp_path: Path, target: Path) -> None:
    weights = tensors()
    heads = [
        opened(save_head(tmp_path / str(flat), flat=flat, weights=weights), target)
        for flat in (False, True)
    ]
    for head in heads:
        assert head.config.inputs == tuple(INPUTS)
        assert not head.guess
        assert {**vars(head.config), "layer": {}} == {**vars(heads[0].config), "layer": {}}
        for name, weight in head.weights.items():
            assert np.array_equal(map_array(weight), map_array(heads[0].weights[name]))


def test_layers_that_nobody_names_are_said_to_be_a_guess(tmp_path: Path, target: Path) -> None:
    folder = save_head(tmp_path / "head", flat=True, eagle_config={})
    head = opened(folder, target, (0, 1, 3))
    assert (head.config.inputs, head.guess) == ((0, 1, 3), "")
    head = opened(folder, target)
    assert head.config.inputs == (2, 2, 1)
    assert "`layers`" in head.guess


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "expected numbers from 0 to 3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc\.weight is \[32, 96\]; expected \[32"),
        ({"draft_vocab_size": 41}, r"d2t is I64\[40\]"),
        ({"transformer_layer_config": {**LAYER, "model_type": "gpt2"}}, "layers of 'gpt2'"),
        ({"transformer_layer_config": {**LAYER, "hidden_size": 31}}, "Is the head of this target"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(save_head(tmp_path / "head", **change), target)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("d2t", torch.arange(SCORED) * 3, "adds to the place"),  # ids themselves, of 0, 3, ...
        ("d2t", None, "no d2t"),
        ("fc.weight", None, "earlier kinds"),
        ("odd.weight", torch.zeros(3), "odd.weight"),
        ("lm_head.weight", torch.zeros(3, WIDTH), "lm_head.weight is"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, target: Path, name: str, value: Tensor | None, message: str
) -> None:
    weights = {**tensors(), name: value}
    kept = {n: t for n, t in weights.items() if t is not None}
    with pytest.raises(CheckpointError, match=message):
        opened(save_head(tmp_path / "head", weights=kept), target)


def test_a_model_is_no_head(tmp_path: Path, target: Path) -> None:
    assert not is_head(Checkpoint.open(target))
    assert is_head(Checkpoint.open(save_head(tmp_path / "head")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '[engine]\nbackend = "ort-cuda"\nprecision = "fp16"',
            r"\(eagle3\) is a head .* which ort-cuda does not run yet; .* tensorrt or tensorrt-rtx",
        ),
        ('[draft]\nbackend = "tensorrt"', "it reads what the target leaves in memory"),
        ("[target]\nlayers = [1]", "target.layers"),
        ('[draft]\ngraph = "x.onnx"', "exist|graph is set"),
        ("[quality]\nmin_acceptance = 2.0", "min_acceptance is 2"),
    ],
)
def test_recipes_that_no_head_can_have(
    tmp_path: Path, target: Path, line: str, message: str
) -> None:
    table = line.partition("\n")[0]
    text = RECIPE.format(target=target, head=save_head(tmp_path / "head"))
    text = text.replace("batch = 2", "batch = 1")  # what every backend takes
    text = text.replace(table, line) if table in text else f"{text}\n{line}\n"
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SpecrtError, match=message):
        build(read_recipe(tmp_path / "recipe.toml"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_pickled_weights_are_read_as_tensors_alone(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tensors()
    whole = opened(save_head(tmp_path / "head", flat=True, weights=weights), target)
    (tmp_path / "head" / "model.safetensors").unlink()
    named = {name.replace("layers.0.", "midlayer.", 1): t for name, t in weights.items()}
    torch.save(named, tmp_path / "head" / "pytorch_model.bin")
    head = opened(tmp_path / "head", target)
    assert head.config == whole.config
    for name, weight in head.weights.items():
        if name in weights:
            assert np.array_equal(map_array(weight), weights[name].numpy())
    torch.save({"fc.weight": Path("x")}, tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be converted"):
        opened(tmp_path / "head", target)
