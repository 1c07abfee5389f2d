"""What models of a family call their numbers and weights, and how each weight grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from specrt.errors import CheckpointError, did_you_mean


class Around(Enum):
    """What the entries of a weight become that the old model did not have."""

    NOISE = "random, as spread as the old entries: it reads zeros, or what it gives is not read"
    ZERO = "zero: it would write into the residual stream"
    MEAN = "the mean of the old entries: a norm's scale of what is zero"
    ONE = "one, times the factor: a norm's scale that the old model has nothing for"


@dataclass(frozen=True)
class Kind:
    """How one kind of weight grows."""

    axes: tuple[str, ...]
    around: Around = Around.NOISE
    optional: bool = False
    """Whether a layer of the old model may lack it; added layers then do."""


@dataclass(frozen=True)
class Stack:
    """Layers after each other: what their names begin with, which number counts them, weights."""

    prefix: str
    layers: str
    kinds: Mapping[str, Kind]

    def suffix_of(self, name: str) -> tuple[int, str] | None:
        """Return the layer and the name inside it of a weight of this stack."""
        layer, _, suffix = name.removeprefix(f"{self.prefix}.").partition(".")
        found = name.startswith(f"{self.prefix}.") and layer.isdecimal()
        return (int(layer), suffix) if found else None


@dataclass(frozen=True)
class Family:
    """Models that differ from each other in nothing a growth touches."""

    models: tuple[str, ...]
    keys: Mapping[str, str]
    """What config.json calls each number of a shape."""
    epsilon: str
    ends: Mapping[str, Kind]
    """Weights outside of layers."""
    stacks: tuple[Stack, ...]
    head: str
    """The last projection, which may be the embedding, and then is not stored."""
    divides: bool
    """Whether scores are divided by sqrt(head_dim), and heads have to divide the width."""
    left_out: tuple[str, ...] = ()
    """What old checkpoints store and no model reads."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Axes of one length for all shapes: what config.json calls it."""

    def kind_of(self, name: str) -> Kind | None:
        """Return how a weight grows; a projection's bias grows as its first axis does."""
        if name in self.ends:
            return self.ends[name]
        for stack in self.stacks:
            if inside := stack.suffix_of(name):
                return _kind_of(stack.kinds, inside[1])
        return None

    def reads(self, name: str) -> bool:
        """Tell whether a model of the family reads a stored weight."""
        return not any(part in name for part in self.left_out)

    def required(self, counts: Mapping[str, Any], tied: bool) -> Iterator[str]:
        """Yield the weights without which there is no model of so many layers."""
        for name, kind in self.ends.items():
            if not kind.optional and not (tied and name == self.head):
                yield name
        for stack in self.stacks:
            for layer in range(counts[stack.layers]):
                for suffix, kind in stack.kinds.items():
                    if not kind.optional:
                        yield f"{stack.prefix}.{layer}.{suffix}"


def _kind_of(kinds: Mapping[str, Kind], suffix: str) -> Kind | None:
    if suffix in kinds or not suffix.endswith("_proj.bias"):
        return kinds.get(suffix)
    weight = kinds.get(suffix.replace(".bias", ".weight"))
    return weight and Kind(weight.axes[:1], weight.around)


NORM = Kind(("hidden",), Around.MEAN)
QUERIES, KEYS, VALUES = (Kind((axis, "hidden")) for axis in ("queries", "keys", "values"))
ATTENDED = Kind(("hidden", "attended"), Around.ZERO)
UP, DOWN = Kind(("units", "hidden")), Kind(("hidden", "units"), Around.ZERO)
EMBEDDING, HEAD = Kind(("vocab", "hidden"), Around.ZERO), Kind(("vocab", "hidden"))

LLAMA = Family(
    models=("llama", "mistral", "qwen2"),
    keys={
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
    },
    epsilon="rms_norm_eps",
    ends={
        "model.embed_tokens.weight": EMBEDDING,
        "model.norm.weight": NORM,
        "lm_head.weight": HEAD,
    },
    stacks=(
        Stack(
            "model.layers",
            "layers",
            {
                "input_layernorm.weight": NORM,
                "self_attn.q_proj.weight": QUERIES,
                "self_attn.k_proj.weight": KEYS,
                "self_attn.v_proj.weight": VALUES,
                "self_attn.o_proj.weight": ATTENDED,
                "post_attention_layernorm.weight": NORM,
                "mlp.gate_proj.weight": UP,
                "mlp.up_proj.weight": UP,
                "mlp.down_proj.weight": DOWN,
            },
        ),
    ),
    head="lm_head.weight",
    divides=True,
    left_out=("rotary_emb.inv_freq",),  # it follows from the config
)


def _t5_stack(side: str, layers: str, attentions: tuple[str, ...]) -> Stack:
    kinds: dict[str, Kind] = {}
    for number, attention in enumerate(attentions):
        at = f"layer.{number}"
        projections = {"q": QUERIES, "k": KEYS, "v": VALUES, "o": ATTENDED}
        kinds |= {f"{at}.{attention}.{name}.weight": kind for name, kind in projections.items()}
        kinds[f"{at}.layer_norm.weight"] = NORM
    bias = Kind(("buckets", "biases"), optional=True)
    kinds["layer.0.SelfAttention.relative_attention_bias.weight"] = bias
    at = f"layer.{len(attentions)}"
    for name in ("wi", "wi_0", "wi_1"):  # plain, or gated
        kinds[f"{at}.DenseReluDense.{name}.weight"] = Kind(UP.axes, optional=True)
    kinds[f"{at}.DenseReluDense.wo.weight"] = DOWN
    kinds[f"{at}.layer_norm.weight"] = NORM
    return Stack(f"{side}.block", layers, kinds)


T5 = Family(
    models=("t5",),
    keys={
        "hidden_size": "d_model",
        "layers": "num_layers",
        "decoder_layers": "num_decoder_layers",
        "heads": "num_heads",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
    },
    epsilon="layer_norm_epsilon",
    ends={
        "shared.weight": EMBEDDING,
        "encoder.final_layer_norm.weight": NORM,
        "decoder.final_layer_norm.weight": NORM,
        "lm_head.weight": HEAD,
    },
    stacks=(
        _t5_stack("encoder", "layers", ("SelfAttention",)),
        _t5_stack("decoder", "decoder_layers", ("SelfAttention", "EncDecAttention")),
    ),
    head="lm_head.weight",
    divides=False,
    # Copies of `shared`, and a bias that cross attention does not add.
    left_out=("coder.embed_tokens.", "EncDecAttention.relative_attention_bias"),
    sizes={"buckets": "relative_attention_num_buckets"},
)
FAMILIES = (LLAMA, T5)


def family_of(config: Mapping[str, Any], name: str) -> Family:
    """Return the family of a model.

    Raises: CheckpointError naming what it is.
    """
    model = str(config.get("model_type"))
    known = [kind for family in FAMILIES for kind in family.models]
    for family in FAMILIES:
        if model in family.models:
            return family
    raise CheckpointError(
        f"{name} is of model_type {model!r}; only {', '.join(known)} are known to keep their "
        f"outputs when grown{did_you_mean(model, known)}"
    )
