"""Recipes of the zoo's encoder-decoders, with a tokenizer of bytes and texts to measure on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from portable.zoo import exported
from specrt_export.estimate.estimate import INLINE, PAGE
from specrt_export.portable.graph import part_path, parts_beside
from specrt_export.recipe.recipe import Recipe, read_recipe

SPECIAL = 8
"""Ids before the printable characters, the end token of every family among them."""
MAX_LENGTH, MAX_SOURCE = 200, 180
"""Beyond the 128 positions that relative biases tell apart."""
ENDS = {"t5": 1, "t5_even": 1, "t5_untied": 1, "umt5": 1}

RECIPE = """
name = "{name}"
{models}
[engine]
max_length = {max_length}
batch = {batch}
prefill = 64
gammas = [1, 3]
precision = "{precision}"
{more}
"""


def end_of(name: str) -> int:
    """Return the token that ends a text of a family."""
    return ENDS.get(name, 2)


def save_tokenizer(folder: Path, end: int) -> None:
    """Write a tokenizer of 103 ids, whose texts end with a token."""
    special = [f"<{number}>" for number in range(SPECIAL)]
    known = [*special, *map(chr, range(33, 127)), "Ġ"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(known)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A <{end}>", special_tokens=[(f"<{end}>", end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def save_texts(path: Path, lines: int = 12) -> None:
    """Write sources and texts of them."""
    rng = np.random.default_rng(1)

    def words(most: int) -> str:
        return "a" + "".join(rng.choice(list("abcdefgh "), int(rng.integers(20, most))))

    pairs = [{"prompt": words(90), "completion": words(50)} for _ in range(lines)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


def write_recipe(
    folder: Path, names: Sequence[str], precision: str = "fp32", *lines: str, source: bool = True,
    max_length: int = MAX_LENGTH, batch: int = 3,
) -> Recipe:  # fmt: skip
    """Write the recipe of a target, and a draft if two are named, next to their checkpoints."""
    folder.mkdir(parents=True)
    tables = []
    for role, name in zip(("target", "draft"), names, strict=False):
        one = exported(name)
        shutil.copytree(one.checkpoint.folder, folder / role)
        save_tokenizer(folder / role, end_of(name))
        graph = folder / f"{role}.onnx"
        shutil.copyfile(one.graph, graph)
        for part, path in parts_beside(one.graph).items():
            shutil.copyfile(path, part_path(graph, part))
        tables.append(f'[{role}]\ncheckpoint = "{role}"\ngraph = "{role}.onnx"')
    save_texts(folder / "texts.jsonl")
    most = f"max_source = {MAX_SOURCE}" if source and "whisper" not in names[0] else ""
    text = RECIPE.format(
        name=names[0], models="\n".join(tables), max_length=max_length, precision=precision,
        more=most, batch=batch,
    )  # fmt: skip
    path = folder / "recipe.toml"
    path.write_text("\n".join([text, *lines, ""]), encoding="utf-8")
    return read_recipe(path)


def save_speech(path: Path, features: int, frames: int, lines: int = 12) -> None:
    """Write features and texts of them."""
    rng = np.random.default_rng(1)
    for number in range(lines):
        clip = rng.standard_normal((features, frames)).astype(np.float32)
        np.save(path.parent / f"{number}.npy", clip)
    pairs = [{"features": f"{i}.npy", "completion": "abc def ghi " * 3} for i in range(lines)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


QUALITY = '[quality]\ncalibration = "texts.jsonl"'


def held_bytes(engine: Path) -> int:
    """Return the pages of an engine's weights, those of tables inside its graph among them."""
    graph = onnx.load(engine, load_external_data=False).graph
    inline = [
        len(tensor.raw_data)
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.raw_data) > INLINE
    ]
    return sum(-(-n // PAGE) * PAGE for n in (engine.with_suffix(".data").stat().st_size, *inline))
