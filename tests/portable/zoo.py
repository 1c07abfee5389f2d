"""Small random checkpoints of every architecture held, and their portable graphs."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from shared import REPOSITORY, locked, nightly_but
from specrt.geometry import Geometry
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.portable.attachment import attach_graph
from specrt_export.portable.graph import geometry_of, read_graph

CACHE = REPOSITORY / "build" / "tests-export"
"""Ignored by git. A folder for each state of what decides the checkpoints and their graphs."""
RECORDS = Path(__file__).with_name("records")
"""Graphs without weights of what is tested on every change: `python -m portable.zoo NAME ...`
records some again, and a test exports them anew."""
RECORDED = sorted(path.name.partition(".")[0] for path in RECORDS.iterdir())
LIBRARIES = (
    "huggingface-hub", "numpy", "onnx", "onnx-ir", "onnxscript", "optimum", "safetensors", "torch",
    "transformers",
)  # fmt: skip
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large, so that attention matters: with the usual 0.02 every token looks at all alike.
    "initializer_range": 0.2,
}
SLIDING = {"sliding_window": WINDOW}
ALTERNATING = ["sliding_attention", "full_attention"]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Architecture: config class, its changes to SIZES, and the arguments it is saved with.
Model = tuple[str, dict[str, Any], dict[str, Any]]
MODELS: dict[str, Model] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4}, {}),
    "llama3": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
        {"dtype": "bfloat16"},
    ),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, **SLIDING, "max_window_layers": 1}, {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, {"max_shard_size": "16KB"}),
    "mistral": ("MistralConfig", SLIDING, {"dtype": "float16"}),
    "phi3": ("Phi3Config", {}, {}),
    # Small caps, so that leaving one out shows.
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16, **SLIDING,
            "attn_logit_softcapping": 0.7, "final_logit_softcapping": 2.0,
        },
        {},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, **SLIDING, "layer_types": ALTERNATING}, {}),
    "gpt2": ("GPT2Config", {}, {}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None}, {}),
    "opt": ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2}, {}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}, {}),
    "starcoder2": ("Starcoder2Config", SLIDING, {}),
}  # fmt: skip


_BART: dict[str, Any] = {
    "vocab_size": 160, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 64, "max_position_embeddings": 512, "init_std": 0.2,
    "scale_embedding": True, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": 160, "d_model": 32, "d_kv": 12, "d_ff": 64, "num_layers": 2,
    "num_decoder_layers": 3, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
_COMPUTED = {**_BART, "max_position_embeddings": 256}
"""A table that is computed is in the graph."""
_WHISPER: dict[str, Any] = {
    **_BART, "num_mel_bins": 6, "max_source_positions": 20, "max_target_positions": 320,
    "begin_suppress_tokens": None, "suppress_tokens": None, "bos_token_id": 3,
}  # fmt: skip

# Architecture: class, config class and its arguments.
ENCODER_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    # transformers' cache has as many layers as the encoder; tied, a random one repeats its input.
    "t5_even": (
        "T5ForConditionalGeneration", "T5Config",
        {**_T5, "num_decoder_layers": 2, "tie_word_embeddings": False},
    ),
    "t5_untied": (
        "T5ForConditionalGeneration", "T5Config",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", _T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", _BART),
    "bart_biased": ("BartForConditionalGeneration", "BartConfig", _BART),
    "mbart": ("MBartForConditionalGeneration", "MBartConfig", _BART),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", _COMPUTED),
    "marian": ("MarianMTModel", "MarianConfig", {**_COMPUTED, "decoder_vocab_size": 160}),
    "marian_apart": (
        "MarianMTModel", "MarianConfig",
        {
            **_BART, "vocab_size": 130, "decoder_vocab_size": 160,
            "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False,
        },
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER),
    "whisper_draft": ("WhisperForCausalLM", "WhisperConfig", _WHISPER),
}  # fmt: skip
"""Layers and heads of encoder and decoder differ, so that one is not taken for the other."""
HALVES = {"umt5": "bfloat16", "mbart": "float16"}
"""Those that are saved in half precision, in several files."""


_SHORT_LIVED: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": 2 * ALTERNATING, "head_dim": 16, "global_head_dim": 32,
    **SLIDING,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
"""Multi-head latent attention: keys and values of two widths."""
_CONV: dict[str, Any] = {"num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}

_LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_STATES: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
}  # fmt: skip

MEMORIES: dict[str, Model] = {
    # Half of the layers read the keys and values of others; heads of two sizes.
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_SHORT_LIVED, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 160, "use_double_wide_mlp": True,
            "final_logit_softcapping": 2.0,
        },
        {},
    ),
    "gemma4_unified": (
        "Gemma4TextConfig",
        {
            **_SHORT_LIVED, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
        {"dtype": "bfloat16"},
    ),
    "minicpm3": ("MiniCPM3Config", _LATENT, {}),
    "youtu": ("YoutuConfig", _LATENT, {}),
    "lfm2": ("Lfm2Config", {**_CONV, "layer_types": ["conv", "full_attention", "conv"]}, {}),
    "lfm3": (
        "Lfm3Config",
        {
            **_CONV, **SLIDING, "num_hidden_layers": 4, "head_dim": 16,
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        },
        {},
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4, "head_dim": 16, **_LINEAR,
            "layer_types": 3 * ["linear_attention"] + ["full_attention"],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
        {},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4, "head_dim": 16, **_LINEAR, "mlp_only_layers": [0, 1, 2, 3],
            "layer_types": 3 * ["linear_attention"] + ["full_attention"],
            "partial_rotary_factor": 0.5,
        },
        {},
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            "num_hidden_layers": 4, **_LINEAR, "linear_allow_neg_eigval": True,
            "layer_types": 3 * ["linear_attention"] + ["full_attention"],
        },
        {},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 12, "ssm_state_size": 16,
            "n_groups": 2, "num_hidden_layers": None,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        },
        {},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_STATES, "num_local_experts": 0, "num_experts_per_tok": 0,
            "shared_intermediate_size": 64, "layer_types": ["linear_attention", "full_attention"],
        },
        {},
    ),
    "falcon_h1": ("FalconH1Config", {**_STATES, "head_dim": 16, "mamba_d_ssm": 64}, {}),
    "bamba": ("BambaConfig", {**_STATES, "attn_layer_indices": [1]}, {}),
    "mamba2": (
        "Mamba2Config",
        {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2},
        {},
    ),
}  # fmt: skip
"""Layers that remember in other ways than by keys and values of one shape."""

RECURRENT = (
    "qwen3_5", "qwen3_next", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba",
    "mamba2",
)  # fmt: skip
"""Those with recurrent states."""

_EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_GROUPS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_group": 4,
    "topk_group": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
"""Experts of some groups alone are chosen from, by scores with biases."""
_LOCAL: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}

EXPERTS: dict[str, Model] = {
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 16, "mlp_only_layers": [0]}, {}),
    "qwen3_next_moe": (
        "Qwen3NextConfig", {**MEMORIES["qwen3_next"][1], **_EXPERTS, "mlp_only_layers": []}, {},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig", {**MEMORIES["qwen3_5"][1], **_EXPERTS}, {"dtype": "bfloat16"},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_EXPERTS, "num_hidden_layers": 3, "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        {},
    ),
    "mixtral": ("MixtralConfig", {**_LOCAL, "sliding_window": None}, {"dtype": "bfloat16"}),
    "olmoe": ("OlmoeConfig", _EXPERTS, {}),
    "qwen2_moe": ("Qwen2MoeConfig", _EXPERTS, {}),
    "glm4_moe": ("Glm4MoeConfig", {**_GROUPS, "head_dim": 16}, {}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_LATENT, **_GROUPS}, {}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig", {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24}, {},
    ),
    # A checkpoint has its scores' biases under another name.
    "minimax_m2": ("MiniMaxM2Config", {**_LOCAL, "head_dim": 16, "rotary_dim": 8}, {}),
    "phimoe": ("PhimoeConfig", {**_LOCAL, "num_experts_per_tok": 2}, {}),
    "granitemoe": ("GraniteMoeConfig", _LOCAL, {}),
    "granitemoehybrid_moe": (
        "GraniteMoeHybridConfig", {**MEMORIES["granitemoehybrid"][1], **_LOCAL}, {},
    ),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {
            **MEMORIES["gemma4_unified"][1], **_EXPERTS, "top_k_experts": 3,
            "enable_moe_block": True,
        },
        {},
    ),
}  # fmt: skip
"""Mixtures of experts, whose weights lie apart in a checkpoint or in one tensor."""

NEIGHBOURS: dict[str, Model] = {"cohere": ("CohereConfig", {}, {})}
"""Neighbouring numbers of a head are turned together. Attention and gates read one value."""

_WIDE: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
WIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama3", "qwen2", "mistral", "phi3", "starcoder2"), _WIDE),
    "llama2": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "smollm3": {**_WIDE, "no_rope_layers": [1, 1]},
    "gpt_neox": {"num_attention_heads": 1, "rotary_pct": 0.5},
}
"""The same with heads of 16 where they are 8: GroupQueryAttention rotates no narrower ones."""

_ODD: dict[str, Any] = {
    "vocab_size": 163, "hidden_size": 80, "intermediate_size": 100, "num_key_value_heads": 1,
}  # fmt: skip
ODD: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt2", "smollm3", "starcoder2"), _ODD),
    "llama3": {**_ODD, "mlp_bias": True},
    "qwen2": {**_ODD, "hidden_act": "gelu"},
    "phi3": {**_ODD, "hidden_act": "relu"},
    "qwen3": {**_ODD, "head_dim": 6},
    "gemma2": {**_ODD, "head_dim": 20},
    "opt": {**_ODD, "ffn_dim": 100, "word_embed_proj_dim": 80},
    "gpt_neox": {**_ODD, "num_key_value_heads": None, "rotary_pct": 0.3},
}
"""The same in sizes that nothing divides: 80 holds blocks of 16 only, 100 none, and no size of a
head, of a vocabulary or of a gate is a multiple of 16. Gates have biases, or other functions."""

OTHERS = {
    "align-target": "align.conftest:save_target",
    "align-draft": "align.conftest:save_draft",
    **{
        f"coded-{kind}": "support.quantized_folders:save_model"
        for kind in ("llama", "lfm2", "gemma4")
    },
    **{f"gguf-{kind}": "support.gguf_files:save_model" for kind in ("llama", "qwen3", "gemma3")},
}
"""Models of other folders of tests, and what writes their checkpoints."""

BARE = "-bare"
"""Ends the name of an architecture whose graph has no weights yet."""

OFTEN = (
    "llama3", "qwen3", "gemma2", "gemma4", "lfm2", "gpt2", "qwen3_5", "glm4_moe_lite", "granitemoe",
    "minimax_m2",
)  # fmt: skip
"""Tied weights; norms of heads; soft caps and windows; shared keys; convolutions; a model without
gates and RMS norms; recurrent states; experts in groups, in one tensor, and with biases."""


def architectures(*names: str) -> list[Any]:
    """Return architectures to test with: those of `OFTEN` on every change, the others nightly."""
    nightly = pytest.mark.nightly
    return [
        name if name in OFTEN else pytest.param(name, marks=nightly) for name in names or MODELS
    ]


def matrix(names: Sequence[str], ways: Sequence[str], whole: Sequence[str] = ()) -> list[Any]:
    """Pair architectures with ways to treat them: those of `OFTEN` with every second way and all
    `whole` ones, whatever else there is nightly."""
    pairs = list(product(names, ways))
    often = [
        (name, way) for name, way in pairs if name in OFTEN
        and (way in whole or (OFTEN.index(name) + ways.index(way)) % 2 == 0)
    ]  # fmt: skip
    return nightly_but(often, pairs)


class InDoubles(TorchFunctionMode):
    """Computes in float64 what a model asks to be computed in float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def doubled(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(doubled, args), **{k: doubled(v) for k, v in (kwargs or {}).items()})


@dataclass(frozen=True)
class Exported:
    """A checkpoint and its portable graph."""

    checkpoint: Checkpoint
    graph: Path

    @property
    def source(self) -> tuple[Path, Path]:
        """The graph and the folder of its weights."""
        return self.graph, self.checkpoint.folder

    @property
    def geometry(self) -> Geometry:
        """What the graph says of itself."""
        return geometry_of(read_graph(self.graph))


def exported(name: str) -> Exported:
    """Give a recorded graph weights, or export one that is not, into the cache; nobody may write.

    A name that ends in `BARE` has the weights next to a graph without any.
    """
    root = cache_folder()
    made = root / name
    with locked(root / f"{name}.lock"):
        if not made.exists():
            part = root / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            architecture = name.removesuffix(BARE)
            save_checkpoint(architecture, part / "checkpoint")
            graph = part / "graph.onnx"
            if archive_of(architecture).exists():
                with tarfile.open(archive_of(architecture)) as archive:
                    archive.extractall(part, filter="data")
            else:
                export_bare(part)
            if architecture == name:
                attach_graph(graph, Checkpoint.open(part / "checkpoint"))
            part.rename(made)
    return Exported(Checkpoint.open(made / "checkpoint"), made / "graph.onnx")


def archive_of(name: str) -> Path:
    """Return where the graphs of an architecture are recorded."""
    return RECORDS / f"{name}.tar.xz"


def export_bare(folder: Path) -> None:
    """Export the config.json of a folder's checkpoint into it."""
    from specrt_export.portable.exporter import export_graph

    checkpoint = Checkpoint.open(folder / "checkpoint", config_only=True)
    export_graph(checkpoint, folder / "graph.onnx")


def record(name: str) -> None:
    """Export an architecture without its weights, into the record."""
    with TemporaryDirectory() as held:
        folder = Path(held)
        save_checkpoint(name, folder / "checkpoint")
        export_bare(folder)
        with tarfile.open(archive_of(name), "w:xz", preset=9) as archive:
            for path in sorted(folder.glob("*.onnx")):
                info = tarfile.TarInfo(path.name)
                info.size = path.stat().st_size
                archive.addfile(info, path.open("rb"))


@cache
def cache_folder() -> Path:
    """Return the folder of checkpoints and graphs, by the hash of what they depend on."""
    export, runtime = REPOSITORY / "export" / "specrt_export", REPOSITORY / "runtime" / "specrt"
    rooms = (export / room for room in ("checkpoint", "heads", "portable"))
    sources = [
        Path(__file__), *RECORDS.glob("*"), *(path for room in rooms for path in room.glob("*.py")),
        runtime / "geometry.py", runtime / "engine" / "ort" / "block_engine.py",
    ]  # fmt: skip
    found = hashlib.sha256(json.dumps([sys.version, *map(version, LIBRARIES)]).encode())
    for path in sorted(sources):
        found.update(path.read_bytes())
    folder = CACHE / found.hexdigest()[:12]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_checkpoint(name: str, folder: Path) -> None:
    """Write a random checkpoint of an architecture, the same every time."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if name in OTHERS:
        module, _, function = OTHERS[name].partition(":")
        getattr(import_module(module), function)(folder, name.partition("-")[2])
        return
    base, _, sizes_of = name.partition("-")
    if base in ENCODER_DECODERS:
        save_encoder_decoder(base, folder)
        return
    kind, changes, saving = {**MODELS, **NEIGHBOURS, **MEMORIES, **EXPERTS}[base]
    own = {**changes, **({"wide": WIDE, "odd": ODD}[sizes_of][base] if sizes_of else {})}
    sizes = {key: value for key, value in {**SIZES, **own}.items() if value is not None}
    config = getattr(transformers, kind)(**sizes)
    torch.manual_seed(0)
    arguments = dict(saving)
    dtype = getattr(torch, arguments.pop("dtype", "float32"))
    factory: Any = transformers.AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    # Norms and biases start as ones and zeros, where swapping or dropping them would not show.
    for tensor in model.state_dict().values():
        if tensor.ndim == 1:
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.to(dtype).save_pretrained(folder, **arguments)


def save_encoder_decoder(name: str, folder: Path) -> None:
    """Write a random checkpoint of an encoder-decoder, the same every time."""
    import torch
    import transformers

    kind, config, sizes = ENCODER_DECODERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    # As T5 1.1 has it: a config that ties says so of a checkpoint that does not.
    if name in ("t5_untied", "t5_even"):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    if name in ("bart_biased", "marian", "marian_apart"):
        model.final_logits_bias += torch.randn_like(model.final_logits_bias)
    if name in HALVES:
        model.to(getattr(torch, HALVES[name])).save_pretrained(folder, max_shard_size="16KB")
        return
    model.save_pretrained(folder)


if __name__ == "__main__":
    for given in sys.argv[1:] or RECORDED:
        record(given)
