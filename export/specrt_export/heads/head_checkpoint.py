"""Checkpoints of heads: what all formats have, held to the target that a head is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import WeightBytes, map_array

_IGNORED = ("t2d", "rotary_emb.inv_freq")
"""Ends of the names of what a checkpoint may hold and nothing reads."""


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of a head, and what it reads of its target."""

    layer: Mapping[str, Any]
    """Of its decoder layers, as the config.json of a model of such layers would say it."""
    layers: int
    vocabulary: int
    """Ids that it is fed: the target's."""
    scored: int
    """Entries that it scores."""
    width: int
    """Of its hidden states, and so of a feature."""
    target_width: int
    inputs: tuple[int, ...]
    """The layers of the target whose input it reads; 0 reads the embeddings."""

    @property
    def least_length(self) -> int:
        """Fewest positions of the KV buffers in which it can draft at all."""
        return 3


@dataclass(frozen=True)
class HeadCheckpoint:
    """A checkpoint of a head, held to the target it is for."""

    KIND: ClassVar[str]
    """Its format, as `HEAD_FORMATS` and manifests name it."""
    OF_TARGET: ClassVar[tuple[str, ...]]
    """How the names of weights begin that the target's graph has for it."""

    checkpoint: Checkpoint
    config: HeadSizes
    weights: Mapping[str, WeightBytes]
    """By the names of its torch module; `embed_tokens` and `lm_head` may be the target's own."""
    entries: NDArray[np.int64] | None
    """The target's id of each entry that it scores, rising; None where it scores all."""
    guess: str = ""
    """Why the layers it reads are a guess, and how to say them; empty where they are not."""

    def order(self, name: str) -> NDArray[np.int64] | None:
        """Return which stored row is where in a graph's weight; None where each is in its place."""
        return None

    def array(self, name: str) -> NDArray[Any]:
        """Return a weight as a graph has it."""
        stored, order = map_array(self.weights[name]), self.order(name)
        return stored if order is None else stored[order]


def feature_weights(head: HeadCheckpoint) -> dict[str, WeightBytes]:
    """Return the weights that the target's graph has for a head."""
    return {name: w for name, w in head.weights.items() if name.startswith(head.OF_TARGET)}


def own_weights(head: HeadCheckpoint, file: Path) -> dict[str, WeightBytes]:
    """Return the weights that the head's own graph has; those in another order go to `file`."""
    own = {name: w for name, w in head.weights.items() if not name.startswith(head.OF_TARGET)}
    with file.open("wb") as out:
        for name, weight in own.items():
            if head.order(name) is not None:
                own[name] = replace(weight, file=file, offset=out.tell())
                out.write(head.array(name).tobytes())
    return own


def stored_weights_of(checkpoint: Checkpoint) -> dict[str, WeightBytes]:
    """Return the weights of a head by name, without the prefix and those that say nothing new."""
    named = {name.removeprefix("model."): weight for name, weight in checkpoint.weights.items()}
    return {name: weight for name, weight in named.items() if not name.endswith(_IGNORED)}


def check_target(target: Checkpoint) -> None:
    """Refuse a target whose hidden states no head was trained on.

    Raises: CheckpointError.
    """
    if target.source is not None:
        raise CheckpointError(
            f"{target.origin} is quantized already, and a head reads the hidden states of a "
            "checkpoint of floats; name that one as the target"
        )


def behind(outputs: Any) -> Any:
    """Return the layers that read the outputs of others; what is not a list of numbers stays."""
    if not isinstance(outputs, list):
        return outputs
    return [i + 1 if type(i) is int else i for i in outputs]


def inputs_of(
    checkpoint: Checkpoint, there: int, named: Sequence[Any], usual: Sequence[int]
) -> tuple[tuple[int, ...], str]:
    """Return the layers whose inputs a head reads, and why they are a guess if they are.

    Of what `named` may say the first that is there counts, then the `usual` layers.
    Raises: CheckpointError for what is not a list, none, and for layers that are not there.
    """
    ids, guess = next((one for one in named if one is not None), None), ""
    if ids is None:
        ids = usual
        guess = (
            f"{checkpoint.origin} does not say which layers it reads; taken for the inputs of "
            f"{', '.join(map(str, ids))}, as most are trained: `layers` in [draft] says others"
        )
    ids = list(ids) if isinstance(ids, tuple) else ids
    known = isinstance(ids, list) and all(type(i) is int and 0 <= i < there for i in ids)
    if not known or not ids:
        raise CheckpointError(
            f"{checkpoint.origin} reads the inputs of layers {ids!r} of a target of {there}; "
            f"expected numbers from 0 to {there - 1}: set `layers` in [draft]"
        )
    return tuple(ids), guess


def with_shared(
    target: Checkpoint, weights: Mapping[str, WeightBytes], config: HeadSizes
) -> dict[str, WeightBytes]:
    """Return weights, the target's where a head has none of its own."""
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


def check_shapes(
    checkpoint: Checkpoint, weights: Mapping[str, WeightBytes], config: HeadSizes,
    shapes: Mapping[str, tuple[int, ...]], what: str,
) -> None:  # fmt: skip
    """Hold weights to the shapes that they have in a format; `what` names a head of it.

    Raises: CheckpointError for what is missing, of another shape, or would not be read.
    """
    for name, shape in shapes.items():
        stored = weights.get(name)
        if stored is None or stored.shape != shape:
            has = "nothing" if stored is None else str(list(stored.shape))
            raise CheckpointError(
                f"{checkpoint.origin}: {name} is {has}; expected {list(shape)} for a target of "
                f"width {config.target_width} and {config.vocabulary} entries. Is the head of "
                "this target?"
            )
    odd = [name for name in weights if name not in shapes and not _of_layers(name, config)]
    if odd:
        raise CheckpointError(
            f"{checkpoint.origin} holds {odd[0]}, which no {what} that specrt knows has; "
            "fetch it again, or report it"
        )


def _of_layers(name: str, config: HeadSizes) -> bool:
    """Tell whether a weight is of one of the layers: a bias, where these have some, or another."""
    room, number, *_ = [*name.split("."), ""]
    biased = config.layer.get("attention_bias") or config.layer.get("mlp_bias")
    there = room == "layers" and number.isdecimal() and int(number) < config.layers
    return there and bool(biased or not name.endswith(".bias"))
