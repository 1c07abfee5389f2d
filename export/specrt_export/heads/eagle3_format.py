"""Checkpoints of EAGLE-3 heads, in the two formats that there are: what they say, and their names.

Sources: EAGLE-3, Li et al. 2025, arXiv:2503.01840; the formats are those that the repositories
    SafeAILab/EAGLE and vllm-project/speculators write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint, names_head
from specrt_export.safetensors_file import WeightBytes
from specrt_export.scored_entries import NAME, SIZE, read_entries

KIND = "eagle3"

HIDDEN = "hidden"
"""The input of a head's graph that nothing else has: what each token is paired with."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

_IGNORED = ("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")

_LAYER_TYPES = ("llama", "qwen3")

_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadConfig:
    """The sizes of a head, and how it is wired."""

    layer: Mapping[str, Any]
    """Of its decoder layers, as the config.json of a model of such layers would say it."""
    layers: int
    vocabulary: int
    """Ids that it is fed: those of the target."""
    scored: int
    """Entries that it scores."""
    width: int
    """Of its hidden states, and so of a feature."""
    target_width: int
    inputs: tuple[int, ...]
    """The layers of the target whose input it reads; 0 reads the embeddings."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class Head:
    """A checkpoint of a head, held to the target it is for."""

    checkpoint: Checkpoint
    config: HeadConfig
    weights: Mapping[str, WeightBytes]
    """By the names of `eagle3_module`; `embed_tokens` and `lm_head` may be the target's own."""
    entries: NDArray[np.int64] | None
    """The target's id of each entry that it scores, rising; None where it scores all."""
    guess: str = ""
    """Why the layers it reads are a guess, and how to say them; empty where they are not."""


_OF_TARGET = ("fc.", "input_norm.", "fc_norm.")


def feature_weights(head: Head) -> dict[str, WeightBytes]:
    """Return the weights that the target's graph has for a head."""
    return {name: weight for name, weight in head.weights.items() if name.startswith(_OF_TARGET)}


def own_weights(head: Head) -> dict[str, WeightBytes]:
    """Return the weights that the head's own graph has."""
    theirs = feature_weights(head)
    return {name: weight for name, weight in head.weights.items() if name not in theirs}


def is_head(checkpoint: Checkpoint) -> bool:
    """Tell the checkpoint of a head from that of a model, by its config.json or its weights."""
    told = {"fc.weight", "midlayer.hidden_norm.weight"}
    return names_head(checkpoint.config) or told <= set(checkpoint.weights)


def read_head(checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...] = ()) -> Head:
    """Read a head of either format, for a target; `layers` replaces those that it names.

    Raises: CheckpointError for what is missing, unknown, or does not fit the target.
    """
    if target.source is not None:
        raise CheckpointError(
            f"{target.origin} is quantized already, and a head reads the hidden states of a "
            "checkpoint of floats; name that one as the target"
        )
    weights = {_name(name): weight for name, weight in checkpoint.weights.items()}
    weights = {name: weight for name, weight in weights.items() if name not in _IGNORED}
    config, guess = _read_config(checkpoint, target, layers, weights)
    entries = read_entries(checkpoint, weights.pop(NAME, None), config.scored, config.vocabulary)
    weights = _with_shared(checkpoint, target, weights, config)
    _check_shapes(checkpoint, weights, config)
    return Head(checkpoint, config, weights, entries, guess)


def _name(stored: str) -> str:
    return stored.removeprefix("model.").replace("midlayer.", "layers.0.", 1)


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
    vocabulary = _whole(target, "vocab_size")
    width, count = _whole(checkpoint, "hidden_size", layer), layer.get("num_hidden_layers", 1)
    if "fc.weight" not in weights or "layers.0.hidden_norm.weight" not in weights:
        raise CheckpointError(
            f"{origin} has no fc.weight and hidden_norm.weight, which an EAGLE-3 head has; "
            "earlier kinds of heads are not supported: train one of EAGLE-3"
        )
    ids, guess = _inputs(checkpoint, _whole(target, "num_hidden_layers"), layers)
    scored = config.get(SIZE) or config.get("truncated_vocab_size") or vocabulary
    if layer.get("rope_theta") is None and layer.get("rope_parameters") is None:
        layer["rope_theta"] = 10000.0
    flags = {flag: bool(config.get(flag, False)) for flag in _FLAGS}
    return HeadConfig(
        layer, int(count), vocabulary, int(scored), width, _whole(target, "hidden_size"), ids,
        **flags,
    ), guess  # fmt: skip


def _inputs(
    checkpoint: Checkpoint, there: int, asked: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """Return the layers whose inputs a head reads, and why they are a guess if they are."""
    config, guess = checkpoint.config, ""
    told = config.get(_IDS)
    outputs = (config.get("eagle_config") or {}).get(_IDS)
    if asked:
        ids = asked
    elif told is not None:
        ids = tuple(told)
    elif outputs is not None:
        ids = tuple(number + 1 for number in outputs)  # the output of one is the input of the next
    else:
        ids = (2, there // 2, there - 3)
        guess = (
            f"{checkpoint.origin} does not say which layers it reads; taken for the inputs of "
            f"{', '.join(map(str, ids))}, as most are trained: `layers` in [draft] says others"
        )
    if not ids or any(type(i) is not int or not 0 <= i < there for i in ids):
        raise CheckpointError(
            f"{checkpoint.origin} reads the inputs of layers {list(ids)} of a target of {there}; "
            f"expected numbers from 0 to {there - 1}: set `layers` in [draft]"
        )
    return ids, guess


def _whole(checkpoint: Checkpoint, key: str, config: Mapping[str, Any] | None = None) -> int:
    value = (checkpoint.config if config is None else config).get(key)
    if type(value) is not int or value < 1:
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'} has {key} {value!r}; expected a whole number "
            "above 0: fetch the checkpoint again"
        )
    return value


def _with_shared(
    checkpoint: Checkpoint, target: Checkpoint, weights: dict[str, WeightBytes],
    config: HeadConfig,
) -> dict[str, WeightBytes]:  # fmt: skip
    """Return weights with those of the target where a head has none of its own."""
    found = dict(weights)
    theirs = {name.removeprefix("model."): weight for name, weight in target.weights.items()}
    tied = theirs.get("lm_head.weight", theirs.get("embed_tokens.weight"))
    shared = {"embed_tokens.weight": theirs.get("embed_tokens.weight")}
    if config.scored == config.vocabulary:
        shared["lm_head.weight"] = tied
    for name, weight in shared.items():
        if name not in found and weight is not None:
            found[name] = weight
    return found


def shapes_of(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what both formats hold beside the usual weights of a layer."""
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


def _check_shapes(
    checkpoint: Checkpoint, weights: Mapping[str, WeightBytes], config: HeadConfig
) -> None:
    for name, shape in shapes_of(config).items():
        stored = weights.get(name)
        if stored is None or stored.shape != shape:
            has = "nothing" if stored is None else str(list(stored.shape))
            raise CheckpointError(
                f"{checkpoint.origin}: {name} is {has}; expected {list(shape)} for a target of "
                f"width {config.target_width} and {config.vocabulary} entries. Is the head of "
                "this target?"
            )
    known = set(shapes_of(config))
    odd = [n for n in weights if n not in known and not n.startswith("layers.")]
    if odd:
        raise CheckpointError(
            f"{checkpoint.origin} holds {odd[0]}, which no EAGLE-3 head that specrt knows has; "
            "fetch it again, or report it"
        )
