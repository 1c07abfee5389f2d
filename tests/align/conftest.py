"""A random target and draft, their bundle, and traces that the target wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from portable.zoo import BARE, exported
from specrt.cli import run
from specrt_export.recipe.recipe import Recipe, read_recipe
from support.builds import build

VOCABULARY, WIDTH, LAYERS, PROMPTS, ANSWER = 96, 32, 4, 120, 24

SIZES: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip

RECIPE = """
name = "tiny"

[target]
checkpoint = "target"
{target_graph}

[draft]
checkpoint = "{draft}"
{draft_graph}

[engine]
max_length = 128
prefill = 16
gammas = [1, 2, 3, 4]
"""


def save_model(folder: Path, width: int, layers: int, seed: int, *, tied: bool) -> None:
    """Write a random model whose next token hangs on the last one above all."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = AutoConfig.for_model(**SIZES, **sizes, tie_word_embeddings=tied)
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1 if ".layers." in name else 0.6)
    model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def save_target(folder: Path, _: str = "") -> None:
    """Write the checkpoint of the target."""
    save_model(folder, WIDTH, LAYERS, 0, tied=False)


def save_draft(folder: Path, _: str = "") -> None:
    """Write the checkpoint of a smaller draft."""
    save_model(folder, WIDTH // 2, 1, 1, tied=True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small products, and several processes that test."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a smaller draft, a recipe, their bundle, and prompts."""
    folder = tmp_path_factory.mktemp("align")
    save_target(folder / "target")
    save_draft(folder / "draft")
    recipe_of(folder, folder / "draft")
    build(read_recipe(folder / "recipe.toml"), folder / "bundle")
    rng = np.random.default_rng(3)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(PROMPTS):
            words = " ".join(f"t{token}" for token in rng.integers(3, VOCABULARY, 6))
            file.write(json.dumps({"prompt": words, "domain": ["even", "odd"][number % 2]}) + "\n")
    return folder


def recipe_of(folder: Path, draft: Path) -> Recipe:
    """Write the recipe of the target with some draft, and read it."""
    path = folder / ("recipe.toml" if draft.parent == folder else f"{draft.name}.toml")
    target, own = (
        f'graph = "{exported(f"align-{role}{BARE}").graph}"' for role in ("target", "draft")
    )
    # One of a head is made with it; drafts that were trained differ.
    target, own = "" if draft.name == "head" else target, own if draft.name == "draft" else ""
    text = RECIPE.format(target_graph=target, draft=draft, draft_graph=own)
    path.write_text(text, encoding="utf-8")
    return read_recipe(path)


def collect(pair: Path, out: Path, *more: str) -> int:
    """Run `specrt collect` on the pair's prompts."""
    named = ["--prompts", str(pair / "prompts.jsonl"), "--out", str(out)]
    return run(["collect", str(pair / "bundle"), *named, "--max-tokens", str(ANSWER), *more])


@pytest.fixture(scope="session")
def traces(pair: Path) -> Path:
    """Traces of the pair's target."""
    assert collect(pair, pair / "traces") == 0
    return pair / "traces"
