"""Checkpoints of heads that draft a block in one pass: DFlash and DSpark, in their formats.

Sources: the formats are those that the repositories z-lab/dflash (one flat config.json, its numbers
    in `dflash_config`), deepseek-ai/DeepSpec (flat) and vllm-project/speculators write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specrt.engine.protocol import MOST_OF_BLOCK
from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint, head_names
from specrt_export.checkpoint.scored_entries import NAME, SIZE, read_entries
from specrt_export.heads.head_checkpoint import (
    HeadCheckpoint,
    HeadSizes,
    behind,
    check_shapes,
    check_target,
    inputs_of,
    stored_weights_of,
    with_shared,
)

KIND = "dflash"

CONTEXT = "context"
"""The input of a block head's graph that nothing else has: features of positions before a block."""

CONFIDENCE = "confidence"
"""The output of a graph with a confidence head: how likely each drafted token is accepted; log odds
where it reads the token before."""

PREVIOUS = "previous"
"""The input of a graph with a Markov head: tokens [B, N] whose next ones are asked about."""

MARKOV = "markov"
"""Its output: what a token adds to the scores of the next one, [B, N, entries]."""

MARKOV_CONFIDENCE = "markov_confidence"
"""What it adds to the log odds that the next one is accepted, [B, N]."""

_MARKOV = "vanilla"

_LAYER_TYPES = ("llama", "qwen3")

_ROTATED = re.compile(r"\.[qk]_(proj|norm)\.")

_WINDOWED, _FULL = "sliding_attention", "full_attention"

_SECOND = ("conv_kernel_size", "selector_rank")
"""Options that only the second version of DFlash has."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "input_embedding_scale": (None, 1, 1.0),
}
"""Options of the formats, and the values at which they change nothing."""


@dataclass(frozen=True)
class BlockConfig(HeadSizes):
    """The sizes of a block head, and how it is wired."""

    block_size: int
    """Positions of a block: the last committed token, and mask tokens after it."""
    mask_token_id: int
    predicts_next: bool
    """Whether a position of a block scores the token after it (DSpark), or its own (DFlash)."""
    windows: tuple[int, ...]
    """Per layer, how many latest positions it sees; 0 for all."""
    causal: tuple[bool, ...]
    """Per layer, whether a position sees nothing after it in the block."""
    has_confidence: bool = False
    markov_rank: int = 0
    """Rank of the scores that a token adds to the next one's; 0 where it adds none."""
    confidence_reads_markov: bool = False
    interleaved: bool = False
    """Whether neighbouring numbers of queries and keys are rotated together, as LFM2.5's drafts
    have it, and not those of the halves of a head."""

    @property
    def least_length(self) -> int:
        """See `HeadSizes`: a block after one token."""
        return self.block_size + 1

    @property
    def drafts(self) -> int:
        """Tokens that a pass drafts."""
        return self.block_size - (not self.predicts_next)


@dataclass(frozen=True)
class BlockHead(HeadCheckpoint):
    """A checkpoint of a block head, held to the target it is for."""

    KIND: ClassVar[str] = KIND
    OF_TARGET: ClassVar[tuple[str, ...]] = ("fc.", "hidden_norm.")

    config: BlockConfig

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Take the halves of each head of queries and keys apart, since graphs rotate halves.

        stored  a0 b0 a1 b1 a2 b2 …    rotated in pairs (a, b)
        wanted  a0 a1 a2 … b0 b1 b2 …
        """
        if not self.config.interleaved or not _ROTATED.search(name):
            return None
        stored = np.arange(self.weights[name].shape[0])
        pairs = stored.reshape(-1, _head_dim(self.config) // 2, 2)
        return pairs.swapaxes(1, 2).reshape(-1)


def read_block_head(
    checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...] = ()
) -> BlockHead:
    """Read a block head of any format, for a target; `layers` replaces those that it names.

    Raises: CheckpointError for what is missing, unknown, or does not fit the target.
    """
    check_target(target)
    _check_options(checkpoint)
    weights = stored_weights_of(checkpoint)
    config, guess = _read_config(checkpoint, target, layers)
    entries = read_entries(checkpoint, weights.pop(NAME, None), config.scored, config.vocabulary)
    weights = with_shared(target, weights, config)
    check_shapes(checkpoint, weights, config, shapes_of(config), "block head")
    return BlockHead(checkpoint, config, weights, entries, guess)


def _options(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the options of a head, `dflash_config` included."""
    nested = checkpoint.config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(
            f"{checkpoint.origin} has dflash_config {nested!r}; expected an object: fetch the "
            "checkpoint again"
        )
    return {**checkpoint.config, **nested}


def _check_options(checkpoint: Checkpoint) -> None:
    options, origin = _options(checkpoint), checkpoint.origin
    named = any("dflash2" in name.lower() for name in head_names(checkpoint.config))
    if named or any(options.get(key) for key in _SECOND):
        raise CheckpointError(
            f"{origin} is a head of the second version of DFlash, and specrt has neither its "
            "convolutions around each attention and MLP nor its path selector, which scores a pair "
            "of tokens by the state of the second: use a head of the first version, of DSpark or "
            "of EAGLE-3"
        )
    for key, plain in _PLAIN.items():
        if options.get(key) not in plain:
            raise CheckpointError(
                f"{origin} has {key} {options[key]!r}, and block heads with it are not supported "
                "yet: use one without"
            )
    kind = str(options.get("markov_head_type") or _MARKOV).lower()
    if options.get("markov_rank") and kind != _MARKOV:
        raise CheckpointError(
            f"{origin} has markov_head_type {kind!r}, which is not supported yet; expected "
            f"{_MARKOV!r}"
        )
    if options.get("markov_rank") and options.get(SIZE) not in (None, options.get("vocab_size")):
        raise CheckpointError(
            f"{origin} has a Markov head and scores {options[SIZE]} entries only, which is not "
            "supported yet; use a head that scores all"
        )


def _read_config(
    checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...]
) -> tuple[BlockConfig, str]:
    options, origin = _options(checkpoint), checkpoint.origin
    nested = options.get("transformer_layer_config")
    layer = dict(nested if isinstance(nested, dict) else checkpoint.config)
    if layer.get("model_type") not in _LAYER_TYPES:
        raise CheckpointError(
            f"{origin} is a block head of layers of {layer.get('model_type')!r}; expected one of "
            f"{', '.join(_LAYER_TYPES)}"
        )
    vocabulary = target.number("vocab_size")
    count = checkpoint.number("num_hidden_layers", layer)
    for key in ("num_attention_heads", "intermediate_size"):
        checkpoint.number(key, layer)
    for key in ("num_key_value_heads", "head_dim"):
        checkpoint.number(key, layer, 1)
    heads, shared = layer["num_attention_heads"], layer.get("num_key_value_heads")
    if heads % (shared or heads):
        raise CheckpointError(
            f"{origin} has num_attention_heads {heads} and num_key_value_heads {shared}; expected "
            "a multiple of the second: fetch the checkpoint again"
        )
    ids, guess = _inputs(checkpoint, target, count, layers)
    size = checkpoint.number("block_size", options, least=2)
    mask = checkpoint.number("mask_token_id", options, least=0)
    if size > MOST_OF_BLOCK or mask >= vocabulary:
        raise CheckpointError(
            f"{origin} has block_size {size} and mask_token_id {mask}; expected a block of up to "
            f"{MOST_OF_BLOCK} positions, and a token below {vocabulary}"
        )
    is_dspark = any("dspark" in name.lower() for name in head_names(checkpoint.config))
    windows, causal = _attention(checkpoint, options, layer, count)
    rank = checkpoint.number("markov_rank", options, least=0) if options.get("markov_rank") else 0
    confident = is_dspark and bool(options.get("enable_confidence_head"))
    reads = confident and rank > 0 and bool(options.get("confidence_head_with_markov", True))
    halves = options.get("rope_is_neox_style", options.get("is_neox_style", True))
    return BlockConfig(
        layer=layer, layers=count, vocabulary=vocabulary,
        scored=checkpoint.number(SIZE, options, vocabulary),
        width=checkpoint.number("hidden_size", layer),
        target_width=target.number("hidden_size"), inputs=ids,
        block_size=size, mask_token_id=mask,
        predicts_next=bool(options.get("sample_from_anchor", is_dspark)),
        windows=windows, causal=causal,
        has_confidence=confident, markov_rank=rank, confidence_reads_markov=reads,
        interleaved=not halves,
    ), guess  # fmt: skip


def _attention(
    checkpoint: Checkpoint, options: Mapping[str, Any], layer: Mapping[str, Any], count: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return the windows of the layers, and which of them are causal in a block.

    Unless a checkpoint says otherwise, layers with a window are, and those without are not.
    """
    types = layer.get("layer_types")
    types = [_FULL] * count if types is None else types
    if (
        not isinstance(types, list)
        or len(types) != count
        or any(kind not in (_FULL, _WINDOWED) for kind in types)
    ):
        raise CheckpointError(
            f"{checkpoint.origin} has layer_types {types!r}; expected {_FULL} or {_WINDOWED} for "
            f"each of {count} layers"
        )
    if layer.get("use_sliding_window") and layer.get("layer_types") is None:
        raise CheckpointError(
            f"{checkpoint.origin} has use_sliding_window and no layer_types that say which layers "
            "it is about; expected them in config.json"
        )
    windowed, window = _WINDOWED in types, 0
    if windowed and layer.get("use_sliding_window", True):
        window = checkpoint.number("sliding_window", layer)
    told = next((options[k] for k in ("causal", "is_causal") if options.get(k) is not None), None)
    usual = not options.get("sliding_window_non_causal", False) if told is None else bool(told)
    causal = [usual and (kind == _WINDOWED or told is not None) for kind in types]
    return tuple(window if kind == _WINDOWED else 0 for kind in types), tuple(causal)


def _inputs(
    checkpoint: Checkpoint, target: Checkpoint, count: int, asked: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """Return the layers whose inputs a head reads, and why they are a guess if they are.

    `target_layer_ids` are layers whose outputs it reads, -1 the embeddings;
    `aux_hidden_state_layer_ids` those whose inputs.
    """
    options = _options(checkpoint)
    there = target.number("num_hidden_layers")
    trained = options.get("num_target_layers")
    if trained not in (None, there):
        raise CheckpointError(
            f"{checkpoint.origin} was trained for a target of {trained} layers, and "
            f"{target.origin} has {there}; name its own target"
        )
    first, last = 1, there - 3
    steps = [first + i * (last - first) / max(1, count - 1) for i in range(count)]
    usual = [1 + (there // 2 if count == 1 else round(step)) for step in steps]
    read, made = options.get("aux_hidden_state_layer_ids"), options.get("target_layer_ids")
    return inputs_of(checkpoint, there, (asked or None, read, behind(made)), usual)


def shapes_of(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a block head holds, biases of its layers aside."""
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocabulary, width),
        "lm_head.weight": (config.scored, width),
        "norm.weight": (width,),
        "fc.weight": (width, len(config.inputs) * config.target_width),
        "hidden_norm.weight": (width,),
    }
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{n}.weight": shape for n, shape in _layer_shapes(config).items()}
    rank = config.markov_rank
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocabulary, rank)
        shapes["markov_head.markov_w2.weight"] = (config.scored, rank)
    if config.has_confidence:
        read = width + rank * config.confidence_reads_markov
        shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    return shapes


def _head_dim(config: BlockConfig) -> int:
    """Return the numbers of a query."""
    layer = config.layer
    return int(layer.get("head_dim") or config.width // layer["num_attention_heads"])


def _layer_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    layer, width, size = config.layer, config.width, _head_dim(config)
    heads, inner = layer["num_attention_heads"], layer["intermediate_size"]
    queries, keys = heads * size, (layer.get("num_key_value_heads") or heads) * size
    return {
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, queries),
        "self_attn.q_norm": (size,), "self_attn.k_norm": (size,),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip


def block_facts(config: BlockConfig) -> dict[str, int | bool]:
    """Return what an engine of a block head has to know to be fed: see `BLOCK` of the runtime."""
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "drafts": config.drafts,
        "chained": config.markov_rank > 0,
    }
