"""Heads that predict several tokens: what they compute, where they are found, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from heads.conftest import VOCABULARY, WIDTH, save_mtp, save_qwen
from heads.test_eagle3 import exported, layer_written_out, rms, rotated
from specrt.errors import SpecrtError
from specrt_export.check.head_equivalence import check_head, run_head
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.estimate.estimate import estimate
from specrt_export.heads.head_formats import load_head
from specrt_export.heads.mtp_format import read_mtp_head
from specrt_export.plan.build_plan import BuildPlan, resolve
from specrt_export.recipe.recipe import read_recipe


def gated_layer(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Compute a layer of Qwen3.5 that attends: gates next to queries, a quarter of each rotated."""
    own = {n.removeprefix("layers.0."): t for n, t in w.items() if n.startswith("layers.0.")}
    y = rms(x, 1 + own["input_layernorm.weight"])

    def part(name: str) -> Tensor:
        return (y @ own[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, 16)

    def turned(heads: Tensor, norm: str) -> Tensor:
        heads = rms(heads, 1 + own[f"self_attn.{norm}.weight"])
        return torch.cat([rotated(heads[..., :4]), heads[..., 4:]], -1).transpose(0, 1)

    both = part("q").view(len(x), 4, 2, 16)
    query, gate = turned(both[:, :, 0], "q_norm"), both[:, :, 1].reshape(len(x), -1)
    key, value = turned(part("k"), "k_norm"), part("v").transpose(0, 1)
    key, value = key.repeat_interleave(2, 0), value.repeat_interleave(2, 0)
    made = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(0, 1)
    x = x + (made.reshape(len(x), -1) * gate.sigmoid()) @ own["self_attn.o_proj.weight"].T
    y = rms(x, 1 + own["post_attention_layernorm.weight"])
    gate, up, down = (own[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    return x + (silu(y @ gate.T) * (y @ up.T)) @ down.T


@pytest.mark.parametrize("form", ["mtp", "qwen3_5"])
def test_a_head_is_what_the_paper_says(tmp_path: Path, target: Path, form: str) -> None:
    """Module against a few lines of algebra; graph against module."""
    is_qwen, folder = form == "qwen3_5", tmp_path / "head"
    checkpoint = Checkpoint.open(save_qwen(folder) if is_qwen else save_mtp(folder, target))
    head = read_mtp_head(checkpoint, checkpoint)
    _, model = load_head(head)
    w = {name: parameter.detach() for name, parameter in model.named_parameters()}
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (1, 11))
    hidden = rng.normal(size=(1, 11, WIDTH)).astype(np.float32)
    logits, _, fed_back = run_head(model, tokens, hidden)
    both = {"embedding": w["embed_tokens.weight"][tokens[0]], "hidden": torch.from_numpy(hidden[0])}
    normed = [rms(x, is_qwen + w[f"pre_fc_norm_{name}.weight"]) for name, x in both.items()]
    x = torch.cat(normed, -1) @ w["fc.weight"].T
    inside = rms(x, w["layers.0.input_layernorm.weight"])
    state = gated_layer(w, x) if is_qwen else layer_written_out(w, x, inside)
    state = rms(state, is_qwen + w["norm.weight"])
    assert np.allclose(fed_back[0], state, atol=1e-4)
    assert np.allclose(logits[0], state @ w["lm_head.weight"].T, atol=1e-4)
    assert check_head(head, *exported(head, tmp_path)) < 1e-4


def test_both_formats_say_the_same(tmp_path: Path, target: Path) -> None:
    folders = [save_mtp(tmp_path / form, target, form) for form in ("mtp", "nextn")]
    one, two = (load_head(read_mtp_head(c, c))[1] for c in map(Checkpoint.open, folders))
    for (name, first), (other, second) in zip(
        one.named_parameters(), two.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(first, second)


def planned(target: Path, lines: str, folder: Path) -> BuildPlan:
    text = f'[target]\ncheckpoint = "{target}"\n{lines}'
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    return resolve(read_recipe(folder / "recipe.toml"), folder / "bundle")


ENGINE, NAMED = "[engine]\nmax_length = 160\nprefill = 12\n", '[draft]\nkind = "mtp"\n'


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("", True),
        (NAMED, True),
        ('[draft]\nkind = "none"\n', False),
        ('backend = "ort-cuda"\nprecision = "fp16"\n', False),
    ],
)
def test_a_head_next_to_its_target_is_found(
    tmp_path: Path, target: Path, lines: str, found: bool
) -> None:
    """On a backend that runs it, unless the recipe says otherwise."""
    plan = planned(save_mtp(tmp_path / "model", target), lines + ENGINE, tmp_path)
    assert (plan.draft is not None and plan.draft.kind == "mtp") == found
    assert planned(target, ENGINE, tmp_path).draft is None


def test_a_dry_run_counts_the_head(tmp_path: Path, target: Path) -> None:
    """And the states that its target leaves for it."""
    plan = planned(save_mtp(tmp_path / "model", target), ENGINE, tmp_path)
    assert plan.draft is not None
    assert plan.draft.head is not None
    one, said = estimate(read_recipe(plan.recipe)).models
    held = plan.draft.head.weights.values()
    assert (said.kind, said.parameters) == ("mtp", sum(prod(weight.shape) for weight in held))
    (alone,) = estimate(read_recipe(planned(target, ENGINE, tmp_path).recipe)).models
    assert one.kv_bytes - alone.kv_bytes == 4 * 160 * WIDTH


@pytest.mark.parametrize(
    ("lines", "change", "message"),
    [
        (NAMED, {"fc.weight": None}, r"has no mtp\.fc\.weight"),
        (NAMED, {"fc.weight": torch.zeros(WIDTH, WIDTH)}, r"fc\.weight is \[32, 32\]; expected"),
        (NAMED + "layers = [1]\n", {}, r"`layers` in \[draft\]"),
        (NAMED + 'graph = "x.onnx"\n', {}, "exist|graph is set"),
        ('kind = "mtp"\n', {}, "target.kind"),
        ('[draft]\nkind = "none"\ncheckpoint = "x"\n', {}, "remove one of both"),
        ('[draft]\nkind = "eagle"\n', {}, "expected 'mtp' or 'none'"),
        ("[draft]\n", {}, r"draft.checkpoint is missing"),
        ('backend = "ort-cuda"\nprecision = "fp16"\n' + NAMED, {}, "which ort-cuda does not run"),
    ],
)
def test_what_no_such_head_can_be_is_refused(
    tmp_path: Path, target: Path, lines: str, change: dict[str, Any], message: str
) -> None:
    folder = save_mtp(tmp_path / "model", target)
    stored = load_file(folder / "model.safetensors") | {f"mtp.{n}": t for n, t in change.items()}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    if "ort-cuda" in lines:
        lines = lines.replace(NAMED, f'{NAMED}backend = "ort-cuda"\nprecision = "fp16"\n')
    with pytest.raises(SpecrtError, match=message):
        planned(folder, lines + ENGINE, tmp_path)
