"""Time what heads cost: EAGLE-3, a pass for each token, and heads that draft a block in one pass.

Target and heads are made of noise, which costs the same as what was trained; nothing they draft is
accepted. What is built is kept in --work. Rounds of all heads run in turns,
beside one target. Costs are medians, in steps: a target pass of one token.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import specrt
from specrt.bundle import Geometry
from specrt.engine.backends import open_engine
from specrt.engine.protocol import Engine, block_of
from specrt.tuning.pass_timer import PassTimer
from specrt_export.atomic_folder import atomic_folder
from specrt_export.builder import ModelBuild, build
from specrt_export.plan.build_plan import resolve
from specrt_export.recipe.recipe import Recipe, read_recipe

RECIPE = """
name = "heads"

[target]
checkpoint = "target"
precision = "{precision}"

[draft]
checkpoint = "{head}"
precision = "{precision}"

[engine]
max_length = 512
prefill = 64
gammas = [1, 2, 3, 4, 5, 6, 7]

[quality]
calibration = "text.txt"
max_kl = 10.0
min_top1 = 0.0
min_acceptance = 0.0
"""

INPUTS = [2, 8, 13]

RANK = 256
"""Of the Markov head, as published ones have it."""


class Sizes(NamedTuple):
    """The sizes of the target, and so of its heads."""

    layers: int
    width: int
    vocabulary: int

    @property
    def heads(self) -> int:
        """Of attention; half as many have keys and values of their own."""
        return self.width // 64

    @property
    def config(self) -> dict[str, Any]:
        """What the config.json of a target and of heads have."""
        return {
            "model_type": "qwen3", "vocab_size": self.vocabulary, "hidden_size": self.width,
            "intermediate_size": 3 * self.width, "num_attention_heads": self.heads, "head_dim": 64,
            "num_key_value_heads": self.heads // 2, "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0,
        }  # fmt: skip


def noise(*shape: int) -> torch.Tensor:
    """Return a weight of noise, as checkpoints store it."""
    return (torch.randn(*shape) * 0.02).to(torch.bfloat16)


def layer_weights(sizes: Sizes, number: int, read: int = 1) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a layer whose attention reads so many times the width."""
    width, at = sizes.width, f"layers.{number}."
    for name, rows, columns in (
        ("self_attn.q_proj", width, read * width), ("self_attn.k_proj", width // 2, read * width),
        ("self_attn.v_proj", width // 2, read * width), ("self_attn.o_proj", width, width),
        ("mlp.gate_proj", 3 * width, width), ("mlp.up_proj", 3 * width, width),
        ("mlp.down_proj", width, 3 * width),
    ):  # fmt: skip
        yield f"{at}{name}.weight", noise(rows, columns)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}{name}.weight", torch.ones(width)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        yield f"{at}{name}.weight", torch.ones(64)


def save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def save_target(folder: Path, sizes: Sizes) -> None:
    """Write a target of noise, with a tokenizer of its own."""
    config = {
        **sizes.config, "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": sizes.layers
    }  # fmt: skip
    weights = {
        f"model.{name}": weight
        for number in range(sizes.layers)
        for name, weight in layer_weights(sizes, number)
    }
    weights |= {
        "model.embed_tokens.weight": noise(sizes.vocabulary, sizes.width),
        "model.norm.weight": torch.ones(sizes.width),
        "lm_head.weight": noise(sizes.vocabulary, sizes.width),
    }
    save(folder, config, weights)
    words = {f"t{i}": i for i in range(sizes.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    text = " ".join(f"t{i % sizes.vocabulary}" for i in range(0, 600 * 37, 37))
    (folder.parent / "text.txt").write_text(text, encoding="utf-8")


def save_eagle3(folder: Path, sizes: Sizes) -> None:
    """Write an EAGLE-3 head of one layer that scores all entries."""
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
        "transformer_layer_config": {**sizes.config, "num_hidden_layers": 1},
        "eagle_aux_hidden_state_layer_ids": INPUTS, "draft_vocab_size": sizes.vocabulary,
    }  # fmt: skip
    weights = {
        "fc.weight": noise(sizes.width, 3 * sizes.width),
        "layers.0.hidden_norm.weight": torch.ones(sizes.width),
        "norm.weight": torch.ones(sizes.width),
        "lm_head.weight": noise(sizes.vocabulary, sizes.width),
        **dict(layer_weights(sizes, 0, read=2)),
    }
    save(folder, config, weights)


def save_block(folder: Path, sizes: Sizes, layers: int) -> None:
    """Write a head that drafts seven tokens in a block of eight."""
    config = {
        **sizes.config, "architectures": ["DFlashDraftModel"], "num_hidden_layers": layers,
        "block_size": 8, "num_target_layers": sizes.layers,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": [i - 1 for i in INPUTS]},
    }  # fmt: skip
    weights = {
        "fc.weight": noise(sizes.width, 3 * sizes.width),
        "hidden_norm.weight": torch.ones(sizes.width),
        "norm.weight": torch.ones(sizes.width),
    }
    for number in range(layers):
        weights |= dict(layer_weights(sizes, number))
    save(folder, config, weights)


def save_dspark(folder: Path, sizes: Sizes, layers: int) -> None:
    """Write a block head of seven positions, with a Markov and a confidence head."""
    save_block(folder, sizes, layers)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": RANK,
        "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    weights |= {
        "markov_head.markov_w1.weight": noise(sizes.vocabulary, RANK),
        "markov_head.markov_w2.weight": noise(sizes.vocabulary, RANK),
        "confidence_head.proj.weight": noise(1, sizes.width + RANK),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def write(work: Path, sizes: Sizes, layers: list[int], precision: str) -> dict[str, Recipe]:
    """Write target, heads and their recipes, but for those that are there; return the recipes."""
    torch.manual_seed(0)
    forms: dict[str, tuple[Callable[..., None], tuple[int, ...]]] = {"eagle3": (save_eagle3, ())}
    forms |= {f"dflash{count}": (save_block, (count,)) for count in layers}
    forms[f"dspark{max(layers)}"] = save_dspark, (max(layers),)
    if not (work / "target").is_dir():
        save_target(work / "target", sizes)
    found = {}
    for name, (save_head, numbers) in forms.items():
        if not (work / name).is_dir():
            save_head(work / name, sizes, *numbers)
        recipe = work / f"{name}.toml"
        recipe.write_text(RECIPE.format(head=name, precision=precision), encoding="utf-8")
        found[name] = read_recipe(recipe)
    return found


def build_head(recipe: Recipe, folder: Path) -> None:
    """Build a head without its target, and write down what opening it takes."""
    with atomic_folder(folder) as made, TemporaryDirectory() as graphs:
        plan = resolve(recipe, folder)
        work = ModelBuild(plan, plan.models[1], made, Path(graphs), lambda stage, done: None)
        record = work.run().record
        opening = {"engine": record.engine, "geometry": record.geometry.to_json()}
        (made / "opening.json").write_text(json.dumps(opening), encoding="utf-8")


def open_head(folder: Path, target: Engine, threads: int) -> Engine:
    """Open a head beside a target that leaves features of its width."""
    opening = json.loads((folder / "opening.json").read_text())
    geometry = Geometry.from_json(opening["geometry"])
    return open_engine(
        "ort-cpu", folder / opening["engine"], geometry, batch=1, max_length=target.max_length,
        max_width=target.max_width, threads=threads, beside=target,
    )  # fmt: skip


def measured(
    timers: dict[str, PassTimer], gammas: list[int], laps: int
) -> tuple[dict[int, float], dict[tuple[str, int], float]]:
    """Return medians in ns: of target passes by gamma, and of drafts by head and gamma."""
    drafts, verifies = (
        defaultdict[tuple[str, int], list[int]](list),
        defaultdict[int, list[int]](list),
    )
    for timer in timers.values():
        timer.fill(perf_counter_ns() + 10**9)
    for lap in range(laps + 1):
        for (name, timer), gamma in product(timers.items(), (0, *gammas)):
            for timed in timer.burst(gamma, 3):
                if lap and timed.drafted == gamma:  # the first lap binds buffers
                    verifies[gamma].append(timed.verify_ns)
                    drafts[name, gamma].append(timed.draft_ns)
    return (
        {gamma: median(times) for gamma, times in verifies.items()},
        {key: median(times) for key, times in drafts.items()},
    )


def show(verify: dict[int, float], draft: dict[tuple[str, int], float], gammas: list[int]) -> None:
    """Print costs in steps, and how many tokens a round must emit to be no slower."""
    step = verify[0]
    print(f"a step of the target takes {step / 1e6:.2f} ms")
    for gamma in gammas:
        print(f"a target pass of {gamma + 1} takes {verify[gamma] / step:.2f} steps")
    print("| head | gamma | drafting, steps | round, steps = tokens a round that it must emit |")
    print("| --- | ---: | ---: | ---: |")
    for (name, gamma), ns in draft.items():
        if gamma:
            print(f"| {name} | {gamma} | {ns / step:.2f} | {(ns + verify[gamma]) / step:.2f} |")


def main() -> None:
    """Build what is missing, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where bundles are made")
    parser.add_argument("--layers", type=int, nargs="+", default=[5, 2, 1], help="of block heads")
    parser.add_argument("--gammas", type=int, nargs="+", default=[4, 7])
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--target-layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--laps", type=int, default=25)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    sizes = Sizes(options.target_layers, options.width, options.vocabulary)
    recipes = write(options.work, sizes, options.layers, options.precision)
    places = {name: options.work / f"{name}-{options.precision}" for name in recipes}
    # Before the engines' threads are shared, which sessions of a build cannot be.
    for name in (name for name in places if not places[name].is_dir()):
        if name == "eagle3":
            build(resolve(recipes[name], places[name]))
        else:
            build_head(recipes[name], places[name])
    with ExitStack() as stack:
        loaded = specrt.load(places.pop("eagle3"), threads=options.threads, owns_process=True)
        models = stack.enter_context(loaded).models
        timers = {"eagle3": PassTimer(models, None, perf_counter_ns)}
        for name, place in places.items():
            head = open_head(place, models.target, options.threads)
            stack.callback(head.close)
            beside = replace(models, draft=head, block=block_of(head))
            timers[name] = PassTimer(beside, None, perf_counter_ns)
        show(*measured(timers, options.gammas, options.laps), options.gammas)


if __name__ == "__main__":
    main()
