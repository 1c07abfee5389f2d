"""T5 models: making, loading, saving, running."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

from pair.errors import BadInputError
from pair.model import save_checkpoint
from seq2seq.tokenizer import END, PAD, SPECIAL

HEAD = 64  # width of an attention head
LENGTH = 512  # tokens of a source or an answer, as the checkpoint says


def new_target(vocabulary: int, width: int, layers: int) -> T5ForConditionalGeneration:
    """Return a random T5 with a gated feed-forward, as many layers on each side.

    Raises: BadInputError for a width that heads do not fill.
    """
    if width % HEAD:
        raise BadInputError(f"width {width} is not a multiple of {HEAD}")
    numbers: dict[str, Any] = {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": HEAD,
        "d_ff": 2 * width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": width // HEAD,
        "feed_forward_proj": "gated-gelu",
        "dropout_rate": 0.0,
        "n_positions": LENGTH,
        "pad_token_id": SPECIAL.index(PAD),
        "eos_token_id": SPECIAL.index(END),
        "decoder_start_token_id": SPECIAL.index(PAD),
    }
    return T5ForConditionalGeneration(T5Config(**numbers))


def new_draft(target: T5ForConditionalGeneration, layers: int) -> T5ForConditionalGeneration:
    """Return a draft of the target's encoder, frozen, and its first decoder layers."""
    config = copy.deepcopy(target.config)
    config.num_decoder_layers = layers
    draft = T5ForConditionalGeneration(config)
    draft.load_state_dict({n: w for n, w in target.state_dict().items() if n in draft.state_dict()})
    freeze_encoder(draft)
    return draft


def freeze_encoder(draft: T5ForConditionalGeneration) -> None:
    """Train nothing that the draft shares with its target."""
    for weight in (*draft.encoder.parameters(), *draft.shared.parameters()):
        weight.requires_grad_(False)


def load_model(folder: Path) -> T5ForConditionalGeneration:
    """Read a checkpoint in float32.

    Raises: BadInputError where there is no T5 that can be read.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise BadInputError(f"no checkpoint: {folder}")
    if (kind := json.loads(config.read_text("utf8")).get("model_type")) != "t5":
        raise BadInputError(f"{folder} is of model_type {kind!r}; expected t5")
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    nn.Module.eval(model)
    return model


def save_model(model: T5ForConditionalGeneration, tokenizer: Path, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16."""
    model.generation_config = GenerationConfig.from_model_config(model.config)
    save_checkpoint(model, tokenizer, folder, eos_token=END, pad_token=PAD, model_max_length=LENGTH)


def encode(model: T5ForConditionalGeneration, sources: Tensor) -> Tensor:
    """Return the encoder's output.

    Shapes: sources int64 [batch, E]; float [batch, E, width].
    """
    with torch.autocast(sources.device.type, torch.bfloat16):
        hidden: Tensor = model.encoder(
            input_ids=sources, attention_mask=sources.ne(0)
        ).last_hidden_state
    return hidden


def logits_of(
    model: T5ForConditionalGeneration, sources: Tensor, hidden: Tensor, answers: Tensor
) -> Tensor:
    """Return the logits of every token of the answers that is not a padding.

    Shapes: sources int64 [batch, E]; hidden [batch, E, width]; answers int64 [batch, A];
    logits f32 [tokens, vocabulary].
    """
    before = nn.functional.pad(answers, (1, -1))
    with torch.autocast(sources.device.type, torch.bfloat16):
        out = model.decoder(
            input_ids=before,
            encoder_hidden_states=hidden,
            encoder_attention_mask=sources.ne(0),
            use_cache=False,
        ).last_hidden_state[answers.ne(0)]
        logits: Tensor = model.lm_head(out * model.config.d_model**-0.5)
    return logits.float()
