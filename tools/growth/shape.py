"""The numbers that make a model big, and the shapes with a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from growth.family import LLAMA, T5, Family
from specrt.errors import CheckpointError


@dataclass(frozen=True)
class Shape:
    """How wide and how deep a model is."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    decoder_layers: int | None = None
    """Of an encoder-decoder, whose encoder then has `layers`."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "decoder_layers" and value is None:
                continue
            if type(value) is not int or value < 1:
                raise CheckpointError(f"{name} is {value!r}; expected a positive number")
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} heads are not multiple of {self.kv_heads} kv heads; change one of "
                "them, so that every key and value serves as many queries"
            )

    @classmethod
    def of(cls, config: Mapping[str, Any], family: Family = LLAMA) -> Shape:
        """Read the shape out of a config.json.

        Raises: CheckpointError for a number that is missing or out of range.
        """
        found = {name: config.get(key) for name, key in family.keys.items()}
        if found.get("kv_heads") is None:
            found["kv_heads"] = found["heads"]
        if "decoder_layers" in found and found["decoder_layers"] is None:
            found["decoder_layers"] = found["layers"]
        width, heads = found["hidden_size"], found["heads"]
        if found["head_dim"] is None and type(width) is type(heads) is int and heads:
            found["head_dim"] = width // heads
        return cls(**found)  # type: ignore[arg-type]

    @property
    def group(self) -> int:
        """How many query heads read one kv head."""
        return self.heads // self.kv_heads

    def parameters(self, vocab: int, tied: bool) -> int:
        """Count the numbers in all matrices; norms and biases hardly matter."""
        attention = 2 * self.head_dim * (self.heads + self.kv_heads)
        layer = self.hidden_size * (attention + 3 * self.intermediate_size)
        layers = self.layers * layer
        if self.decoder_layers is not None:  # which attend twice
            layers += self.decoder_layers * (layer + self.hidden_size * attention)
        return layers + vocab * self.hidden_size * (1 if tied else 2)

    def __str__(self) -> str:
        decoder = "" if self.decoder_layers is None else f" + {self.decoder_layers}"
        return (
            f"hidden_size {self.hidden_size}, {self.layers}{decoder} layers, {self.heads} heads "
            f"({self.kv_heads} for keys and values) of {self.head_dim}, "
            f"intermediate_size {self.intermediate_size}"
        )


PRESETS = {
    "200M": Shape(1024, 16, 16, 8, 64, 2816),
    "1B": Shape(2048, 16, 32, 8, 64, 8192),
    "8B": Shape(4096, 32, 32, 8, 128, 14336),
}
"""The last two are the shapes of Llama 3.2 1B and Llama 3.1 8B, whatever the vocabulary."""
T5_PRESETS = {
    "200M": Shape(768, 12, 12, 12, 64, 2048, 12),
    "3B": Shape(2048, 24, 32, 32, 64, 5120, 24),
}
"""The shapes of T5 v1.1 Base and XL, whatever the vocabulary."""


def presets_of(family: Family) -> Mapping[str, Shape]:
    """Return the shapes with a name of a family."""
    return T5_PRESETS if family is T5 else PRESETS


def check_growth(old: Shape, new: Shape, divides: bool = True) -> None:
    """Hold a growth to what can be done without changing what the model computes.

    Heads that divide the width are asked for where `divides` says so.

    Raises: CheckpointError naming the number that stands in the way.
    """
    if old == new:
        raise CheckpointError(f"nothing grows: the checkpoint has {old}; ask for a larger shape")
    for name, was in asdict(old).items():
        wanted = getattr(new, name)
        if was is None and wanted is not None:
            raise CheckpointError(
                f"{name} is {wanted}, and the checkpoint has no encoder; leave it out"
            )
        if was is not None and wanted < was:
            raise CheckpointError(
                f"{name} {wanted} is below the checkpoint's {was}; growth keeps every weight, so "
                f"ask for {was} or more"
            )
    if divides and new.hidden_size % new.heads:
        raise CheckpointError(
            f"hidden_size {new.hidden_size} is not a multiple of {new.heads} heads, which "
            "transformers asks for whatever head_dim is; change one of them"
        )
    if new.head_dim % old.head_dim:
        raise CheckpointError(
            f"head_dim {new.head_dim} is not a multiple of the checkpoint's {old.head_dim}; rotary "
            "angles of the old dimensions are found again only in a multiple"
        )
    needed = old.kv_heads * kv_copies(old, new)
    if new.kv_heads < needed:
        raise CheckpointError(
            f"{new.heads} heads over {new.kv_heads} kv heads put {new.group} queries on each; the "
            f"checkpoint puts {old.group} on each of {old.kv_heads}, which then takes "
            f"{needed} kv heads; ask for so many, or for more heads"
        )


def kv_copies(old: Shape, new: Shape) -> int:
    """Return how many copies of each kv head serve its queries where groups became smaller."""
    return -(-old.group // new.group)
