"""A grown Llama as a model of another type: old layers attend, added ones mix in another way.

conv        lfm2: added layers are short convolutions
recurrent   granitemoehybrid without experts: added layers are Mamba 2 mixers

LFM2 norms the queries and keys of each head, which Llama does not. What would be normed is made so
small that the norm's epsilon outweighs it, and the norm's scale undoes both:

    q · s / sqrt(mean(q² s²) + eps) · sqrt(eps) / s  =  q · (1 - s² mean(q²) / (2 eps) + ...)

With s = 2^-22 that differs from q by less than float32 does. Values come back in two steps. So
the norm before attention has numbers that float16 does not hold; compute in float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

from growth.axes import Axis
from growth.family import LLAMA, Around, Kind
from growth.layout import Plan
from growth.shape import Shape
from specrt.errors import CheckpointError

_SMALL, _HALFWAY = 2.0**-22, 2.0**11
TAPS, RECURRENT_TAPS = 3, 4
"""Positions that a convolution reads, alone and before a recurrence, as in all published models."""
MIXER_HEAD, STATE = 64, 128
"""A head's width and the state of each of its numbers in a Mamba 2 mixer, as Granite 4 has them."""
_KEPT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rope_parameters", "rope_theta",
    "rope_scaling", "tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id",
    "pad_token_id", "dtype", "torch_dtype", "specrt_inflated_from",
)  # fmt: skip


class Weight(NamedTuple):
    """A weight that Llama has nothing for."""

    shape: tuple[int, ...]
    around: Around = Around.NOISE
    factor: float = 1.0

    def plan(self, name: str, like: Plan) -> Plan:
        """Return the plan of it, as spread as the weight of another plan."""
        axes = tuple(Axis(size) for size in self.shape)
        return Plan(name, Kind((), self.around), axes, like.source, self.factor)


@dataclass(frozen=True)
class Hybrid:
    """What a grown Llama of some shape becomes."""

    config: Mapping[str, Any]
    added: str
    """What the config calls the type of an added layer."""
    mixer: Mapping[str, Weight]
    """What an added layer has in place of attention; it writes zeros."""
    names: Mapping[str, str]
    """Modules with another name than Llama's."""
    attention: Mapping[str, Weight] = field(default_factory=dict)
    """What an old layer has and Llama has not."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By what old layers' modules are multiplied."""
    below: Mapping[str, str] = field(default_factory=dict)
    """Modules stored as one weight: the upper one, and the one stored below it."""

    def name_of(self, weight: str) -> str:
        """Return what a weight of Llama is called here."""
        module = weight.removesuffix(".weight")
        return f"{self.names.get(module, module)}.weight"


def _conv(new: Shape, eps: float) -> Hybrid:
    width = new.hidden_size
    norm = Weight((new.head_dim,), Around.ONE, sqrt(eps) / _SMALL)
    return Hybrid(
        config={
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "conv_L_cache": TAPS,
            "conv_bias": False, "block_auto_adjust_ff_dim": False, "norm_eps": eps,
        },
        added="conv",
        mixer={
            "conv.in_proj.weight": Weight((3 * width, width)),
            "conv.conv.weight": Weight((width, 1, TAPS)),
            "conv.out_proj.weight": Weight((width, width), Around.ZERO),
        },
        names={
            "model.norm": "model.embedding_norm",
            "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
            "self_attn.o_proj": "self_attn.out_proj", "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
        },
        attention={
            "self_attn.q_layernorm.weight": norm, "self_attn.k_layernorm.weight": norm,
        },
        factors={
            "input_layernorm": _SMALL, "self_attn.v_proj": _HALFWAY, "self_attn.o_proj": _HALFWAY,
        },
    )  # fmt: skip


def _recurrent(new: Shape, eps: float) -> Hybrid:
    inner = 2 * new.hidden_size
    if inner % MIXER_HEAD:
        raise CheckpointError(
            f"hidden_size is {new.hidden_size}, and heads of {MIXER_HEAD} share twice that in a "
            f"recurrent layer; ask for a multiple of {MIXER_HEAD // 2}"
        )
    heads, read = inner // MIXER_HEAD, inner + 2 * STATE
    return Hybrid(
        config={
            "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
            "rms_norm_eps": eps, "position_embedding_type": "rope",
            "attention_multiplier": new.head_dim**-0.5, "num_local_experts": 0,
            "num_experts_per_tok": 0, "shared_intermediate_size": new.intermediate_size,
            "mamba_n_heads": heads, "mamba_d_head": MIXER_HEAD, "mamba_d_state": STATE,
            "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": RECURRENT_TAPS,
        },
        added="linear_attention",
        mixer={
            "mamba.in_proj.weight": Weight((inner + read + heads, new.hidden_size)),
            "mamba.conv1d.weight": Weight((read, 1, RECURRENT_TAPS)),
            "mamba.conv1d.bias": Weight((read,)),
            "mamba.A_log": Weight((heads,), Around.ONE),
            "mamba.D": Weight((heads,), Around.ONE),
            "mamba.dt_bias": Weight((heads,), Around.ONE),
            "mamba.norm.weight": Weight((inner,), Around.ONE),
            "mamba.out_proj.weight": Weight((new.hidden_size, inner), Around.ZERO),
        },
        names={
            "mlp.gate_proj": "shared_mlp.input_linear", "mlp.down_proj": "shared_mlp.output_linear",
        },
        below={"mlp.gate_proj": "mlp.up_proj"},
    )  # fmt: skip


KINDS: Mapping[str, Callable[[Shape, float], Hybrid]] = {"conv": _conv, "recurrent": _recurrent}
"""What --hybrid may be."""


def hybrid_of(kind: str, grown: Mapping[str, Any], old: Shape, new: Shape) -> Hybrid:
    """Return what a grown Llama becomes, given its config.

    Raises: CheckpointError for what no model of that type computes.
    """
    wanted = {
        "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    for key, value in wanted.items():
        if grown.get(key, value) != value:
            raise CheckpointError(
                f"{key} is {grown[key]!r}, and only a model with {value!r} becomes a hybrid; "
                "leave --hybrid out"
            )
    if new.layers == old.layers:
        raise CheckpointError(
            f"layers stay {old.layers}, and only added ones become {kind}; ask for more"
        )
    return KINDS[kind](new, grown[LLAMA.epsilon])


def places(old: Shape, new: Shape) -> list[int]:
    """Return which layers attend: the old ones, evenly among added ones, the last layer one."""
    return [(layer + 1) * new.layers // old.layers - 1 for layer in range(old.layers)]


def hybrid_plans(hybrid: Hybrid, plans: Sequence[Plan], old: Shape, new: Shape) -> Iterator[Plan]:
    """Yield the weights of the hybrid, given the grown Llama's."""
    (stack,) = LLAMA.stacks
    attending = places(old, new)
    order = [*attending, *(layer for layer in range(new.layers) if layer not in attending)]
    named = {plan.name: plan for plan in plans}
    for plan in plans:
        inside = stack.suffix_of(plan.name)
        if inside is None:
            yield replace(plan, name=hybrid.name_of(plan.name))
            continue
        layer, weight = inside
        prefix, module = f"{stack.prefix}.{order[layer]}", weight.removesuffix(".weight")
        attends = layer < old.layers
        if module not in hybrid.below.values() and (attends or not module.startswith("self_attn")):
            factor = plan.factor * (hybrid.factors.get(module, 1.0) if attends else 1.0)
            lower = hybrid.below.get(module)
            below = named[plan.name.replace(module, lower)] if lower else None
            name = f"{prefix}.{hybrid.name_of(weight)}"
            yield replace(plan, name=name, factor=factor, below=below)
        if module == "self_attn.q_proj":
            for name, made in (hybrid.attention if attends else hybrid.mixer).items():
                yield made.plan(f"{prefix}.{name}", plan)


def hybrid_config(
    hybrid: Hybrid, grown: Mapping[str, Any], old: Shape, new: Shape
) -> dict[str, Any]:
    """Return the config of the hybrid, given the grown Llama's."""
    types = [hybrid.added] * new.layers
    for layer in places(old, new):
        types[layer] = "full_attention"
    kept = {key: grown[key] for key in _KEPT if key in grown}
    return dict(sorted({**hybrid.config, "layer_types": types, **kept}.items()))
