"""Bundles of checkpoints that are quantized already: codes and scales as they are in the file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shared import nightly_but

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", exc_type=ImportError)

from click.testing import CliRunner

import specrt
from quantize.graphs import values_of
from specrt.bundle import Bundle
from specrt.cli.inspect import command as inspect
from specrt.errors import SpecrtError
from specrt.params import SamplingParams
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.estimate.estimate import estimate
from specrt_export.portable.exporter import export_graph
from specrt_export.portable.graph import read_graph
from specrt_export.quantize.quantizer import Quantized, keep
from specrt_export.recipe.recipe import read_recipe
from support import gguf_files
from support.builds import build, is_fresh
from support.gguf_files import SCORED_VOCABULARY, Store, half, write_model
from support.quantized_folders import RECIPE

pytestmark = pytest.mark.export

BLOCKS = {
    "Q4_0": (32, 18, 8),
    "Q4_1": (32, 20, 15),
    "Q4_K": (256, 144, 945),
    "Q5_1": (32, 24, 31),
    "Q5_K": (256, 176, 1953),
    "Q5_0": (32, 22, 16),
    "Q6_K": (256, 210, 4096),
    "Q8_0": (32, 34, 128),
}
"""Weights and bytes of a block, and about the largest code, times scales of 6 or 8 bits."""

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
"""Rows of 256, as Q6_K wants."""


def coded(*names: str) -> Store:
    """Store matrices in one format after another, in random blocks: every code and sign occurs."""
    rng = np.random.default_rng(0)

    def store(name: str, array: NDArray[np.float32]) -> tuple[int, bytes]:
        chosen = names[sum(name.encode()) % len(names)]
        if array.ndim == 1 or chosen == "F16":
            return half(name, array)
        items, length, most = BLOCKS[chosen]
        blocks = rng.integers(0, 256, (array.size // items, length), np.uint8)
        scales = rng.uniform(-0.3, 0.3, (len(blocks), 1)) / most
        scales[:2] = [[2.0**-20], [0.0]]  # below the normal numbers of fp16, and none
        at = 208 if chosen == "Q6_K" else 0
        blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
        if chosen in ("Q4_1", "Q4_K", "Q5_1", "Q5_K"):
            blocks[:, 2:4] = (scales[::-1] * 8).astype("<f2").view(np.uint8)
        return int(gguf.GGMLQuantizationType[chosen]), blocks.tobytes()

    return store


def write(path: Path, kind: str, *formats: str) -> Path:
    changes = gguf_files.MODELS[kind][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gguf_files.MODELS, kind, (gguf_files.MODELS[kind][0], {**changes, **WIDE}))
        return write_model(path, gguf_files.made(kind), coded(*formats), SCORED_VOCABULARY)


def kept(path: Path, folder: Path) -> tuple[Checkpoint, Quantized]:
    checkpoint = Checkpoint.open(path)
    checkpoint.unpack()
    graph = export_graph(checkpoint, folder / "graph.onnx").path
    return checkpoint, keep(graph, checkpoint, folder / "kept")


CASES = {
    "llama in Q4_0": ("llama", "Q4_0"),
    "llama in Q5_0 and F16": ("llama", "Q5_0", "F16"),
    "qwen3 in Q8_0": ("qwen3", "Q8_0"),
    "qwen3 in Q6_K": ("qwen3", "Q6_K"),
    "gemma3 in a mixture": ("gemma3", "Q4_0", "Q5_0", "Q6_K", "Q8_0"),
    "llama in Q4_1": ("llama", "Q4_1"),
    "qwen3 in Q4_K and Q6_K": ("qwen3", "Q4_K", "Q6_K"),
    "llama in Q5_K and Q5_1": ("llama", "Q5_K", "Q5_1"),
}


OFTEN = ("gemma3 in a mixture", "qwen3 in Q4_K and Q6_K")


@pytest.mark.parametrize("case", nightly_but(OFTEN, CASES))
def test_weights_are_the_files_bit_for_bit_and_logits_transformers(
    case: str, tmp_path: Path
) -> None:
    kind, *formats = CASES[case]
    checkpoint, graph = kept(write(tmp_path / "tiny.gguf", kind, *formats), tmp_path)
    model = read_graph(graph.graph)
    nodes = {node.name: node for node in model.graph.node}
    readers = [one.choice.uses[0] for one in graph.stored]
    found = values_of(model, graph.folder, [nodes[r.node].input[r.input] for r in readers])
    assert checkpoint.gguf is not None
    for one, values in zip(graph.stored, found, strict=True):
        weight = checkpoint.gguf.weights[one.choice.weight]
        assert (one.choice.precision == "int4") == ("Q4" in weight.format.name)
        assert values.tobytes() == weight.floats(0, weight.shape[0]).tobytes()
    names = {one.choice.weight for one in graph.stored}
    assert names == {name for name, w in checkpoint.gguf.weights.items() if w.quantized}
    report = check_parity(
        checkpoint, graph.graph, reference=Reference(checkpoint), folder=graph.folder
    )
    assert report.error < 1e-4


PAIR = RECIPE.replace(
    'checkpoint = "target"', 'checkpoint = "target.gguf"\n[draft]\ncheckpoint = "draft.gguf"'
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write(tmp_path / "target.gguf", "llama", "Q4_K", "Q6_K", "Q8_0", "Q4_0")
    write(tmp_path / "draft.gguf", "qwen3", "Q5_1", "F16", "Q5_K")
    path = tmp_path / "recipe.toml"
    path.write_text(PAIR, encoding="utf-8")
    return path


@pytest.mark.nightly
def test_a_quantized_pair_builds_and_speculates_without_loss(recipe: Path, tmp_path: Path) -> None:
    out, stages = tmp_path / "bundle", list[str]()
    build(read_recipe(recipe), out, lambda stage, done: stages.append(stage))
    assert "compare target with transformers" in stages
    assert "compare draft with transformers" in stages
    assert is_fresh(read_recipe(recipe), out)
    manifest = Bundle.open(out).manifest
    for model, guess in zip(manifest.models, estimate(read_recipe(recipe)).models, strict=True):
        assert guess.precision == "stored"
        assert guess.engine_bytes == pytest.approx(model.weight_bytes, rel=0.1)
    assert (manifest.target.precision, manifest.target.head) == ("stored", "stored")
    target = recipe.with_name("target.gguf")
    assert manifest.origins["target"].files == {
        target.name: hashlib.sha256(target.read_bytes()).hexdigest()
    }
    told = CliRunner().invoke(inspect, [str(out)]).output
    assert all(one.formats in told for one in manifest.origins.values())
    with specrt.load(out, threads=1) as generator:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        texts = [
            generator.generate("hello world, the", params, gamma=gamma).token_ids
            for gamma in (0, 1, 3)
        ]
    assert len(texts[0]) == 40
    assert texts[0] == texts[1] == texts[2]
    later = target.stat().st_mtime_ns + 1
    os.utime(target, ns=(later, later))
    assert not is_fresh(read_recipe(recipe), out)


WRONG = {
    "another precision": (
        "[engine]", '[engine]\nprecision = "fp16"',
        r"\.precision is 'fp16', and target\.gguf is quantized .*target\.precision to 'stored'",
    ),
    "a block": ("[draft]", "block = 64\n[draft]", r"target\.block is 64"),
    "an embedding": (
        "[draft]", 'embedding = "bf16"\n[draft]',
        r"target\.embedding is 'bf16'.* remove target\.embedding",
    ),
    "a quantizer": ("[engine]", '[engine]\nquantizer = "gptq"', r"engine\.quantizer is 'gptq'"),
    "a device's operators": (
        "[draft]", 'backend = "tensorrt"\n[draft]',
        r"operators of tensorrt do not take .*build for ort-cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG)
def test_what_is_stored_is_not_stored_otherwise(
    old: str, new: str, message: str, recipe: Path, tmp_path: Path
) -> None:
    recipe.write_text(PAIR.replace(old, new), encoding="utf-8")
    assert "\n" not in refused(recipe, tmp_path, message)


def test_floats_are_not_stored_as_codes(recipe: Path, tmp_path: Path) -> None:
    write(tmp_path / "draft.gguf", "qwen3", "F16")
    recipe.write_text(PAIR.replace("[draft]", '[draft]\nprecision = "stored"'), encoding="utf-8")
    refused(recipe, tmp_path, r"draft\.precision is 'stored', and .* are floats; set")


def refused(recipe: Path, folder: Path, message: str) -> str:
    """Return what a build says that is refused before any stage of it."""
    stages: list[str] = []
    with pytest.raises(SpecrtError, match=message) as caught:
        build(read_recipe(recipe), folder / "bundle", lambda stage, done: stages.append(stage))
    assert not stages
    assert not (folder / "bundle").exists()
    return str(caught.value)
