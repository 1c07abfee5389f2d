"""Grow one weight: old entries in their places, the rest as its kind wants it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from growth.family import Around
from growth.layout import Plan
from specrt.errors import CheckpointError
from specrt_export.checkpoint.safetensors_file import WeightBytes

Weights = NDArray[np.float32]
DTYPES: Mapping[str, tuple[str, int]] = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
}
"""Of each dtype: what safetensors calls it, and its bytes."""


def stored_dtype(plan: Plan, dtype: str) -> str:
    """Return the dtype a weight is written in.

    The scale of a norm stays float32: rescaled, it is not a number of a shorter type any more.
    """
    return "float32" if plan.kind.around in (Around.MEAN, Around.ONE) else dtype


def grow(plan: Plan) -> Weights:
    """Make one weight of the grown model in float32."""
    if plan.below:
        return np.concatenate([grow(replace(plan, below=None)), grow(plan.below)])
    old = read(plan.source)
    grown = _surroundings(plan, old)
    if plan.axes[0].old:
        place = np.ix_(*(axis.place for axis in plan.axes))
        grown[place] = old[np.ix_(*(axis.source for axis in plan.axes))]
    grown[plan.axes[0].blank] = 0.0
    if plan.factor != 1.0:
        grown *= np.float32(plan.factor)
    return grown


def _surroundings(plan: Plan, old: Weights) -> Weights:
    around = plan.kind.around
    if around is Around.NOISE:
        # The name seeds it, so that a weight is the same whatever is made before it.
        noise = np.random.default_rng(crc32(plan.name.encode()))
        values = noise.standard_normal(plan.shape, np.float32)
        values *= old.std()
        return values
    value = {Around.MEAN: old.mean(), Around.ONE: 1.0, Around.ZERO: 0.0}[around]
    return np.full(plan.shape, value, np.float32)


def read(source: WeightBytes) -> Weights:
    """Read one stored weight as float32."""
    kinds: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
    kind = np.dtype(kinds[source.dtype]).newbyteorder("<")
    array = np.memmap(source.file, kind, "r", source.offset, source.shape)
    if source.dtype == "BF16":
        # A bf16 number is the upper half of a float32.
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def encode(name: str, values: Weights, dtype: str) -> NDArray[Any]:
    """Round to a stored type, ties to even.

    Raises: CheckpointError for a number beyond the range of that type.
    """
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise CheckpointError(
            f"{name} holds {np.abs(values).max():.4g}, beyond float16; use bfloat16 or float32"
        )
    return halves
