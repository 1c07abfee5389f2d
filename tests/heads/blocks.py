"""Random block heads of the tests' target, as checkpoints of each format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from heads.conftest import INPUTS, LAYER, VOCABULARY, WIDTH
from specrt_export.check.block_equivalence import block_states
from specrt_export.heads.dflash_module import BlockDraftHead

BLOCK, MASK, HEAD_DIM = 8, 95, 8

BLOCK_LAYER = {
    **LAYER, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": HEAD_DIM,
    "rope_theta": 10000.0,
}  # fmt: skip

OUTPUTS = [i - 1 for i in INPUTS]
"""The layers of the target whose outputs a head reads: inputs of the next ones."""


RANK = 8


def random_weights(
    confidence: bool = False, scored: int = 0, rank: int = 0,
    *, width: int = WIDTH, vocabulary: int = VOCABULARY,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return random weights of a block head of two layers, by the names of all formats.

    Without `scored` all entries are.
    """
    torch.manual_seed(3)
    head = width // 4

    def normal(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(*shape) * scale

    made = {
        "fc.weight": normal(width, len(INPUTS) * width),
        "hidden_norm.weight": 1 + normal(width),
        "norm.weight": 1 + normal(width),
    }
    for i in range(2):
        made |= {
            f"layers.{i}.input_layernorm.weight": 1 + normal(width),
            f"layers.{i}.post_attention_layernorm.weight": 1 + normal(width),
            f"layers.{i}.self_attn.q_proj.weight": normal(width, width),
            f"layers.{i}.self_attn.k_proj.weight": normal(width // 2, width),
            f"layers.{i}.self_attn.v_proj.weight": normal(width // 2, width),
            f"layers.{i}.self_attn.o_proj.weight": normal(width, width),
            f"layers.{i}.self_attn.q_norm.weight": 1 + normal(head),
            f"layers.{i}.self_attn.k_norm.weight": 1 + normal(head),
            f"layers.{i}.mlp.gate_proj.weight": normal(64, width),
            f"layers.{i}.mlp.up_proj.weight": normal(64, width),
            f"layers.{i}.mlp.down_proj.weight": normal(width, 64),
        }
    if scored:
        ids = torch.sort(torch.randperm(vocabulary)[:scored]).values
        made["d2t"] = ids - torch.arange(scored)
        made["lm_head.weight"] = normal(scored, width)
    if confidence:
        made["confidence_head.proj.weight"] = normal(1, width + rank)
        made["confidence_head.proj.bias"] = normal(1)
    if rank:
        made["markov_head.markov_w1.weight"] = normal(vocabulary, rank, scale=1.0)
        made["markov_head.markov_w2.weight"] = normal(vocabulary, rank, scale=1.0)
    return made


def save_block_head(
    folder: Path, form: str = "dflash", weights: dict[str, torch.Tensor] | None = None, **more: Any
) -> Path:
    """Write a checkpoint as `dflash`, `dspark` or `speculators` have it; `more` is of config.json.

    `markov` is `dspark` as LFM2.5's drafts have it: with a Markov head, rotated in pairs.
    Embeddings and the last projection are the target's, but in that of speculators.
    """
    folder.mkdir()
    if form == "dflash":
        config: dict[str, Any] = {
            **BLOCK_LAYER, "architectures": ["DFlashDraftModel"], "block_size": BLOCK,
            "num_target_layers": 4,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUTS},
        }  # fmt: skip
    elif form == "dspark":
        config = {
            **BLOCK_LAYER, "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK - 1,
            "mask_token_id": MASK, "target_layer_ids": OUTPUTS, "enable_confidence_head": True,
            "confidence_head_with_markov": False, "markov_rank": 0, "markov_head_type": "vanilla",
        }  # fmt: skip
    elif form == "markov":
        read = {"mask_token_id": MASK, "target_layer_ids": OUTPUTS, "num_target_layers": 4}
        config = {
            **BLOCK_LAYER, "architectures": ["Lfm2DSparkDraftModel"], "block_size": BLOCK - 1,
            "dflash_config": read, "enable_confidence_head": True, "markov_rank": RANK,
            "markov_head_type": "vanilla", "rope_is_neox_style": False,
        }  # fmt: skip
    else:
        config = {
            "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash",
            "transformer_layer_config": BLOCK_LAYER, "block_size": BLOCK, "mask_token_id": MASK,
            "aux_hidden_state_layer_ids": INPUTS, "draft_vocab_size": 40,
        }  # fmt: skip
    made = weights
    if made is None:
        scored = 40 if form == "speculators" else 0
        made = random_weights(form in ("dspark", "markov"), scored, RANK * (form == "markov"))
    (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
    save_file(made, folder / "model.safetensors")
    return folder


def run_block(
    model: BlockDraftHead, token: int, context: NDArray[np.float32]
) -> dict[str, NDArray[Any]]:
    """Run a block head of torch after a whole context, without a cache, and draft greedily.

    Shapes: context [C, H] -> logits [drafts, entries], each after the likeliest token before it,
        and the confidence [drafts] if it has any.
    """
    states, markov = block_states(model, token, context), model.markov_head
    with torch.no_grad():
        logits, previous = model.lm_head(states), [token]
        if markov is not None:
            for place in range(len(logits)):
                logits[place] += markov(torch.tensor(previous[-1:]))[0]
                previous.append(int(logits[place].argmax()))
        found = {"logits": logits.numpy()}
        if model.confidence_head is not None:
            odds = model.confidence_head.of_states(states)
            if markov is not None and model.flags.confidence_reads_markov:
                read = markov.markov_w1(torch.tensor(previous[: len(states)]))
                odds = odds + model.confidence_head.of_tokens(read)
            found["confidence"] = odds.sigmoid().numpy()
    return found
