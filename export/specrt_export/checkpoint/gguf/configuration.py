"""What a GGUF file says about its model, as the config.json that transformers would have written.

What a file does not say and llama.cpp derives from the kind of model is derived here as there:
how Gemma scales queries, which of its layers see a window, and Llama 3's frequencies, of which a
file holds only the quotients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specrt.errors import CheckpointError, did_you_mean
from specrt_export.checkpoint.codes import Floats
from specrt_export.checkpoint.gguf.reader import GgufFile, shown

THETA = 10000.0
"""Base of the rotary frequencies where a file names none."""

NEUTRAL: Mapping[str, Any] = {
    "expert_count": 0,
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "embedding_scale": 0.0,
    "logit_scale": 0.0,
    "nextn_predict_layers": 0,
    "residual_scale": 0.0,
}
"""Values that change the computation, which these families do not have, and how they read then."""


Config = Mapping[str, Any]

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class Family:
    """How one architecture of llama.cpp is spelled in transformers."""

    model_type: str
    parts: Mapping[str, str]
    """Tensors of a layer, and the modules that hold them."""
    own: Callable[[GgufFile, dict[str, Any]], dict[str, Any]]
    """Returns what the family has besides what all have, or otherwise."""
    outer: Mapping[str, str] = field(default_factory=lambda: _OUTER)
    """Tensors outside of the layers, and the weights that they are."""
    of_layer: Callable[[Config, int], Config] = lambda config, layer: config
    """Returns the configuration with the sizes of one layer."""
    lacks: Callable[[Config, int], Collection[str]] = lambda config, layer: ()
    """Returns the tensors that a layer, or the model around it, does without."""
    unread: Collection[str] = ()
    """Tensors that files may hold of a layer that does without them."""
    uneven: bool = False
    """Whether layers may have heads for keys, or a feed-forward width, of their own."""
    interleaved: bool = False
    """Whether rows of queries and keys lie in pairs that are rotated together."""
    shifted_norms: bool = False
    """Whether norms are stored with the 1 that the model adds to them."""
    partly_rotated: bool = False
    """Whether the rotary embedding may leave a part of each head as it is."""


def configuration(file: GgufFile) -> dict[str, Any]:
    """Return the config.json of a file's model.

    Raises: CheckpointError naming what is missing, malformed or of a model that is not read.
    """
    family = family_of(file)
    _check_neutral(file)
    config = _common(file, family)
    own = family.own(file, config)  # which may take a value away, to spell it otherwise
    return {**config, **own}


def family_of(file: GgufFile) -> Family:
    """Return the family of a file's model.

    Raises: CheckpointError for an architecture that is not read.
    """
    name = file.architecture
    if name not in FAMILIES:
        raise CheckpointError(
            f"{file.path}: its architecture is {shown(name)}, which specrt does not read from "
            f"GGUF{did_you_mean(name[:60], FAMILIES)}. Build from the model's safetensors folder"
        )
    return FAMILIES[name]


def _check_neutral(file: GgufFile) -> None:
    for name, neutral in NEUTRAL.items():
        key = f"{file.architecture}.{name}"
        value = file.metadata.get(key, neutral)
        if isinstance(value, np.ndarray) or value != neutral:
            raise CheckpointError(
                f"{file.path}: {key} is {shown(value)}, which specrt does not read from GGUF for "
                "this architecture. Build from the model's safetensors folder, or take a dense "
                "model of the family"
            )


def _common(file: GgufFile, family: Family) -> dict[str, Any]:
    def whole(name: str, default: int | None = None) -> int:
        return file.whole(f"{file.architecture}.{name}", default)

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    layers = whole("block_count")
    if not 1 <= layers <= len(file.tensors):
        raise file.wrong(f"{file.architecture}.block_count", "as many layers as the file holds")
    if not 1 <= heads <= hidden:
        raise file.wrong(f"{file.architecture}.attention.head_count", f"1 to {hidden}")

    def largest(name: str, default: int | None = None) -> int:
        return max(_each(file, name, layers, default)) if family.uneven else whole(name, default)

    head = _head(file, family, hidden // heads)
    config = {
        "model_type": family.model_type,
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": largest("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": largest("attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": whole("context_length"),
        "rms_norm_eps": file.real(f"{file.architecture}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rotation(file),
    }
    ids = {"bos": "bos", "eos": "eos", "pad": "padding"}
    keys = {f"{ours}_token_id": f"tokenizer.ggml.{theirs}_token_id" for ours, theirs in ids.items()}
    # None where there is none: a default of the model's class is of another vocabulary.
    return config | {k: file.whole(v) if v in file.metadata else None for k, v in keys.items()}


def _each(file: GgufFile, name: str, layers: int, default: int | None = None) -> list[int]:
    """Return a whole number of each layer; one may stand for all."""
    key = f"{file.architecture}.{name}"
    numbers = file.metadata.get(key)
    if not isinstance(numbers, np.ndarray):
        return [file.whole(key, default)] * layers
    if len(numbers) != layers or numbers.dtype.kind not in "iu" or (numbers < 0).any():
        raise file.wrong(key, f"a whole number for each of {layers} layers")
    return [int(number) for number in numbers]


def _head(file: GgufFile, family: Family, usual: int) -> int:
    """Return the size of a head; all of it is rotated, but in Phi-3's."""
    at = file.architecture
    rotated = file.whole(f"{at}.rope.dimension_count", 0)
    whole = rotated if rotated and not family.partly_rotated else usual
    head = file.whole(f"{at}.attention.key_length", whole)
    if not head or head % 2:
        raise file.wrong(f"{at}.attention.key_length", "an even number")
    if file.whole(f"{at}.attention.value_length", head) != head:
        raise file.wrong(f"{at}.attention.value_length", f"{head}, as for keys")
    if rotated > head or (rotated not in (0, head) and not family.partly_rotated) or rotated % 2:
        raise file.wrong(f"{at}.rope.dimension_count", f"{head}, the size of a head")
    return head


def _rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise CheckpointError(
            f"{file.path} holds no tensor {name}: it has a vocabulary alone, or is damaged. Fetch "
            "the model itself"
        )
    return file.tensors[name].length


def rotation(file: GgufFile) -> dict[str, Any]:
    """Return the rotary embedding: its base, and how frequencies are scaled.

    Raises: CheckpointError for a scaling that is not read.
    """
    at = f"{file.architecture}.rope"
    rope: dict[str, Any] = {"rope_theta": file.real(f"{at}.freq_base", THETA)}
    kind = file.text(f"{at}.scaling.type", "none")
    if kind == "none" and f"{at}.scale_linear" in file.metadata:  # files before 2024
        factor = file.real(f"{at}.scale_linear")
        kind = "linear" if factor not in (0.0, 1.0) else kind
    else:
        factor = file.real(f"{at}.scaling.factor", 1.0)
    if kind in ("none", "longrope") or (kind == "linear" and factor == 1):
        return {**rope, "rope_type": "default"}
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {**rope, **_yarn(file, at, factor)}
    raise file.wrong(f"{at}.scaling.type", "'none', 'linear', 'yarn' or 'longrope'")


def _yarn(file: GgufFile, at: str, factor: float) -> dict[str, Any]:
    original = file.whole(f"{at}.scaling.original_context_length")
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if f"{at}.scaling.{theirs}" in file.metadata:
            rope[ours] = file.real(f"{at}.scaling.{theirs}")
    # llama.cpp multiplies what it computes from the factor; transformers takes the product.
    for name in ("yarn_attn_factor", "attn_factor"):
        scale = file.real(f"{at}.scaling.{name}", 1.0)
        if scale != 1:
            rope["attention_factor"] = scale * (0.1 * math.log(factor) + 1)
    if file.real(f"{at}.scaling.yarn_ext_factor", 1.0) not in (-1.0, 1.0):
        raise file.wrong(f"{at}.scaling.yarn_ext_factor", "1")
    return rope


def _vector(file: GgufFile, name: str) -> Floats | None:
    """Return the numbers of a small tensor, where the file has it."""
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if len(tensor.shape) != 1 or tensor.row_items > 1 << 16 or tensor.format.decode is not None:
        raise CheckpointError(
            f"{file.path}: {name} is {tensor.format.name}{list(tensor.shape)}; expected floats in "
            "one row. Convert the model again"
        )
    return tensor.format.floats(tensor.rows(0, 1)).reshape(-1)


def _biased(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _llama(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    names = ("general.name", "general.basename", "general.finetune")
    said = " ".join(file.text(name, "") for name in names).lower()
    rope = {"rope_parameters": _llama3(file, config)}
    if "mistral" in said and "blk.0.attn_q.bias" not in file.tensors:
        return {**rope, "model_type": "mistral", "sliding_window": None}
    biased = "blk.0.ffn_up.bias" in file.tensors
    return {**rope, **_biased(file, config), "mlp_bias": biased}


LLAMA3 = ((8192, 1.0, 4.0), *((1 << n, 1.0, 4.0) for n in range(10, 21)))
"""Lengths a model was first trained for, and the factors below and above which frequencies are
scaled wholly and not at all; those of Meta's models first. Only their quotients matter."""

_QUOTIENT_ERROR = 1e-4
"""Of frequencies that are stored as fp32, and computed in it."""


def _llama3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the scaling whose quotients of frequencies a file holds.

    Source: transformers, modeling_rope_utils._compute_llama3_parameters.
    """
    rope: dict[str, Any] = config["rope_parameters"]
    quotients = _vector(file, "rope_freqs.weight")
    if quotients is None or (quotients == 1).all():
        return rope
    # Whole in every model there is; a quotient of two fp32 numbers is a little off.
    factor, half = round(float(quotients.max()), 3), config["head_dim"] // 2
    if len(quotients) == half and rope["rope_type"] == "default":
        lengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(half) / half)
        for original, low, high in LLAMA3:
            smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
            made = 1 / ((1 - smooth) / factor + smooth)
            if np.allclose(quotients, made, rtol=_QUOTIENT_ERROR, atol=0):
                found = {"low_freq_factor": low, "high_freq_factor": high, "factor": factor}
                found["original_max_position_embeddings"] = original
                return {"rope_theta": rope["rope_theta"], "rope_type": "llama3", **found}
    raise CheckpointError(
        f"{file.path}: rope_freqs.weight holds {len(quotients)} quotients up to {factor:g}, which "
        "are not Llama 3's way to scale frequencies. Build from the model's safetensors folder"
    )


def _plain(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _windows(file: GgufFile, config: dict[str, Any], every: int) -> list[str]:
    """Return which layers see all positions: the last of every so many, or those a file names."""
    layers, key = (
        config["num_hidden_layers"],
        f"{file.architecture}.attention.sliding_window_pattern",
    )
    pattern = file.metadata.get(key)
    if isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) == layers:
        sliding = [bool(one) for one in pattern]
    else:
        every = file.whole(key, every)
        sliding = [bool(every) and bool((i + 1) % every) for i in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in sliding]


def _scaled_as(config: dict[str, Any], largest: int) -> int:
    """Return what queries are scaled by the root of; the largest model goes by its width."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _scaled_as(config, 46),
        "sliding_window": file.whole("gemma2.attention.sliding_window", 4096),
        "layer_types": _windows(file, config, 2),
        "attn_logit_softcapping": file.real("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.real("gemma2.final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    window = file.whole("gemma3.attention.sliding_window", 0)
    softcap = file.real("gemma3.final_logit_softcapping", 0.0)
    local = {"rope_type": "default", "rope_theta": file.real("gemma3.rope.freq_base_swa", THETA)}
    whole = config["rope_parameters"]
    if "gemma3.rope.freq_base" not in file.metadata:
        whole = {**whole, "rope_theta": 1_000_000.0}
    return {
        "query_pre_attn_scalar": _scaled_as(config, 62),
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _windows(file, config, 6 if window else 1),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": softcap or None,
        "rope_parameters": {"full_attention": whole, "sliding_attention": local},
        **_biased(file, config),
    }


def _gemma4(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    at, layers, types = "gemma4", config["num_hidden_layers"], _windows(file, config, 6)
    shared = file.whole(f"{at}.attention.shared_kv_layers", 0)
    if len({*types[: max(0, layers - shared)]}) < 2 or types[-1] != "full_attention":
        raise file.wrong(
            f"{at}.attention.sliding_window_pattern",
            "layers of both kinds that hold keys, and a last one that sees all positions",
        )
    inner = _each(file, "feed_forward_length", layers)
    keys = _each(file, "attention.head_count_kv", layers, config["num_attention_heads"])
    sliding, full = (types.index(f"{kind}_attention") for kind in ("sliding", "full"))
    embedded = file.tensors.get("per_layer_token_embd.weight")
    found = {
        "head_dim": file.whole(f"{at}.attention.key_length_swa"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": keys[sliding],
        "num_global_key_value_heads": keys[full] if keys[full] != keys[sliding] else None,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "num_kv_shared_layers": shared,
        "layer_types": types,
        "sliding_window": file.whole(f"{at}.attention.sliding_window"),
        "final_logit_softcapping": file.real(f"{at}.final_logit_softcapping", 30.0),
        "hidden_size_per_layer_input": file.whole(f"{at}.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if embedded is None else embedded.length,
        "rope_parameters": {
            "full_attention": _proportional(file, config),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.real(f"{at}.rope.freq_base_swa"),
            },
        },
        **_biased(file, config),
    }
    sizes = [_gemma4_layer({**config, **found}, layer) for layer in range(layers)]
    for name, numbers, size in (
        ("feed_forward_length", inner, "intermediate_size"),
        ("attention.head_count_kv", keys, "num_key_value_heads"),
    ):
        if numbers != [one[size] for one in sizes]:
            raise file.wrong(f"{at}.{name}", "numbers that Gemma 4 has, by the kinds of its layers")
    if file.whole(f"{at}.rope.dimension_count_swa", found["head_dim"]) != found["head_dim"]:
        raise file.wrong(f"{at}.rope.dimension_count_swa", f"{found['head_dim']}, a whole head")
    return found


def _proportional(file: GgufFile, config: Config) -> dict[str, Any]:
    """Return the rotary embedding of a part of each head, whose rest a file divides to nothing."""
    quotients, half = _vector(file, "rope_freqs.weight"), config["head_dim"] // 2
    rotated = 0 if quotients is None else int((quotients == 1).sum())
    if quotients is None or len(quotients) != half or (quotients[rotated:] < 1e29).any():
        raise CheckpointError(
            f"{file.path}: rope_freqs.weight is not what Gemma 4 has: {half} numbers, some of 1 "
            "and then of 1e30. Build from the model's safetensors folder"
        )
    theta = file.real("gemma4.rope.freq_base")
    part = rotated / half
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": part}


def _reads_others(config: Config, layer: int) -> bool:
    """Tell whether a layer of Gemma 4 reads the keys and values of another."""
    return bool(layer >= config["num_hidden_layers"] - config["num_kv_shared_layers"])


def _gemma4_layer(config: Config, layer: int) -> Config:
    wide = config["use_double_wide_mlp"] and _reads_others(config, layer)
    sizes = {"intermediate_size": config["intermediate_size"] * (2 if wide else 1)}
    if config["layer_types"][layer] == "full_attention":
        sizes["head_dim"] = config["global_head_dim"]
        if config["attention_k_eq_v"] and config["num_global_key_value_heads"]:
            sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {**config, **sizes}


def _gemma4_lacks(config: Config, layer: int) -> set[str]:
    lacks = set() if config["hidden_size_per_layer_input"] else {*_PER_LAYER, *_PER_LAYER_OUTER}
    if _reads_others(config, layer):
        return lacks | _KEYS_AND_VALUES
    full = config["layer_types"][layer] == "full_attention"
    return lacks | ({"attn_v"} if full and config["attention_k_eq_v"] else set())


def _lfm2(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    keys = _each(file, "attention.head_count_kv", config["num_hidden_layers"])
    if len({*keys} - {0}) > 1:
        raise file.wrong("lfm2.attention.head_count_kv", "one number, and 0 for convolutions")
    return {
        "layer_types": ["full_attention" if count else "conv" for count in keys],
        "conv_L_cache": file.whole("lfm2.shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config.pop("rms_norm_eps"),
    }


def _lfm2_lacks(config: Config, layer: int) -> Collection[str]:
    return _CONVOLUTION if config["layer_types"][layer] != "conv" else _LFM2_ATTENTION


def _phi3(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    length = config["max_position_embeddings"]
    original = file.whole("phi3.rope.scaling.original_context_length", length)
    head = config["head_dim"]
    rotated = file.whole("phi3.rope.dimension_count", head)
    rope = {**config["rope_parameters"], "partial_rotary_factor": rotated / head}
    long, short = (_vector(file, f"rope_factors_{name}.weight") for name in ("long", "short"))
    if long is not None and short is not None:
        if not len(long) == len(short) == rotated // 2:
            raise CheckpointError(
                f"{file.path}: rope_factors_long and rope_factors_short hold {len(long)} and "
                f"{len(short)} numbers; expected {rotated // 2}. Convert the model again"
            )
        factors = {"long_factor": _reals(long), "short_factor": _reals(short)}
        rope |= {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
        rope |= _attention_factor(file, length / original, original)
    window = file.whole("phi3.attention.sliding_window", 0)
    return {
        "original_max_position_embeddings": original,
        "sliding_window": window or None,  # Phi-4 has none, and says 0
        "rope_parameters": rope,
    }


def _reals(numbers: Floats) -> list[float]:
    return [float(str(number)) for number in numbers]


def _attention_factor(file: GgufFile, scale: float, original: int) -> dict[str, float]:
    """Return how attention is scaled, where that is not what follows from both lengths."""
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    said = file.real("phi3.rope.scaling.attn_factor", usual)
    return {} if math.isclose(said, usual, rel_tol=1e-6) else {"attention_factor": said}


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_TWO_NORMS = {"ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = {**_ATTENTION, **_TWO_NORMS, **_FEED_FORWARD}
_GEMMA = {**_ATTENTION, **_FOUR_NORMS, **_FEED_FORWARD}
_KEYS_AND_VALUES = {"attn_k", "attn_v", "attn_k_norm"}
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_PER_LAYER_OUTER = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_GEMMA4 = {**_GEMMA, **_HEAD_NORMS, **_PER_LAYER, "layer_output_scale": "layer_scalar"}
_CONVOLUTION = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **_CONVOLUTION,
    **_LFM2_ATTENTION,
}
_LFM2_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
_PHI = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

FAMILIES = {
    "llama": Family("llama", _LLAMA, _llama, interleaved=True),
    "qwen2": Family("qwen2", _LLAMA, _plain),
    "qwen3": Family("qwen3", {**_LLAMA, **_HEAD_NORMS}, _biased),
    "gemma2": Family("gemma2", _GEMMA, _gemma2, shifted_norms=True),
    "gemma3": Family("gemma3_text", {**_GEMMA, **_HEAD_NORMS}, _gemma3, shifted_norms=True),
    "gemma4": Family(
        "gemma4_text",
        _GEMMA4,
        _gemma4,
        {**_OUTER, **_PER_LAYER_OUTER},
        of_layer=_gemma4_layer,
        lacks=_gemma4_lacks,
        unread=_KEYS_AND_VALUES,
        uneven=True,
    ),
    "lfm2": Family("lfm2", _LFM2, _lfm2, _LFM2_OUTER, lacks=_lfm2_lacks, uneven=True),
    "phi3": Family("phi3", _PHI, _phi3, partly_rotated=True),
}
"""By `general.architecture`; Mistral's is Llama's."""
