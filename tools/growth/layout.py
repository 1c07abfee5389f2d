"""Which weights a Llama-family model has, along which axes, and what surrounds the old ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import sqrt

from growth.axes import Axis
from growth.shape import Shape
from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint
from specrt_export.safetensors_file import WeightBytes

LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
BUFFER = "rotary_emb.inv_freq"
"""Old checkpoints store it; it follows from the config."""


class Around(Enum):
    """What the entries of a weight become that the old model did not have."""

    NOISE = "random, as spread as the old entries: it reads zeros, or what it gives is not read"
    ZERO = "zero: it would write into the residual stream"
    MEAN = "the mean of the old entries: a norm's scale of what is zero"


@dataclass(frozen=True)
class Kind:
    """How one kind of weight grows."""

    axes: tuple[str, ...]
    around: Around = Around.NOISE


NORM = Kind(("hidden",), Around.MEAN)
KINDS = {
    "model.embed_tokens.weight": Kind(("vocab", "hidden"), Around.ZERO),
    "input_layernorm.weight": NORM,
    "self_attn.q_proj.weight": Kind(("queries", "hidden")),
    "self_attn.k_proj.weight": Kind(("keys", "hidden")),
    "self_attn.v_proj.weight": Kind(("values", "hidden")),
    "self_attn.o_proj.weight": Kind(("hidden", "attended"), Around.ZERO),
    "post_attention_layernorm.weight": NORM,
    "mlp.gate_proj.weight": Kind(("units", "hidden")),
    "mlp.up_proj.weight": Kind(("units", "hidden")),
    "mlp.down_proj.weight": Kind(("hidden", "units"), Around.ZERO),
    "model.norm.weight": NORM,
    "lm_head.weight": Kind(("vocab", "hidden")),
}


@dataclass(frozen=True)
class Plan:
    """One weight of the grown model: what it is made of, and how."""

    name: str
    kind: Kind
    axes: tuple[Axis, ...]
    source: WeightBytes
    """The old weight; for an added layer, the one it is to be as spread as."""
    factor: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the grown weight."""
        return tuple(axis.size for axis in self.axes)


def plan_weights(
    checkpoint: Checkpoint, axes: Mapping[str, Axis], old: Shape, new: Shape, tied: bool
) -> list[Plan]:
    """Return every weight of the grown model: ends, old layers, then added ones.

    Raises: CheckpointError for a weight that has no place in a Llama, is missing or misshapen.
    """
    _check_all(checkpoint, axes, old, tied)
    stored = checkpoint.weights
    layers = _layers(stored)
    plans = [_plan(n, n, stored[n], axes, old, new) for n in KINDS if n in stored]
    for layer in range(new.layers):
        like = layers[layer % old.layers]
        for suffix, source in like.items():
            name = f"model.layers.{layer}.{suffix}"
            plan = _plan(name, suffix, source, axes, old, new)
            plans.append(plan if layer < old.layers else _added(plan))
    if tied:
        plans = [plan for plan in plans if plan.name != "lm_head.weight"]
    return plans


def kind_of(suffix: str) -> Kind | None:
    """Return how a weight grows; a projection's bias grows as its first axis does."""
    if suffix in KINDS or not suffix.endswith("_proj.bias"):
        return KINDS.get(suffix)
    weight = KINDS.get(suffix.replace(".bias", ".weight"))
    return weight and Kind(weight.axes[:1], weight.around)


def _plan(
    name: str, suffix: str, source: WeightBytes, axes: Mapping[str, Axis], old: Shape, new: Shape
) -> Plan:
    kind = kind_of(suffix)
    assert kind is not None, "_check_all refuses what has no kind"
    factor = 1.0
    if kind is NORM:
        # The mean of squares is over more columns, of which the new ones are zero.
        factor = sqrt(old.hidden_size / new.hidden_size)
    elif kind.axes[0] == "queries":
        factor = sqrt(new.head_dim / old.head_dim)  # scores are divided by sqrt(head_dim)
    return Plan(name, kind, tuple(axes[axis] for axis in kind.axes), source, factor)


def _added(plan: Plan) -> Plan:
    emptied = tuple(axis.emptied() for axis in plan.axes)
    return Plan(plan.name, plan.kind, emptied, plan.source, plan.factor)


def _layers(stored: Mapping[str, WeightBytes]) -> dict[int, dict[str, WeightBytes]]:
    layers: dict[int, dict[str, WeightBytes]] = {}
    for name, source in stored.items():
        found = LAYER.fullmatch(name)
        if found and BUFFER not in name:
            layers.setdefault(int(found[1]), {})[found[2]] = source
    return layers


def _check_all(checkpoint: Checkpoint, axes: Mapping[str, Axis], old: Shape, tied: bool) -> None:
    for name, source in checkpoint.weights.items():
        if BUFFER not in name:
            _check(name, source, axes, old.layers)
    for name in _required(old, tied):
        if name not in checkpoint.weights:
            raise CheckpointError(
                f"{checkpoint.folder} holds no weight {name}, which its config.json calls for; "
                "check that both are of one model"
            )


def _check(name: str, source: WeightBytes, axes: Mapping[str, Axis], layers: int) -> None:
    found = LAYER.fullmatch(name)
    kind = kind_of(found[2] if found else name)
    if kind is None or (found and int(found[1]) >= layers):
        raise CheckpointError(
            f"{source.file} holds {name}, for which no growth is known that keeps the model's "
            "outputs; give a checkpoint with the weights of a Llama"
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


def _required(old: Shape, tied: bool) -> Iterator[str]:
    for suffix in KINDS:
        if suffix.startswith("model."):
            yield suffix
        elif suffix != "lm_head.weight":
            yield from (f"model.layers.{layer}.{suffix}" for layer in range(old.layers))
        elif not tied:
            yield suffix
