"""Random heads and targets, as checkpoints in both formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specrt_export.heads.head_checkpoint import HeadSizes
from specrt_export.heads.mtp_module import MtpModule
from specrt_export.recipe.recipe import read_recipe
from support.builds import build
from support.gpu_double import gpu as gpu

VOCABULARY, SCORED, WIDTH, LAYERS = 96, 40, 32, 4
INPUTS = [1, 2, 3]

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu",
}  # fmt: skip

LAYER = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "vocab_size": VOCABULARY,
}  # fmt: skip


def _random(*shape: int, scale: float = 0.3) -> torch.Tensor:
    return torch.randn(*shape) * scale


def save_model(folder: Path, seed: int, **changes: Any) -> Path:
    """Write the checkpoint of a random language model, whose layers differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TARGET | changes))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target."""
    return save_model(tmp_path_factory.mktemp("target"), 0)


@pytest.fixture(scope="session")
def trimmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random draft model of one layer that scores some entries only."""
    folder = save_model(tmp_path_factory.mktemp("trimmed"), 2, num_hidden_layers=1)
    path, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    stored, made = load_file(path), tensors()
    ids = made["d2t"] + torch.arange(SCORED)
    head = stored["lm_head.weight"][ids].contiguous()
    save_file(stored | {"lm_head.weight": head, "d2t": made["d2t"]}, path, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": SCORED}))
    return folder


def tensors(*flags: str, scored: int = SCORED, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Return random weights of a head, by the names of `speculators`."""
    torch.manual_seed(1)
    read, heads, kv = len(INPUTS) * width, width, width // 2
    made = {
        "fc.weight": _random(width, read),
        "layers.0.hidden_norm.weight": 1 + _random(width),
        "layers.0.input_layernorm.weight": 1 + _random(width),
        "layers.0.post_attention_layernorm.weight": 1 + _random(width),
        "layers.0.self_attn.q_proj.weight": _random(heads, 2 * width),
        "layers.0.self_attn.k_proj.weight": _random(kv, 2 * width),
        "layers.0.self_attn.v_proj.weight": _random(kv, 2 * width),
        "layers.0.self_attn.o_proj.weight": _random(width, heads),
        "layers.0.mlp.gate_proj.weight": _random(64, width),
        "layers.0.mlp.up_proj.weight": _random(64, width),
        "layers.0.mlp.down_proj.weight": _random(width, 64),
        "norm.weight": 1 + _random(width),
        "lm_head.weight": _random(scored, width),
    }
    if scored < VOCABULARY:
        ids = torch.sort(torch.randperm(VOCABULARY)[:scored]).values
        made["d2t"] = ids - torch.arange(scored)
        made["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).scatter(0, ids, True)
    if "norm_before_fc" in flags:
        made["input_norm.weight"] = 1 + _random(read)
    if "fc_norm" in flags:
        made |= {f"fc_norm.{i}.weight": 1 + _random(width) for i in range(len(INPUTS))}
    return made


def save_head(
    folder: Path, *flags: str, flat: bool = False, scored: int = SCORED,
    weights: dict[str, torch.Tensor] | None = None, **more: Any,
) -> Path:  # fmt: skip
    """Write the checkpoint of a head with some flags, in the format of `speculators` or flat."""
    folder.mkdir()
    made = tensors(*flags, scored=scored) if weights is None else weights
    if flat:
        made = {n.replace("layers.0.", "midlayer.", 1): t for n, t in made.items()}
        outputs = [i - 1 for i in INPUTS]
        config: dict[str, Any] = {
            **LAYER, "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs},
        }  # fmt: skip
    else:
        config = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
            "model_type": "speculator_model", "transformer_layer_config": LAYER,
            "eagle_aux_hidden_state_layer_ids": INPUTS,
        }  # fmt: skip
    config |= {"draft_vocab_size": scored, **dict.fromkeys(flags, True), **more}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(made, folder / "model.safetensors")
    return folder


def mtp_tensors() -> dict[str, torch.Tensor]:
    """Return random weights of a head that predicts several tokens, by the names of Qwen."""
    inner, of_layer = TARGET["intermediate_size"], tensors()
    del of_layer["layers.0.hidden_norm.weight"]
    made = {n: t for n, t in of_layer.items() if n.startswith("layers.") or n == "norm.weight"}
    for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down"):
        whole = f"layers.0.{name}_proj.weight"
        rows, columns = (WIDTH, inner) if name == "mlp.down" else (inner, WIDTH)
        made[whole] = made[whole][:rows, :columns].contiguous()
    for name in ("embedding", "hidden"):
        made[f"pre_fc_norm_{name}.weight"] = 1 + _random(WIDTH)
    return made | {"fc.weight": _random(WIDTH, 2 * WIDTH)}


_OF_DEEPSEEK = {
    "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj",
    "norm": "shared_head.norm",
}  # fmt: skip


def save_mtp(folder: Path, target: Path, form: str = "mtp") -> Path:
    """Write the checkpoint of a target with such a head, as Qwen or (`nextn`) DeepSeek has it."""
    shutil.copytree(target, folder)
    own, config = mtp_tensors(), json.loads((folder / "config.json").read_text())
    if form == "nextn":
        named = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in _OF_DEEPSEEK.items()}
        own = {named.get(n, n.removeprefix("layers.0.")): t for n, t in own.items()}
    prefix = "mtp." if form == "mtp" else f"model.layers.{LAYERS}."
    stored = load_file(folder / "model.safetensors") | {prefix + n: t for n, t in own.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    count = "mtp_num_hidden_layers" if form == "mtp" else "num_nextn_predict_layers"
    (folder / "config.json").write_text(json.dumps(config | {count: 1}), encoding="utf-8")
    return folder


LINEAR, FULL = "linear_attention", "full_attention"
QWEN = {
    **TARGET, "model_type": "qwen3_5_text", "head_dim": 16, "tie_word_embeddings": True,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR], "linear_conv_kernel_dim": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
    },
}  # fmt: skip


def save_qwen(folder: Path) -> Path:
    """Write a Qwen3.5, most of whose layers have a recurrent state, with its head."""
    save_model(folder, 0, **QWEN)
    add_qwen_head(folder)
    return folder


def add_qwen_head(folder: Path) -> None:
    """Give the checkpoint of a Qwen3.5 a head with random weights."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config = config.get("text_config", config)
    stored = load_file(folder / "model.safetensors")
    kind = next(iter(stored.values())).dtype
    vocabulary, width, layers = (
        config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")
    )
    sizes = HeadSizes(config, 1, vocabulary, vocabulary, width, width, (layers,))
    own = {f"mtp.{n}": _random(*p.shape).to(kind) for n, p in MtpModule(sizes).named_parameters()}
    for table in ("embed_tokens", "lm_head"):
        del own[f"mtp.{table}.weight"]
    save_file(stored | own, folder / "model.safetensors", {"format": "pt"})


RECIPE = """
name = "tiny"

[target]
checkpoint = "{target}"

[draft]
checkpoint = "{head}"

[engine]
max_length = 160
prefill = 12
batch = 2
gammas = [1, 2, 3, 4, 5, 6, 7, 8]
"""


@pytest.fixture(scope="session")
def bundle(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the target and a head with a trimmed vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    head = save_head(folder / "head")
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(target=target, head=head), encoding="utf-8")
    build(read_recipe(recipe), folder / "bundle")
    return folder / "bundle"
