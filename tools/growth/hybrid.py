"""A grown Llama as a model of the type lfm2: its added layers are short convolutions.

LFM2 norms the queries and keys of each head, which Llama does not. What would be normed is made so
small that the norm's epsilon outweighs it, and the norm's scale undoes both:

    q · s / sqrt(mean(q² s²) + eps) · sqrt(eps) / s  =  q · (1 - s² mean(q²) / (2 eps) + ...)

With s = 2^-22 that differs from q by less than float32 does. Values come back in two steps. So
the norm before attention has numbers that float16 does not hold; compute in float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

from growth.axes import Axis
from growth.family import LLAMA, NORM, Around, Kind
from growth.layout import Plan
from growth.shape import Shape
from specrt.errors import CheckpointError

_SMALL, _HALFWAY = 2.0**-22, 2.0**11
TAPS = 3
"""Positions that a convolution reads, as in all published models."""

_NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "self_attn.q_proj", "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj", "self_attn.o_proj": "self_attn.out_proj",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
_FACTORS = {"operator_norm": _SMALL, "self_attn.v_proj": _HALFWAY, "self_attn.out_proj": _HALFWAY}
_CONVOLUTION = {
    "conv.in_proj": Kind(("gates", "hidden")),
    "conv.conv": Kind(("hidden", "one", "taps")),
    "conv.out_proj": Kind(("hidden", "hidden"), Around.ZERO),
}
_KEPT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rope_parameters", "rope_theta",
    "rope_scaling", "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id",
    "pad_token_id", "dtype", "torch_dtype", "specrt_inflated_from",
)  # fmt: skip


def check_hybrid(config: Mapping[str, Any], old: Shape, new: Shape) -> None:
    """Refuse what no model of the type lfm2 computes.

    Raises: CheckpointError.
    """
    wanted = {
        "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise CheckpointError(
                f"{key} is {config[key]!r}, and only a model with {value!r} becomes a hybrid; "
                "leave --hybrid out"
            )
    if new.layers == old.layers:
        raise CheckpointError(
            f"layers stay {old.layers}, and only added ones are convolutions; ask for more"
        )


def places(old: Shape, new: Shape) -> list[int]:
    """Return which layers attend: the old ones, evenly among convolutions, the last layer one."""
    return [(layer + 1) * new.layers // old.layers - 1 for layer in range(old.layers)]


def hybrid_plans(plans: Sequence[Plan], old: Shape, new: Shape, eps: float) -> Iterator[Plan]:
    """Yield the weights of the hybrid, given those of the grown Llama and its epsilon."""
    (stack,) = LLAMA.stacks
    attending = places(old, new)
    others = [layer for layer in range(new.layers) if layer not in attending]
    order = [*attending, *others]
    for plan in plans:
        inside = stack.suffix_of(plan.name)
        if inside is None:
            name = plan.name.replace("model.norm.", "model.embedding_norm.")
            yield replace(plan, name=name)
            continue
        place, module = order[inside[0]], _NAMES[inside[1].removesuffix(".weight")]
        attends = place in attending
        if attends or not module.startswith("self_attn"):
            factor = plan.factor * (_FACTORS.get(module, 1.0) if attends else 1.0)
            yield replace(plan, name=_name(place, module), factor=factor)
        if module == "self_attn.q_proj":
            yield from _normed(plan, place, new, eps) if attends else _convolved(plan, place, new)


def _name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}.weight"


def _normed(plan: Plan, layer: int, new: Shape, eps: float) -> Iterator[Plan]:
    """Yield the scales that undo the norms of queries and keys; `plan` is any of the layer."""
    kind = replace(NORM, around=Around.ONE)
    for module in ("self_attn.q_layernorm", "self_attn.k_layernorm"):
        axes, factor = (Axis(new.head_dim),), sqrt(eps) / _SMALL
        yield Plan(_name(layer, module), kind, axes, plan.source, factor)


def _convolved(plan: Plan, layer: int, new: Shape) -> Iterator[Plan]:
    """Yield the weights of a convolution that writes zeros; `plan` is any of the layer."""
    width = new.hidden_size
    sizes = {"hidden": width, "gates": 3 * width, "one": 1, "taps": TAPS}
    for module, kind in _CONVOLUTION.items():
        axes = tuple(Axis(sizes[axis]) for axis in kind.axes)
        yield Plan(_name(layer, module), kind, axes, plan.source, 1.0)


def hybrid_config(grown: Mapping[str, Any], old: Shape, new: Shape) -> dict[str, Any]:
    """Return the config of the hybrid, given the grown Llama's."""
    types = ["conv"] * new.layers
    for layer in places(old, new):
        types[layer] = "full_attention"
    made = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": types,
        "conv_L_cache": TAPS, "conv_bias": False, "block_auto_adjust_ff_dim": False,
        "norm_eps": grown[LLAMA.epsilon],
    }  # fmt: skip
    return dict(sorted({**made, **{key: grown[key] for key in _KEPT if key in grown}}.items()))
