"""Refuse by name, before any work, the models that have no portable graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrt.errors import ExportError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "ssm", "rwkv")
LENGTH_DEPENDENT = ("dynamic", "longrope", "su")

# fmt: off
RECURRENT_TYPES = frozenset((
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
    "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba",
    "zamba2",
))
# fmt: on
ALIBI_TYPES = frozenset(("bloom", "mpt"))

INSTEAD = "Export a decoder whose layers all use softmax attention over a KV cache"


def check_support(config: Mapping[str, Any]) -> None:
    """Hold a checkpoint's config.json against what the portable graph can express.

    Raises: ExportError naming the model type, the reason and what would work.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ExportError("config.json has no model_type; expected one that transformers knows")
    for find in (_layers, _experts, _positions, _stored, _known, _interface):
        reason = find(kind, config)
        if reason:
            raise ExportError(f"{kind} cannot be exported: {reason}")


def _layers(kind: str, config: Mapping[str, Any]) -> str | None:
    types = {str(layer) for layer in config.get("layer_types") or ()}
    recurrent = sorted(t for t in types if any(word in t for word in RECURRENT))
    if kind in RECURRENT_TYPES or recurrent:
        named = f" ({', '.join(recurrent)})" if recurrent else ""
        return (
            f"it has layers with a recurrent state{named}, which cannot be rolled back when a "
            f"drafted token is rejected. {INSTEAD}"
        )
    if "text_config" in config:
        return f"it is one part of a multimodal model. {INSTEAD}, such as its text model alone"
    if config.get("is_encoder_decoder"):
        return f"it is an encoder-decoder. {INSTEAD}"
    return None


def _experts(kind: str, config: Mapping[str, Any]) -> str | None:
    for key in EXPERTS:
        count = config.get(key)
        if isinstance(count, int) and count > 1:
            return (
                f"it is a mixture of experts ({key} is {count}), whose routing depends on data and "
                "does not trace into one graph. Export a dense model of its family"
            )
    return None


def _positions(kind: str, config: Mapping[str, Any]) -> str | None:
    if kind in ALIBI_TYPES or config.get("alibi"):
        return (
            "it adds ALiBi position terms to its attention, which the portable graph's mask does "
            "not carry. Export a model with rotary or learned positions"
        )
    for rope in _ropes(config):
        if rope in LENGTH_DEPENDENT:
            return (
                f"its rope type {rope!r} changes all frequencies once a text grows past a length, "
                "and keys already written would be wrong. Export a variant with a fixed rope, "
                "such as the model's short-context version"
            )
    return None


def _ropes(config: Mapping[str, Any]) -> set[str]:
    """Return every rope type named, also where a config has one for each kind of layer."""
    found: set[str] = set()
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, Mapping):
            for one in (value, *(v for v in value.values() if isinstance(v, Mapping))):
                found.update(str(one[k]) for k in ("rope_type", "type") if k in one)
    return found


def _stored(kind: str, config: Mapping[str, Any]) -> str | None:
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        return (
            f"the checkpoint is quantised ({method or 'unnamed method'}), and specrt quantises "
            "when it builds an engine. Export the checkpoint it was quantised from"
        )
    return None


def _known(kind: str, config: Mapping[str, Any]) -> str | None:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in CONFIG_MAPPING:
        if config.get("auto_map"):
            return (
                "it runs code from its own checkpoint (auto_map), which specrt does not execute. "
                f"Export a model that transformers {__version__} has itself"
            )
        return (
            f"transformers {__version__} does not know this model type; check model_type, or "
            "install a transformers that has it"
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers has no causal language model of this type. {INSTEAD}"
    return None


def _interface(kind: str, config: Mapping[str, Any]) -> str | None:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model: Any = getattr(transformers, name if isinstance(name, str) else name[0])
    if not getattr(model, "_supports_attention_backend", False):
        return (
            f"transformers' {model.__name__} computes attention itself, not through the "
            f"attention interface that the exporter replaces. {INSTEAD}"
        )
    return None
