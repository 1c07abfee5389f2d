"""Encoder-decoders whose checkpoints are quantized already: codes as they are in all engines."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import specrt
from encoder_decoder.recipes import held_bytes, write_recipe
from portable.zoo import BARE, exported
from specrt.bundle import Bundle
from specrt.params import SamplingParams
from specrt_export.check.equivalence import Reference
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.estimate.estimate import estimate
from specrt_export.recipe.recipe import Recipe, read_recipe
from support.builds import build
from support.quantized_folders import Format, Gptq, PackQuantized, Tensors, container

pytestmark = pytest.mark.export

LAYERS = ("_proj.weight", ".fc1.weight", ".fc2.weight")


def quantized_recipe(folder: Path, name: str, format_: Format) -> Recipe:
    """Write the recipe of a checkpoint whose layers are in codes, with graphs without weights."""
    recipe = write_recipe(folder, [name], max_length=64)
    target, rng = folder / "target", np.random.default_rng(0)
    tensors: Tensors = {}
    for key, array in load_file(target / "model.safetensors").items():
        if key.endswith(LAYERS) and array.ndim == 2:
            parts, _ = format_.layer(rng, 0, array.shape)
            stem = key.removesuffix("weight")
            tensors |= {f"{stem}{part}": value for part, value in parts.items()}
        else:
            tensors[key] = "F32", array
    (target / "model.safetensors").write_bytes(container(tensors))
    config = json.loads((target / "config.json").read_text("utf-8"))
    config["quantization_config"] = format_.config
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    bare = exported(name + BARE).graph
    for path in bare.parent.glob("*.onnx"):
        shutil.copyfile(path, folder / path.name.replace("graph", "target"))
    text = recipe.path.read_text("utf-8").replace('precision = "fp32"', "")
    recipe.path.write_text(text, encoding="utf-8")
    return read_recipe(recipe.path)


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("whisper", PackQuantized(group=16, symmetric=False)),
        pytest.param("marian", Gptq(group=16), marks=pytest.mark.nightly),
    ],
    ids=["packed", "gptq"],
)
def test_codes_are_kept_in_all_engines(name: str, format_: Format, tmp_path: Path) -> None:
    recipe = quantized_recipe(tmp_path / "recipe", name, format_)
    stages = list[str]()
    build(recipe, tmp_path / "bundle", lambda stage, done: stages.append(stage))
    assert "compare target with transformers" in stages
    model = Bundle.open(tmp_path / "bundle").manifest.target
    assert model.precision == "stored"
    counts = {name: n for name, n in model.fused.items() if name.endswith("quantized")}
    assert len(counts) == 3
    assert all(n.split("/")[0] == n.split("/")[1] != "0" for n in counts.values()), counts
    said = estimate(recipe).models[0]
    assert said.parameters == model.parameters
    held = sum(map(held_bytes, (tmp_path / "bundle" / "target").glob("*.onnx")))
    assert said.engine_bytes == pytest.approx(held, rel=0.3)
    reference = Reference(Checkpoint.open(recipe.folder / "target"))
    assert model.encoder is not None
    source = np.random.default_rng(3).standard_normal((6, 40)).astype(np.float32)
    if name != "whisper":
        source = np.random.default_rng(3).integers(8, 100, 20)
    params = SamplingParams(max_tokens=20, no_repeat_ngram_size=2)
    with specrt.load(tmp_path / "bundle", threads=1) as generator:
        given = source if name == "whisper" else source.tolist()
        plain = generator.generate(given, params, gamma=0).token_ids
        assert generator.generate(given, params, gamma=3, drafter="ngram").token_ids == plain
        start = [*generator.models.decoder_start]
    logits = reference.of([source])(np.array([[*start, *plain[:1]]]))
    assert int(logits[0, len(start) - 1].argmax()) == plain[0]
