"""The config.json of a grown checkpoint, and which configs cannot be grown."""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from growth.family import LLAMA, Family
from growth.shape import Shape
from specrt.errors import CheckpointError

NOTE = "specrt_inflated_from"
ROTARIES = ("default", "linear", "llama3")
"""Scalings that look at an angle alone, not at which dimension has it."""


def check_config(config: Mapping[str, Any], family: Family, name: str) -> None:
    """Refuse a config from which no grown one can be made.

    Raises: CheckpointError naming the setting.
    """
    for key in ("vocab_size", *family.sizes.values()):
        size = config.get(key)
        if type(size) is not int or size < 1:
            raise CheckpointError(f"{name}: {key} is {size!r}; expected a positive number")
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, dict):
            raise CheckpointError(f"{name}: {key} is {config[key]!r}; expected an object")
    _check_layer_types(config, name)
    eps = config.get(family.epsilon)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or eps < 0:
        raise CheckpointError(
            f"{name}: {family.epsilon} is {eps!r}; expected a number of 0 or more"
        )


def _check_layer_types(config: Mapping[str, Any], name: str) -> None:
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is None or (
        isinstance(kinds, list) and len(kinds) == layers and all(isinstance(k, str) for k in kinds)
    ):
        return
    raise CheckpointError(
        f"{name}: layer_types is {short(kinds)}; expected one word for each of {short(layers)} "
        "layers"
    )


def check_rotary(config: Mapping[str, Any], old: Shape, new: Shape) -> None:
    """Refuse wider heads where the angles depend on more than theta and position.

    Raises: CheckpointError naming the setting.
    """
    if new.head_dim == old.head_dim:
        return
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in ROTARIES:
        raise CheckpointError(
            f"head_dim cannot grow from {old.head_dim} to {new.head_dim} with rope_type {kind!r}; "
            f"keep head_dim {old.head_dim} (angles carry over with {', '.join(ROTARIES)})"
        )
    for place in (rotary, config):
        share = place.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise CheckpointError(
                f"head_dim cannot grow from {old.head_dim} to {new.head_dim} with "
                f"partial_rotary_factor {share}; keep head_dim {old.head_dim}"
            )


def grown_config(
    config: Mapping[str, Any], old: Shape, new: Shape, dtype: str, note: str, family: Family = LLAMA
) -> dict[str, Any]:
    """Return the config of the grown model."""
    grown = dict(config)
    for name, key in family.keys.items():
        grown[key] = getattr(new, name)
    # rsqrt(mean + eps) of the longer vector is sqrt(new/old) of what it was only if eps shrinks
    # with the mean.
    grown[family.epsilon] = config[family.epsilon] * old.hidden_size / new.hidden_size
    grown["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    kinds = config.get("layer_types")
    if kinds:
        grown["layer_types"] = [*kinds, *[kinds[-1]] * (new.layers - old.layers)]
    grown[NOTE] = note
    return dict(sorted(grown.items()))
