"""Bundles of checkpoints that are quantized already: codes and scales as they are in the file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", exc_type=ImportError)

from click.testing import CliRunner

import specrt
from specrt.bundle import Bundle
from specrt.cli.inspect import command as inspect
from specrt.errors import SpecrtError
from specrt.params import SamplingParams
from specrt_export.builder import build, is_fresh
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.checkpoint import Checkpoint
from specrt_export.estimate import estimate
from specrt_export.portable.exporter import export_graph
from specrt_export.portable.external_data import map_weights
from specrt_export.portable.graph import read_graph
from specrt_export.quantize.codes import unpack
from specrt_export.quantize.quantizer import Quantized, keep
from specrt_export.recipe import read_recipe
from support import gguf_files
from support.gguf_files import SCORED_VOCABULARY, Store, half, quantized, write_model

pytestmark = pytest.mark.export

BLOCKS = {
    "Q4_0": (32, 18, 8),
    "Q5_0": (32, 22, 16),
    "Q6_K": (256, 210, 4096),
    "Q8_0": (32, 34, 128),
}
"""Weights and bytes of a block, and about the largest code, of Q6_K times a scale of 8 bits."""

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
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_weights_are_the_files_bit_for_bit_and_logits_transformers(
    case: tuple[str, ...], tmp_path: Path
) -> None:
    kind, *formats = case
    checkpoint, graph = kept(write(tmp_path / "tiny.gguf", kind, *formats), tmp_path)
    arrays = {w.name: w.array for w in map_weights(read_graph(graph.graph), graph.folder)}
    names = set()
    assert checkpoint.gguf is not None
    for one in graph.stored:
        values, scales = (arrays[tensor.name] for tensor in one.tensors)
        small = one.choice.precision == "int4"
        codes = unpack(values) if small else values
        blocks = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
        weight = checkpoint.gguf.weights[one.choice.weight]
        assert small == (weight.format.name == "Q4_0")
        wanted = weight.floats(0, weight.shape[0])
        assert blocks.reshape(wanted.shape).tobytes() == wanted.tobytes()
        names.add(one.choice.weight)
    assert names == {name for name, w in checkpoint.gguf.weights.items() if w.quantized}
    report = check_parity(
        checkpoint, graph.graph, reference=Reference(checkpoint), folder=graph.folder
    )
    assert report.error < 1e-4


RECIPE = """
name = "tiny"
[target]
checkpoint = "target.gguf"
[draft]
checkpoint = "draft.gguf"
[engine]
max_length = 128
prefill = 32
gammas = [1, 3]
gamma = 3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write(tmp_path / "target.gguf", "llama", "Q4_0", "Q6_K", "Q8_0", "Q5_0")
    write(tmp_path / "draft.gguf", "qwen3", "Q8_0", "F16")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


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
    recipe.write_text(RECIPE.replace(old, new), encoding="utf-8")
    assert "\n" not in refused(recipe, tmp_path, message)


def test_floats_are_not_stored_as_codes(recipe: Path, tmp_path: Path) -> None:
    write(tmp_path / "draft.gguf", "qwen3", "F16")
    recipe.write_text(RECIPE.replace("[draft]", '[draft]\nprecision = "stored"'), encoding="utf-8")
    refused(recipe, tmp_path, r"draft\.precision is 'stored', and .* are floats; set")


def test_minimums_are_refused_before_anything_is_traced(recipe: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "draft.gguf", gguf_files.made("llama"), quantized, SCORED_VOCABULARY)
    refused(recipe, tmp_path, r"is stored as Q\d_1, whose minimums .* Q4_0, Q5_0, Q8_0, Q6_K, F16")


def refused(recipe: Path, folder: Path, message: str) -> str:
    """Return what a build says that is refused before any stage of it."""
    stages: list[str] = []
    with pytest.raises(SpecrtError, match=message) as caught:
        build(read_recipe(recipe), folder / "bundle", lambda stage, done: stages.append(stage))
    assert not stages
    assert not (folder / "bundle").exists()
    return str(caught.value)
