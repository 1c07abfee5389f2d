"""Llama models: making, loading, saving, running."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pair.errors import BadInputError
from pair.tokenizer import END, load_tokenizer

HEAD = 64  # width of an attention head


def new_model(vocabulary: int, width: int, layers: int, window: int) -> LlamaForCausalLM:
    """Return a random Llama: heads of 64, about three queries a key, tied embeddings.

    Raises: BadInputError for a width that heads do not fill.
    """
    heads, odd = divmod(width, HEAD)
    if odd:
        raise BadInputError(f"width {width} is not a multiple of {HEAD}")
    shared = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, heads // 3))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=shared,
        max_position_embeddings=max(2048, window),
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def load_model(folder: Path, tokenizer: Path, device: str) -> LlamaForCausalLM:
    """Read a checkpoint in float32; its tokenizer must be the one the text was cut by.

    Raises: BadInputError where it is not, or there is no Llama that can be read.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise BadInputError(f"no checkpoint: {folder}")
    size = load_tokenizer(folder / "tokenizer.json", tokenizer).get_vocab_size()
    try:
        shape = json.loads(config.read_text("utf8"))
        if shape["model_type"] != "llama" or shape["vocab_size"] < size:
            raise BadInputError(f"not a Llama of {size} tokens: {folder}")
        model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise BadInputError(f"cannot read {folder}: {error}".splitlines()[0]) from None
    nn.Module.to(model, device)
    return model


def save_model(model: LlamaForCausalLM, tokenizer: Path, folder: Path) -> None:
    """Write a Hugging Face checkpoint in bfloat16."""
    length = model.config.max_position_embeddings
    save_checkpoint(
        model, tokenizer, folder,
        bos_token=END, eos_token=END, pad_token=END, model_max_length=length,
    )  # fmt: skip


def save_checkpoint(model: Any, tokenizer: Path, folder: Path, **settings: Any) -> None:
    """Write a model in bfloat16 and its tokenizer, with those settings, in place of `folder`.

    Both are written aside first: a killed run leaves what was there.
    """
    aside, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
    for path in (aside, old):
        shutil.rmtree(path, ignore_errors=True)
    rounded = copy.deepcopy(model)
    nn.Module.to(rounded, torch.bfloat16)
    rounded.save_pretrained(aside)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(tokenizer), **settings
    ).save_pretrained(aside)
    if folder.exists():
        folder.rename(old)
    aside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def logits_of(model: LlamaForCausalLM, windows: Tensor) -> Tensor:
    """Return the logits that every token but the last of each window leads to.

    Shapes: windows int64 [batch, window + 1]; logits f32 [batch * window, vocabulary].
    """
    with torch.autocast(windows.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=windows[:, :-1], use_cache=False).logits
    return logits.float().flatten(0, 1)
