"""GGUF files for tests: any bytes at all, and small random models as llama.cpp writes them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
"""Types of values."""

PACKED = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q"}

Tensor = tuple[str, Sequence[int], int, bytes]
"""Name, shape with the innermost axis last, number of the format, blocks."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def item(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(PACKED[kind], value)


def value(key: str | bytes, kind: int, held: Any) -> bytes:
    return text(key) + struct.pack("<I", kind) + item(kind, held)


def array(key: str, kind: int, items: Sequence[Any]) -> bytes:
    head = text(key) + struct.pack("<IIQ", ARRAY, kind, len(items))
    return head + b"".join(item(kind, one) for one in items)


def plain(key: str, held: Any) -> bytes:
    """Return a value by the type it has in Python."""
    if isinstance(held, (list, tuple)):
        kinds = {str: STRING, bool: BOOL, int: I32, float: F32}
        return array(key, kinds[type(held[0])], held)
    kinds = {str: STRING, bool: BOOL, int: U32, float: F32}
    return value(key, kinds[type(held)], held)


def entry(name: str | bytes, shape: Sequence[int], kind: int, offset: int) -> bytes:
    axes = b"".join(struct.pack("<Q", axis) for axis in reversed(shape))
    return text(name) + struct.pack("<I", len(shape)) + axes + struct.pack("<IQ", kind, offset)


def container(
    values: Sequence[bytes] = (), tensors: Sequence[Tensor] = (), *, version: int = 3,
    alignment: int = 32, counts: tuple[int, int] | None = None,
    entries: Sequence[bytes] | None = None,
) -> bytes:  # fmt: skip
    """Return a whole file; `counts` and `entries` replace what would be true of it."""
    data, made = b"", []
    for name, shape, kind, blocks in tensors:
        made.append(entry(name, shape, kind, len(data)))
        data += blocks + bytes(-len(blocks) % alignment)
    said = counts or (len(tensors), len(values))
    head = b"GGUF" + struct.pack("<IQQ", version, *said)
    head += b"".join([*values, *(made if entries is None else entries)])
    return head + bytes(-len(head) % alignment) + data


ALPHABET = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
ALPHABET += [chr(256 + n) for n in range(256 - len(ALPHABET))]
"""How GPT-2 spells bytes, the printable ones first."""

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ġ Ġ"]

BYTES_VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [
        *ALPHABET, *(m.replace(" ", "") for m in MERGES), "<|begin|>", "<|eot_id|>",
        "<|end_of_text|>", "<tool>",
    ],
    "tokenizer.ggml.token_type": [*[1] * (256 + len(MERGES)), 3, 3, 3, 4],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 256 + len(MERGES),
    "tokenizer.ggml.eos_token_id": 258 + len(MERGES),
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
}  # fmt: skip

PIECES = [
    *"▁thelowrdin.s<>/é", "▁t", "he", "▁the", "in", "ll", "lo", "hello", "▁hello", "or", "wor",
    "▁w", "▁wor", "ld", "▁world", "▁▁", "▁▁▁▁", "er", "th", "hel", "▁hel", "s>",
]  # fmt: skip

SCORED_VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": [
        "<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *PIECES,
        "<|end|>", "<|endoftext|>", "  \n",
    ],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 3, 4],
    "tokenizer.ggml.scores": [
        *[0.0] * 259, *(-float(len(PIECES) - len(p) * 3 + i) for i, p in enumerate(PIECES)),
        -1000.0, -1000.0, -1000.0,
    ],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip

LLAMA3_FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

_BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 266,
    "eos_token_id": [268, 267],
    "pad_token_id": None,
}
_WINDOW = ["sliding_attention", "full_attention"]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rms_norm_eps": 1e-5, "head_dim": 16}),
    "llama3": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True, "head_dim": 32,
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_FACTORS,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": (
        "Qwen2Config",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
            "attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6,
            "layer_types": _WINDOW * 3, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma4-large": (
        "Gemma4TextConfig",
        {
            "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "num_hidden_layers": 4,
            "layer_types": _WINDOW * 2, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 320,
            "final_logit_softcapping": 30.0,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False, "rope_parameters": {
                "rope_type": "default", "rope_theta": 1000000.0,
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 32, "original_max_position_embeddings": 512}),
    "phi3-long": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.5],
                "short_factor": [1.0, 1.0, 1.0, 1.25, 1.5, 2.0],
                "original_max_position_embeddings": 128,
            },
        },
    ),
}  # fmt: skip
"""By name: the class of the configuration, and what is other than usual in it."""

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "gemma4_text": "gemma4"}


def made(name: str, **more: Any) -> Any:
    """Return a random model; its norms and biases are random, too."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    config = getattr(transformers, kind)(**{**_BASE, **changes, **more})
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for held in model.state_dict().values():
            if held.ndim == 1:
                held.add_(0.2 * torch.randn(held.shape))
    return model.eval()


def wide(name: str) -> Any:
    """Return a random model with rows of 256, as K-quants want."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    scalar = {"query_pre_attn_scalar": 64} if name.startswith("gemma") else {}
    return made(name, **sizes, **scalar)


def save_model(folder: Path, name: str) -> None:
    """Write the checkpoint of a model with rows of 256."""
    wide(name).save_pretrained(folder)


def described(model: Any) -> dict[str, Any]:
    """Return the metadata of a model, as llama.cpp's converter writes them."""
    config = model.config
    at = ARCHITECTURES.get(config.model_type, config.model_type)
    last = config.per_layer_config[config.num_hidden_layers - 1] if at == "gemma4" else config
    head = getattr(last, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "general.architecture": at,
        "general.name": f"tiny {config.model_type}",
        f"{at}.block_count": config.num_hidden_layers,
        f"{at}.context_length": config.max_position_embeddings,
        f"{at}.embedding_length": config.hidden_size,
        f"{at}.feed_forward_length": config.intermediate_size,
        f"{at}.attention.head_count": config.num_attention_heads,
        f"{at}.attention.head_count_kv": last.num_key_value_heads,
        f"{at}.attention.layer_norm_rms_epsilon": float(
            config.norm_eps if at == "lfm2" else config.rms_norm_eps
        ),
    }
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    if at != "gemma2":
        values[f"{at}.rope.freq_base"] = float(whole["rope_theta"])
    if whole["rope_type"] in ("linear", "yarn", "longrope"):
        values[f"{at}.rope.scaling.type"] = whole["rope_type"]
    if "factor" in whole and whole["rope_type"] != "llama3":
        values[f"{at}.rope.scaling.factor"] = float(whole["factor"])
    if whole["rope_type"] in ("yarn", "longrope"):
        original = whole["original_max_position_embeddings"]
        values[f"{at}.rope.scaling.original_context_length"] = original
    if at in ("llama", "phi3"):
        partial = whole.get("partial_rotary_factor", 1.0)
        values[f"{at}.rope.dimension_count"] = int(partial * head)
    if at in ("gemma2", "gemma3", "qwen3") or (at == "llama" and config.head_dim * 4 != 64):
        values |= {f"{at}.attention.key_length": head, f"{at}.attention.value_length": head}
    if at in ("gemma2", "gemma3", "phi3"):
        values[f"{at}.attention.sliding_window"] = config.sliding_window or 0
    if at == "gemma2":
        values["gemma2.attn_logit_softcapping"] = config.attn_logit_softcapping
        values["gemma2.final_logit_softcapping"] = config.final_logit_softcapping
    if at == "lfm2":
        full = [kind == "full_attention" for kind in config.layer_types]
        values["lfm2.attention.head_count_kv"] = [2 * one for one in full]
        values["lfm2.shortconv.l_cache"] = config.conv_L_cache
    return values | (_of_gemma4(config) if at == "gemma4" else {})


def _of_gemma4(config: Any) -> dict[str, Any]:
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    sizes = [config.per_layer_config[layer] for layer in range(layers)]
    lengths = {
        f"attention.{kind}_length{of}": sizes[sliding.index(bool(of))].head_dim
        for kind in ("key", "value")
        for of in ("", "_swa")
    }
    values = {
        **lengths,
        "rope.dimension_count": lengths["attention.key_length"],
        "rope.dimension_count_swa": lengths["attention.key_length_swa"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
    }
    if config.use_double_wide_mlp:
        inner = config.intermediate_size
        values["feed_forward_length"] = [inner] * (layers - shared) + [2 * inner] * shared
    if config.attention_k_eq_v:
        values["attention.head_count_kv"] = [one.num_key_value_heads for one in sizes]
    if config.final_logit_softcapping != 30:
        values["final_logit_softcapping"] = config.final_logit_softcapping
    return {f"gemma4.{key}": held for key, held in values.items()}


def tensors_of(model: Any) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a model, named and laid out as llama.cpp wants them."""
    import gguf

    config = model.config
    at = ARCHITECTURES.get(config.model_type, config.model_type)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == at)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    found = {}
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        stem, _, suffix = name.replace("layer_scalar", "layer_scalar.weight").rpartition(".")
        array = parameter.detach().numpy().astype(np.float32)
        module = stem.rpartition(".")[2]
        if at == "llama" and module in ("q_proj", "k_proj"):
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            array = _interleaved(array, heads[module])
        if at in ("gemma2", "gemma3") and stem.endswith("norm"):
            array = array + 1
        if stem.endswith("conv.conv"):
            array = array[:, 0]
        found[f"{names.get_name(stem)}.{suffix}"] = array
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _quotients(rope, config.head_dim)
    if at == "gemma4":
        half = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
        rotated = int(half * rope["full_attention"]["partial_rotary_factor"])
        quotients = [1.0] * rotated + [1e30] * (half - rotated)
        found["rope_freqs.weight"] = np.array(quotients, np.float32)
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            factors = np.array(rope[f"{length}_factor"], np.float32)
            found[f"rope_factors_{length}.weight"] = factors
    return found


def _interleaved(array: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _quotients(rope: Mapping[str, Any], head: int) -> NDArray[np.float32]:
    """Return unscaled over scaled frequencies, by transformers' own function."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head, rope_parameters=dict(rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    bare = rope["rope_theta"] ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    quotients: NDArray[np.float32] = (bare / scaled).numpy()
    return quotients


Store = Callable[[str, NDArray[np.float32]], tuple[int, bytes]]
"""Returns the number of the format and the blocks of a tensor."""


def floats(name: str, array: NDArray[np.float32]) -> tuple[int, bytes]:
    return 0, array.tobytes()


def half(name: str, array: NDArray[np.float32]) -> tuple[int, bytes]:
    return (1, array.astype("<f2").tobytes()) if array.ndim > 1 else floats(name, array)


def brain(name: str, array: NDArray[np.float32]) -> tuple[int, bytes]:
    if array.ndim == 1:
        return floats(name, array)
    return 30, (array.view(np.uint32) >> 16).astype("<u2").tobytes()


def quantized(name: str, array: NDArray[np.float32]) -> tuple[int, bytes]:
    """Store matrices in one format after another; rows of 64 and 96 hold blocks of 32."""
    import gguf

    if array.ndim == 1:
        return floats(name, array)
    kinds = [gguf.GGMLQuantizationType[n] for n in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
    kind = kinds[sum(name.encode()) % len(kinds)]
    return int(kind), gguf.quants.quantize(array, kind).tobytes()


def write_model(
    path: Path, model: Any, store: Store = floats, vocabulary: Mapping[str, Any] = BYTES_VOCABULARY,
    **changes: Any,
) -> Path:  # fmt: skip
    """Write a model; `changes` to its metadata have `__` for a dot, and None takes one away."""
    values = {**described(model), **vocabulary}
    values |= {key.replace("__", "."): held for key, held in changes.items()}
    tensors = []
    for name, array in tensors_of(model).items():
        kind, blocks = store(name, array)
        tensors.append((name, array.shape, kind, blocks))
    path.write_bytes(container([plain(k, v) for k, v in values.items() if v is not None], tensors))
    return path
