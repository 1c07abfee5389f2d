"""The ready recipes: every pair is built from random checkpoints of its types, and is lossless."""

from __future__ import annotations

import json
import shutil
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import onnx
import pytest

import specrt
from heads.assistants import save_assistant
from heads.blocks import MASK, RANK, random_weights, save_block_head
from heads.conftest import add_qwen_head
from portable.zoo import ALTERNATING, LLAMA3_ROPE, MEMORIES, SIZES, WINDOW
from specrt.bundle import Bundle
from specrt_export.checkpoint.checkpoint import Checkpoint, named_head
from specrt_export.estimate.estimate import estimate
from specrt_export.recipe.recipe import read_recipe
from support.builds import build

ENGINES = Path(__file__).parents[2] / "engines"
PAIRS = sorted(path.parent.name for path in ENGINES.glob("*/shape.json"))
ALWAYS = ("gemma4-e2b", "lfm2.5-1.2b")
"""Layers that share keys, see few positions, convolve and are looked up, and a block head; all
others nightly."""
VOCABULARY = 8192
SMALL = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
LLAMA3 = {**LLAMA3_ROPE, "original_max_position_embeddings": 256}
TRAINED = {"original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    **TRAINED,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [4.0] * 12,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "head_dim": 32},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    },
    "mistral": {"sliding_window": None, "head_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma3_text": {"head_dim": 32, "sliding_window": WINDOW, "layer_types": ALTERNATING},
    "gemma4_text": {
        **MEMORIES["gemma4"][1], "hidden_size": 128, "head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_unified_text": {**MEMORIES["gemma4_unified"][1], "hidden_size": 128, "head_dim": 32},
    "lfm2": {**MEMORIES["lfm2"][1], "hidden_size": 128},
    "lfm3": {**MEMORIES["lfm3"][1], "hidden_size": 128, "head_dim": 32},
    **{
        kind: {**MEMORIES[name][1], "hidden_size": 128, "head_dim": 32}
        for kind, name in (
            ("qwen3_5_text", "qwen3_5"), ("nemotron_h", "nemotron_h"), ("falcon_h1", "falcon_h1"),
        )
    },
    "phi3": {"hidden_size": 128, "rope_parameters": LONG, **TRAINED, "sliding_window": None},
}  # fmt: skip
"""What the small models of a type have besides, or otherwise."""

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("Gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "gemma4_text": ("Gemma4", {"vision_config": VISION}),
    "gemma4_unified_text": (
        "Gemma4Unified",
        {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 4}},
    ),
    "qwen3_5_text": ("Qwen3_5", {"vision_config": {"depth": 1, "out_hidden_size": 128}}),
}
"""Of a type that is a part of larger models: the name of these, and what they have besides."""


def is_whole(shape: dict[str, Any]) -> bool:
    """Tell whether a checkpoint of a shape has a part for pictures; its tokens have rows then."""
    kind = shape["model_type"]
    return bool(shape["vocab_size"] == 262208) or "gemma4" in kind or "qwen3_5" in kind


def save(shape: dict[str, Any], folder: Path, *, seed: int, whole: bool) -> None:
    """Write a small random checkpoint of the type of a shape; `whole` with the part for pictures.

    The small Gemma 3 have a token for pictures and no row for it.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = shape["model_type"]
    changes = {**SMALL, **OWN[kind], "tie_word_embeddings": shape["tie_word_embeddings"]}
    changes["vocab_size"] = VOCABULARY + 64 * (whole and kind == "gemma3_text")
    changes = {key: value for key, value in changes.items() if value is not None}
    config: Any = transformers.AutoConfig.for_model(kind, **changes)
    factory: Any = transformers.AutoModelForCausalLM
    if whole:
        name, more = WHOLE[kind]
        ends = {key: SMALL[key] for key in ("bos_token_id", "eos_token_id")}
        config = getattr(transformers, f"{name}Config")(text_config=config, **more, **ends)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    else:
        model = factory.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    state = model.to(torch.bfloat16).state_dict()
    if whole and kind == "gemma4_text":  # published ones hold such, which nothing reads
        state["model.language_model.layers.3.self_attn.k_proj.weight"] = torch.ones(8, 8)
    model.save_pretrained(folder, state_dict=state)
    tokenizer = json.loads(
        (ENGINES / "codelet" / "checkpoint" / "target" / "tokenizer.json").read_text("utf-8")
    )
    if kind == "gemma3_text":
        added = {**tokenizer["added_tokens"][0], "id": VOCABULARY, "content": "<image_soft_token>"}
        tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


def save_head(shape: dict[str, Any], folder: Path) -> None:
    """Write a small random DSpark draft of a small LFM2, with the options of a shape."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "head_dim": 32, "markov_rank": RANK}
    inputs = {"mask_token_id": MASK, "target_layer_ids": [-1, 0, 1], "num_target_layers": 3}
    weights = random_weights(True, rank=RANK, width=128, vocabulary=VOCABULARY)
    config = {key: shape[key] for key in ("architectures", "rope_is_neox_style", "block_size")}
    save_block_head(folder, "markov", weights, **config, **sizes, dflash_config=inputs)


def shrunk(pair: str, root: Path) -> Path:
    """Write a pair's recipe with small checkpoints in place of its own."""
    folder = root / pair
    shutil.copytree(ENGINES / pair, folder, ignore=shutil.ignore_patterns("shape.json"))
    shutil.copyfile(ENGINES / "calibration.jsonl", root / "calibration.jsonl")
    recipe = folder / "recipe.toml"
    text = recipe.read_text("utf-8")
    shapes = json.loads((ENGINES / pair / "shape.json").read_text("utf-8"))
    for seed, (role, source) in enumerate(read_recipe(recipe).sources.items()):
        if named_head(shapes[role]) == "gemma4_assistant":
            sizes = {**shapes["target"], **SMALL, **OWN[shapes["target"]["model_type"]]}
            sizes |= {"vocab_size": VOCABULARY, "final_logit_softcapping": None}
            save_assistant(folder / role, sizes, hidden_size=64)
            text = text.replace("[quality]", "[quality]\nmin_acceptance = 0")
        elif named_head(shapes[role]):
            save_head(shapes[role], folder / role)
            text = text.replace("[quality]", "[quality]\nmin_acceptance = 0")
        else:
            save(shapes[role], folder / role, seed=seed, whole=is_whole(shapes[role]))
            if shapes[role].get("mtp_num_hidden_layers"):
                add_qwen_head(folder / role)
                text = text.replace("[quality]", "[quality]\nmin_acceptance = 0")
        text = text.replace(f'"{source.checkpoint}"', f'"{role}"')
    for old, new in (("4096", "64"), ("256", "32"), ("[1, 2, 3, 4, 5, 6, 7, 8]", "[1, 3]")):
        text = text.replace(f" = {old}", f" = {new}")
    recipe.write_text(text, "utf-8")
    return recipe


@pytest.mark.export
@pytest.mark.parametrize(
    "pair",
    [pair if pair in ALWAYS else pytest.param(pair, marks=pytest.mark.nightly) for pair in PAIRS],
)
def test_a_pair_is_built_from_its_recipe_as_estimated_and_is_lossless(
    pair: str, tmp_path: Path
) -> None:
    recipe = read_recipe(shrunk(pair, tmp_path))
    expected = estimate(recipe)
    build(recipe, tmp_path / "bundle")
    manifest = Bundle.open(tmp_path / "bundle").manifest
    models = [m for m in (manifest.target, manifest.draft) if m is not None]
    roles = json.loads((ENGINES / pair / "shape.json").read_text("utf-8"))
    assert len(models) == len(roles), "a head that lies next to its target drafts, too"
    assert [m.parameters for m in expected.models] == [m.parameters for m in models]
    held = 0
    for found, model in zip(expected.models, models, strict=True):
        assert found.engine_bytes == pytest.approx(model.weight_bytes, rel=0.03)
        graph = onnx.load(tmp_path / "bundle" / model.engine, load_external_data=False).graph
        shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}
        for name, one in model.geometry.buffers.items():
            padded = 1 if name.startswith("key.") else shapes[name][-1]  # in whole vectors
            held += 4 * prod(shapes[name]) // padded * (1 if padded == 1 else one.width)
        held += 4 * manifest.max_length * model.features * (model is manifest.target)
    assert expected.kv_bytes == manifest.kv_bytes() == held
    with specrt.load(tmp_path / "bundle", threads=1) as generator:
        for prompt, seed in product(("def area(width, height):", "x = x = x ="), (None, 1)):
            params = specrt.SamplingParams(
                max_tokens=40, ignore_eos=True, temperature=0 if seed is None else 0.8, seed=seed
            )
            plain = generator.generate(prompt, params, gamma=0).token_ids
            assert len(plain) == 40
            for gamma in (1, 3, "auto"):
                made = generator.generate(prompt, params, gamma=gamma)
                assert made.token_ids == plain


@pytest.mark.export
@pytest.mark.nightly
@pytest.mark.parametrize("pair", ["gemma3-4b", "phi4-mini"])
def test_a_text_part_and_the_angles_of_short_texts_equal_transformers(
    pair: str, tmp_path: Path
) -> None:
    from specrt_export.check.equivalence import check_parity
    from specrt_export.portable.exporter import export_graph

    shape = json.loads((ENGINES / pair / "shape.json").read_text("utf-8"))["target"]
    save(shape, tmp_path / "target", seed=3, whole=is_whole(shape))
    checkpoint = Checkpoint.open(tmp_path / "target")
    graph = export_graph(checkpoint, tmp_path / "graph.onnx")
    check_parity(checkpoint, graph.path)
    trained = 64 if pair == "phi4-mini" else SMALL["max_position_embeddings"]
    assert graph.geometry.max_positions == trained
