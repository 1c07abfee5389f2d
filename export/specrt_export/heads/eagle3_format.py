"""Checkpoints of EAGLE-3 heads, in the two formats that there are: what they say, and their names.

Sources: EAGLE-3, Li et al. 2025, arXiv:2503.01840; the formats are those that the repositories
    SafeAILab/EAGLE and vllm-project/speculators write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import WeightBytes
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

KIND = "eagle3"

HIDDEN = "hidden"
"""The input of a head's graph that nothing else has: what each token is paired with."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_LAYER_TYPES = ("llama", "qwen3")

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadConfig(HeadSizes):
    """The sizes of a head, and how it is wired."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Head(HeadCheckpoint):
    """A checkpoint of an EAGLE-3 head, held to the target it is for."""

    KIND: ClassVar[str] = KIND
    OF_TARGET: ClassVar[tuple[str, ...]] = ("fc.", "input_norm.", "fc_norm.")

    config: HeadConfig


def read_head(checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...] = ()) -> Head:
    """Read a head of either format, for a target; `layers` replaces those that it names.

    Raises: CheckpointError for what is missing, unknown, or does not fit the target.
    """
    check_target(target)
    named = stored_weights_of(checkpoint)
    weights = {name.replace("midlayer.", "layers.0.", 1): w for name, w in named.items()}
    config, guess = _read_config(checkpoint, target, layers, weights)
    entries = read_entries(checkpoint, weights.pop(NAME, None), config.scored, config.vocabulary)
    weights = with_shared(target, weights, config)
    check_shapes(checkpoint, weights, config, shapes_of(config), "EAGLE-3 head")
    return Head(checkpoint, config, weights, entries, guess)


def _read_config(
    checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...],
    weights: Mapping[str, WeightBytes],
) -> tuple[HeadConfig, str]:  # fmt: skip
    config, origin = checkpoint.config, checkpoint.origin
    nested = config.get("transformer_layer_config")
    layer = dict(nested if isinstance(nested, dict) else config)
    if layer.get("model_type") not in _LAYER_TYPES:
        raise CheckpointError(
            f"{origin} is a head of layers of {layer.get('model_type')!r}; expected one of "
            f"{', '.join(_LAYER_TYPES)}"
        )
    vocabulary = target.number("vocab_size")
    width = checkpoint.number("hidden_size", layer)
    count = checkpoint.number("num_hidden_layers", layer, 1)
    if "fc.weight" not in weights or "layers.0.hidden_norm.weight" not in weights:
        raise CheckpointError(
            f"{origin} has no fc.weight and hidden_norm.weight, which an EAGLE-3 head has; "
            "earlier kinds of heads are not supported: train one of EAGLE-3"
        )
    there, old = target.number("num_hidden_layers"), config.get("eagle_config")
    outputs = old.get(_IDS) if isinstance(old, dict) else None
    named = layers or None, config.get(_IDS), behind(outputs)
    ids, guess = inputs_of(checkpoint, there, named, (2, there // 2, there - 3))
    scored = checkpoint.number("truncated_vocab_size", config, vocabulary)
    scored = checkpoint.number(SIZE, config, scored)
    if layer.get("rope_theta") is None and layer.get("rope_parameters") is None:
        layer["rope_theta"] = 10000.0
    flags = {flag: bool(config.get(flag, False)) for flag in _FLAGS}
    return HeadConfig(
        layer, count, vocabulary, scored, width, target.number("hidden_size"),
        ids, **flags,
    ), guess  # fmt: skip


def shapes_of(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what both formats hold next to the usual weights of a layer."""
    width, read = config.width, len(config.inputs) * config.target_width
    shapes = {
        "embed_tokens.weight": (config.vocabulary, width),
        "lm_head.weight": (config.scored, width),
        "norm.weight": (width,),
        "fc.weight": (width, read),
        "layers.0.hidden_norm.weight": (width,),
        "layers.0.input_layernorm.weight": (width,),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (read,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (config.target_width,) for i in range(len(config.inputs))}
    return shapes
