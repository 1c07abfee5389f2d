"""Checkpoints of Gemma 4's assistants: heads that attend to the keys and values of their target.

Source: the format is what transformers writes of `gemma4_assistant` and `gemma4_unified_assistant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import map_array
from specrt_export.heads.head_checkpoint import HeadCheckpoint, HeadSizes, check_target

KIND = "gemma4_assistant"

TARGETS = ("gemma4_text", "gemma4_unified_text")

EMBEDDING = "target.embed_tokens.weight"
"""The target's table, next to the weights of an assistant."""

_ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True)
class AssistantConfig(HeadSizes):
    """The sizes of an assistant, and the configurations that its layers and its target are of."""

    whole: Mapping[str, Any]
    """Its config.json."""
    target: Mapping[str, Any]
    """The config.json of the target's text part."""
    order: NDArray[np.int64] | None = None
    """The ids of all entries, cluster by cluster; None where all are scored."""

    @property
    def least_length(self) -> int:
        """See `HeadSizes`."""
        return 2


@dataclass(frozen=True)
class Assistant(HeadCheckpoint):
    """A checkpoint of an assistant, held to the target it is for."""

    KIND: ClassVar[str] = KIND
    OF_TARGET: ClassVar[tuple[str, ...]] = ()

    config: AssistantConfig


def read_assistant(
    checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...] = ()
) -> Assistant:
    """Read an assistant, for a target.

    Raises: CheckpointError for what is missing, unknown, or does not fit the target.
    """
    check_target(target)
    origin, weights = checkpoint.origin, dict(checkpoint.weights)
    kind, text = target.config.get("model_type"), checkpoint.config.get("text_config")
    if kind not in TARGETS or not isinstance(text, dict):
        raise CheckpointError(
            f"{origin} is an assistant of Gemma 4, and {target.origin} is of type {kind!r}; "
            f"expected a text_config in its config.json, and a target of {' or '.join(TARGETS)}"
        )
    if layers:
        raise CheckpointError(
            f"{origin} reads what its target's last layer leaves, and draft.layers is "
            f"{list(layers)}; remove it"
        )
    width, vocabulary = target.number("hidden_size"), target.number("vocab_size")
    for name, told, own in (
        ("backbone_hidden_size", checkpoint.config.get("backbone_hidden_size"), width),
        ("vocab_size", text.get("vocab_size"), vocabulary),
    ):
        if told != own:
            raise CheckpointError(
                f"{origin} has {name} {told!r}, and its target {own}. Is it of this target?"
            )
    tables = (target.weights.get(name) for name in ("model.embed_tokens.weight", EMBEDDING[7:]))
    table = next((one for one in tables if one is not None), None)
    if table is None:
        raise CheckpointError(
            f"{target.origin} holds no embed_tokens.weight, which an assistant reads; fetch it "
            "again"
        )
    config = AssistantConfig(
        layer=text, layers=checkpoint.number("num_hidden_layers", text), vocabulary=vocabulary,
        scored=vocabulary, width=width, target_width=width,
        inputs=(target.number("num_hidden_layers"),), whole=checkpoint.config,
        target=target.config, order=_order(checkpoint, vocabulary),
    )  # fmt: skip
    weights.pop(_ORDER, None)
    return Assistant(checkpoint, config, {**weights, EMBEDDING: table}, None)


def _order(checkpoint: Checkpoint, vocabulary: int) -> NDArray[np.int64] | None:
    """Return the ids of entries by cluster, where an assistant scores some clusters only.

    Raises: CheckpointError where it does not have each id once.
    """
    if not checkpoint.config.get("use_ordered_embeddings"):
        return None
    stored = checkpoint.weights.get(_ORDER)
    order = None if stored is None else map_array(stored).astype(np.int64).ravel()
    if order is None or not np.array_equal(np.sort(order), np.arange(vocabulary)):
        raise CheckpointError(
            f"{checkpoint.origin} has use_ordered_embeddings, and its {_ORDER} is "
            f"{'missing' if order is None else 'no order of all ids'}; expected each id below "
            f"{vocabulary} once: fetch it again"
        )
    return order
