"""Heads that predict several tokens, which lie next to their target's own weights.

Sources: DeepSeek-V3, arXiv:2412.19437; the formats are those of Qwen3-Next and Qwen3.5 (`mtp.*`)
    and of DeepSeek and GLM (a layer after the model's last).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar

from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import WeightBytes
from specrt_export.heads.head_checkpoint import (
    HeadCheckpoint,
    HeadSizes,
    check_shapes,
    check_target,
    with_shared,
)

KIND = "mtp"

_PREFIX, _FIRST = "mtp.", "layers.0."

_OF_DEEPSEEK = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
    "shared_head.norm": "norm", "shared_head.head": "lm_head", "embed_tokens": "embed_tokens",
}  # fmt: skip
"""Modules of a further layer that other layers lack, and what Qwen calls them."""

_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Where a config.json says how many such layers a checkpoint has."""


@dataclass(frozen=True)
class MtpHead(HeadCheckpoint):
    """The head in a checkpoint, held to the target it is for; of several layers it is the first."""

    KIND: ClassVar[str] = KIND
    OF_TARGET: ClassVar[tuple[str, ...]] = ()


def carries_head(checkpoint: Checkpoint) -> bool:
    """Tell whether a model's checkpoint has a head, or says so where it was opened without weights.

    Those that transformers saved lack it, whatever they say.
    """
    if checkpoint.weights:
        return "fc.weight" in _own_weights(checkpoint)
    return any(checkpoint.config.get(key) for key in _COUNTS)


def read_mtp_head(
    checkpoint: Checkpoint, target: Checkpoint, layers: tuple[int, ...] = ()
) -> MtpHead:
    """Read the head that a checkpoint carries.

    Raises: CheckpointError for `layers`, and for what is missing or does not fit the target.
    """
    check_target(target)
    if layers:
        raise CheckpointError(
            f"`layers` in [draft] is {list(layers)}, and the head in {checkpoint.origin} reads the "
            "target's last hidden state; remove it"
        )
    own = _own_weights(checkpoint)
    if "fc.weight" not in own:
        raise CheckpointError(
            f"{checkpoint.origin} has no mtp.fc.weight, and no eh_proj.weight in a layer after the "
            "last, so no head that predicts several tokens; a checkpoint that transformers saved "
            "lacks it: fetch its publisher's, or name another draft"
        )
    vocabulary, width = target.number("vocab_size"), target.number("hidden_size")
    inputs = (target.number("num_hidden_layers"),)
    config = HeadSizes(target.config, 1, vocabulary, vocabulary, width, width, inputs)
    weights, shapes = with_shared(target, own, config), _shapes_of(config)
    named = {name: weight for name, weight in weights.items() if name in shapes}
    check_shapes(checkpoint, named, config, shapes, "head of MTP")
    return MtpHead(replace(checkpoint, weights=MappingProxyType(own)), config, weights, None)


def _own_weights(checkpoint: Checkpoint) -> dict[str, WeightBytes]:
    """Return the weights of the head in a checkpoint, as Qwen names them."""
    further = f"layers.{checkpoint.config.get('num_hidden_layers')}."
    found = {}
    for stored, weight in checkpoint.weights.items():
        name = stored.removeprefix("model.")
        if name.startswith(further):
            module, _, kind = name.removeprefix(further).rpartition(".")
            found[f"{_OF_DEEPSEEK.get(module, _FIRST + module)}.{kind}"] = weight
        elif name.startswith(_PREFIX):
            found[name.removeprefix(_PREFIX)] = weight
    return {n: w for n, w in found.items() if n.startswith(_FIRST) or not n.startswith("layers.")}


def _shapes_of(config: HeadSizes) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of what both formats hold next to a layer of the target's type."""
    width = config.width
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {
        "embed_tokens.weight": (config.vocabulary, width),
        "lm_head.weight": (config.scored, width),
        "fc.weight": (width, 2 * width),
        **{f"{norm}.weight": (width,) for norm in norms},
    }
