"""Which weights a grown model has, along which axes, and what surrounds the old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from growth.axes import Axis
from growth.family import NORM, T5, Family, Kind, Stack
from growth.shape import Shape
from specrt.errors import CheckpointError
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.safetensors_file import WeightBytes


@dataclass(frozen=True)
class Plan:
    """One weight of the grown model: what it is made of, and how."""

    name: str
    kind: Kind
    axes: tuple[Axis, ...]
    source: WeightBytes
    """The old weight; for an added layer, the one it is to be as spread as."""
    factor: float
    below: Plan | None = None
    """Another weight that is stored as one with it, in the rows after its own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the grown weight."""
        rows, *rest = (axis.size for axis in self.axes)
        return (rows + (self.below.shape[0] if self.below else 0), *rest)


def plan_weights(
    checkpoint: Checkpoint, family: Family, axes: Mapping[str, Axis], old: Shape, new: Shape
) -> list[Plan]:
    """Return every weight of the grown model: ends, old layers, then added ones.

    Raises: CheckpointError for a weight that has no place in the model, is missing or misshapen.
    """
    tied = is_tied(checkpoint, family)
    stored = {name: w for name, w in checkpoint.weights.items() if family.reads(name)}
    _check_all(checkpoint.folder, stored, family, axes, old, tied)
    factors = _Factors(family, checkpoint.config, old, new)
    names = [name for name in family.ends if name in stored]
    if tied:
        names = [name for name in names if name != family.head]
    plans = [_plan(name, stored[name], family, axes, factors) for name in names]
    for stack in family.stacks:
        was = getattr(old, stack.layers)
        layers = _layers(stored, stack)
        for layer in range(getattr(new, stack.layers)):
            for suffix, source in layers[layer % was].items():
                plan = _plan(f"{stack.prefix}.{layer}.{suffix}", source, family, axes, factors)
                if layer < was:
                    plans.append(plan)
                elif "buckets" not in plan.kind.axes:  # only the first layer has a bias
                    plans.append(_added(plan))
    return plans


def is_tied(checkpoint: Checkpoint, family: Family) -> bool:
    """Tell whether the embedding is the last projection as well."""
    if family is T5:
        return family.head not in checkpoint.weights
    return bool(checkpoint.config.get("tie_word_embeddings", False))


class _Factors:
    """What the old entries of a weight are multiplied by."""

    def __init__(self, family: Family, config: Mapping[str, Any], old: Shape, new: Shape) -> None:
        # The mean of squares is over more columns, of which the new ones are zero.
        self.norm = sqrt(old.hidden_size / new.hidden_size)
        # Scores may be divided by sqrt(head_dim).
        self.queries = sqrt(new.head_dim / old.head_dim) if family.divides else 1.0
        # T5's first version multiplies what comes out of the decoder by d_model^-0.5.
        scaled = family is T5 and config.get(
            "scale_decoder_outputs", config.get("tie_word_embeddings") is not False
        )
        self.last = 1.0 if scaled else self.norm

    def of(self, name: str, kind: Kind) -> float:
        """Return the factor of a weight."""
        if name == "decoder.final_layer_norm.weight":
            return self.last
        if kind is NORM:
            return self.norm
        return self.queries if kind.axes[0] == "queries" else 1.0


def _plan(
    name: str, source: WeightBytes, family: Family, axes: Mapping[str, Axis], factors: _Factors
) -> Plan:
    kind = family.kind_of(name)
    assert kind is not None, "_check_all refuses what has no kind"
    return Plan(name, kind, tuple(axes[axis] for axis in kind.axes), source, factors.of(name, kind))


def _added(plan: Plan) -> Plan:
    emptied = tuple(axis.emptied() for axis in plan.axes)
    return Plan(plan.name, plan.kind, emptied, plan.source, plan.factor)


def _layers(stored: Mapping[str, WeightBytes], stack: Stack) -> dict[int, dict[str, WeightBytes]]:
    layers: dict[int, dict[str, WeightBytes]] = {}
    for name, source in stored.items():
        if inside := stack.suffix_of(name):
            layers.setdefault(inside[0], {})[inside[1]] = source
    return layers


def _check_all(
    folder: Path, stored: Mapping[str, WeightBytes], family: Family, axes: Mapping[str, Axis],
    old: Shape, tied: bool,
) -> None:  # fmt: skip
    for name, source in stored.items():
        _check(name, source, family, axes, old)
    for name in family.required(asdict(old), tied):
        if name not in stored:
            raise CheckpointError(
                f"{folder} holds no weight {name}, which its config.json calls for; "
                "check that both are of one model"
            )


def _check(
    name: str, source: WeightBytes, family: Family, axes: Mapping[str, Axis], old: Shape
) -> None:
    kind = family.kind_of(name)
    inside = [(stack, found) for stack in family.stacks if (found := stack.suffix_of(name))]
    if kind is None or any(layer >= getattr(old, stack.layers) for stack, (layer, _) in inside):
        raise CheckpointError(
            f"{source.file} holds {name}, for which no growth is known that keeps the model's "
            f"outputs; give a checkpoint with the weights of {' or '.join(family.models)}"
        )
    expected = tuple(axes[axis].old for axis in kind.axes)
    if source.shape != expected:
        raise CheckpointError(
            f"{source.file}: {name} has shape {list(source.shape)}, config.json calls for "
            f"{list(expected)}; check that both are of one model"
        )
    if source.dtype not in ("F32", "F16", "BF16"):
        raise CheckpointError(
            f"{source.file}: {name} is stored as {source.dtype}; expected F32, F16 or BF16"
        )
