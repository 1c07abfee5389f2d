"""Block heads of all formats: what is read, what graphs compute, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from heads.blocks import (
    BLOCK,
    HEAD_DIM,
    MASK,
    OUTPUTS,
    RANK,
    random_weights,
    run_block,
    save_block_head,
)
from heads.conftest import INPUTS, RECIPE, VOCABULARY, WIDTH
from heads.test_eagle3 import exported, rms, rotated
from shared import nightly_but
from specrt.errors import CheckpointError, ExportError, SpecrtError
from specrt_export.check.block_equivalence import check_block_head
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.heads.dflash_format import BlockHead, read_block_head
from specrt_export.heads.head_formats import load_head
from specrt_export.recipe.recipe import read_recipe
from support.builds import build


def opened(folder: Path, target: Path, layers: tuple[int, ...] = ()) -> BlockHead:
    return read_block_head(Checkpoint.open(folder), Checkpoint.open(target), layers)


def paired(x: Tensor) -> Tensor:
    """Turn neighbouring numbers of heads [S, heads, D], as complex ones, by their positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(half) / half)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (half, 2))) * turns).flatten(-2)


def written_out(
    w: dict[str, Tensor], embeds: Tensor, context: Tensor, turned: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute a block of embeddings [S, W] after a context [C, W] from the paper: states [S, W].

    Position by position: each sees the whole context and the whole block.
    """
    state, behind = embeds, len(context)
    for i in range(2):
        own = {n.removeprefix(f"layers.{i}."): t for n, t in w.items()}
        x = rms(state, own["input_layernorm.weight"])
        read = torch.cat([context, x])

        def part(name: str, x: Tensor, own: dict[str, Tensor] = own) -> Tensor:
            return (x @ own[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, HEAD_DIM)

        norms = [own[f"self_attn.{n}_norm.weight"] for n in "qk"]
        padded = torch.cat([torch.zeros(behind, WIDTH), x])
        q = turned(rms(part("q", padded), norms[0]))[behind:]
        k, v = turned(rms(part("k", read), norms[1])), part("v", read)
        made = torch.zeros(len(x), 4, HEAD_DIM)
        for head in range(4):
            scores = q[:, head] @ k[:, head // 2].T / HEAD_DIM**0.5
            made[:, head] = scores.softmax(-1) @ v[:, head // 2]
        state = state + made.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T
        y = rms(state, own["post_attention_layernorm.weight"])
        gate, up, down = (own[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        state = state + (silu(y @ gate.T) * (y @ up.T)) @ down.T
    return rms(state, w["norm.weight"])


@pytest.mark.parametrize("form", nightly_but(["markov"], ["dflash", "dspark", "markov"]))
def test_a_block_is_what_the_paper_says(tmp_path: Path, target: Path, form: str) -> None:
    """Module against a few lines of algebra; graph against module."""
    weights = random_weights(form != "dflash", rank=RANK if form == "markov" else 0)
    head = opened(save_block_head(tmp_path / "head", form, weights), target)
    feature, model = load_head(head)
    rng = np.random.default_rng(0)
    context = rng.normal(size=(9, WIDTH)).astype(np.float32)
    found = run_block(model, 7, context)
    block = torch.full((head.config.block_size,), MASK)
    block[0] = 7
    embeds = model.embed_tokens(block).detach()
    turned = paired if form == "markov" else rotated
    states = written_out(weights, embeds, torch.from_numpy(context), turned)
    # The first position of DFlash stands for a token that is known.
    states = states[1:] if form == "dflash" else states
    assert len(states) == BLOCK - 1
    token, logits, sure = 7, [], []
    for state in states:
        scores, read = state @ model.lm_head.weight.detach().T, state
        if form == "markov":
            before = weights["markov_head.markov_w1.weight"][token]
            scores = scores + weights["markov_head.markov_w2.weight"] @ before
            read = torch.cat([state, before])
        if form != "dflash":
            odds = weights["confidence_head.proj.weight"][0] @ read
            sure.append(torch.sigmoid(odds + weights["confidence_head.proj.bias"])[0])
        logits.append(scores)
        token = int(scores.argmax())
    assert np.allclose(found["logits"], torch.stack(logits), atol=1e-4)
    assert np.allclose(found.get("confidence", []), sure, atol=1e-4)
    read = [torch.from_numpy(rng.normal(size=(3, WIDTH)).astype(np.float32)) for _ in INPUTS]
    projected = rms(torch.cat(read, -1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    assert torch.allclose(feature(read).detach(), projected, atol=1e-4)
    assert check_block_head(head, *exported(head, tmp_path)) < 1e-4


WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
    "use_sliding_window": True,
}  # fmt: skip


MASKS: list[tuple[dict[str, Any], tuple[bool, bool]]] = [
    ({}, (True, False)),
    ({"sliding_window_non_causal": True}, (False, False)),
    ({"is_causal": True}, (True, True)),
]


@pytest.mark.parametrize(
    ("more", "causal"),
    nightly_but(MASKS[:1], MASKS),
    ids=["windows are causal", "no layer is", "all layers are"],
)
def test_windows_and_masks_are_as_the_checkpoint_says(
    tmp_path: Path, target: Path, more: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    head = opened(save_block_head(tmp_path / "head", "dspark", **WINDOWED, **more), target)
    assert head.config.windows == (6, 0)
    assert head.config.causal == causal
    graph, weights = exported(head, tmp_path)
    assert check_block_head(head, graph, weights) < 1e-4
    for change in ({"causal": tuple(not c for c in causal)}, {"windows": (0, 0)}):
        for name, value in change.items():
            object.__setattr__(head.config, name, value)
    with pytest.raises(ExportError, match="disagrees with the head"):
        check_block_head(head, graph, weights)


def test_every_format_says_the_same(tmp_path: Path, target: Path) -> None:
    weights = random_weights()
    forms = {
        "dflash": {}, "speculators": {"draft_vocab_size": VOCABULARY},
        "dspark": {"block_size": BLOCK, "enable_confidence_head": False,
                   "sample_from_anchor": False},
    }  # fmt: skip
    heads = [
        opened(save_block_head(tmp_path / form, form, weights, **more), target)
        for form, more in forms.items()
    ]
    for head in heads:
        assert head.config.inputs == tuple(INPUTS)
        assert head.config.drafts == BLOCK - 1
        assert not head.guess
        assert {**vars(head.config), "layer": {}} == {**vars(heads[0].config), "layer": {}}


def test_layers_that_nobody_names_are_said_to_be_a_guess(tmp_path: Path, target: Path) -> None:
    folder = save_block_head(tmp_path / "head", dflash_config={"mask_token_id": MASK})
    head = opened(folder, target, (0, 1, 3))
    assert (head.config.inputs, head.guess) == ((0, 1, 3), "")
    assert "`layers`" in read_guess(tmp_path, target)


def read_guess(folder: Path, target: Path) -> str:
    weights = random_weights()
    weights["fc.weight"] = weights["fc.weight"][:, : 2 * WIDTH].clone()
    config = {"dflash_config": {"mask_token_id": MASK}}
    return opened(save_block_head(folder / "two", weights=weights, **config), target).guess


def flash(**more: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUTS, **more}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flash(target_layer_ids=[0, 1, 3]), "expected numbers from 0 to 3"),
        (flash(mask_token_id=VOCABULARY), "a token below 96"),
        (flash(projector_type="domino"), "projector_type 'domino'"),
        ({"block_size": 1}, "block_size is 1"),
        ({"num_target_layers": 36}, "a target of 36 layers"),
        ({"model_type": "gpt2"}, "layers of 'gpt2'"),
        ({"architectures": ["DFlash2DraftModel"]}, "neither its convolutions .* path selector"),
        (flash(selector_rank=256), "second version of DFlash"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers"),
        ({"use_sliding_window": True, "sliding_window": 8}, "no layer_types"),
        ({"markov_rank": 4, "draft_vocab_size": 40}, "Markov head and scores 40 entries"),
        ({"markov_rank": 4}, r"markov_head.markov_w1.weight is nothing"),
        ({"dflash_config": [MASK]}, r"dflash_config \[95\]; expected an object"),
        ({"num_key_value_heads": 3}, "a multiple of the second"),
        ({"num_hidden_layers": 1}, r"holds layers\.1\.\S+, which no block head"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(save_block_head(tmp_path / "head", **change), target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"= 160": f"= {BLOCK}", "= 12": "= 4", "3, 4, 5, 6, 7, 8": "3"},
            f"max_length is {BLOCK}.*expected {BLOCK + 1} or more",
        ),
        *(
            ({"[engine]": f'[engine]\nbackend = "{name}"', "batch = 2": ""},
             rf"\(dflash\) is a head .* which {name} does not run yet")
            for name in ("tensorrt", "tensorrt-rtx")
        ),
    ],
)  # fmt: skip
def test_recipes_that_no_block_head_can_have(
    tmp_path: Path, target: Path, changes: dict[str, str], message: str
) -> None:
    text = RECIPE.format(target=target, head=save_block_head(tmp_path / "head"))
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    with pytest.raises(SpecrtError, match=message):
        build(read_recipe(tmp_path / "recipe.toml"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
