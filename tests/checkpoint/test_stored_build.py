"""Checkpoints that are quantized already, GGUF files and folders: their codes in graphs, bundles.

Weights are the checkpoint's bit for bit, and logits transformers'.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf", exc_type=ImportError)

from click.testing import CliRunner

from portable.zoo import BARE, exported
from quantize.graphs import values_of
from shared import nightly_but
from specrt.bundle import Bundle
from specrt.cli.inspect import command as inspect
from specrt.errors import SpecrtError
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.estimate.estimate import estimate
from specrt_export.portable.attachment import attach_graph
from specrt_export.portable.graph import read_graph
from specrt_export.quantize.quantizer import Quantized, keep
from specrt_export.recipe.recipe import read_recipe
from support import gguf_files
from support.builds import build
from support.gguf_files import SCORED_VOCABULARY, Store, half, write_model
from support.quantized_folders import (
    RECIPE,
    Awq,
    Bytes,
    Format,
    Fp4,
    Gptq,
    PackQuantized,
    Written,
    write_folder,
)

pytestmark = pytest.mark.export

BLOCKS = {
    "Q4_0": (32, 18, 8), "Q4_1": (32, 20, 15), "Q5_0": (32, 22, 16), "Q5_1": (32, 24, 31),
    "Q8_0": (32, 34, 128), "Q2_K": (256, 84, 45), "Q3_K": (256, 110, 128), "Q4_K": (256, 144, 945),
    "Q5_K": (256, 176, 1953), "Q6_K": (256, 210, 4096), "IQ4_NL": (32, 18, 127),
    "IQ4_XS": (256, 136, 4064), "MXFP4": (32, 17, 6),
}  # fmt: skip
"""Weights and bytes of a block, and about the largest code, times scales of 6 or 8 bits."""


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
        at = {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80}.get(chosen, 0)
        if chosen == "MXFP4":
            blocks[:, 0] = rng.integers(107, 123, len(blocks))
        else:
            blocks[:, at : at + 2] = scales.astype("<f2").view(np.uint8)
        if chosen in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K"):
            blocks[:, at + 2 : at + 4] = (scales[::-1] * 8).astype("<f2").view(np.uint8)
        return int(gguf.GGMLQuantizationType[chosen]), blocks.tobytes()

    return store


def write(path: Path, kind: str, *formats: str) -> Path:
    """Write a GGUF file."""
    return write_model(path, gguf_files.wide(kind), coded(*formats), SCORED_VOCABULARY)


def is_mixed(layer: str) -> bool:
    """Leave one layer of a folder in bf16."""
    return layer.endswith("layers.1.self_attn.o_proj")


def kept(path: Path, graph: str = "coded-llama") -> tuple[Checkpoint, Quantized]:
    """Give a checkpoint's codes to its graph: the same whatever weights are stored as."""
    checkpoint = Checkpoint.open(path)
    if checkpoint.gguf is not None:
        checkpoint.unpack()
    bare = exported(f"{graph}{BARE}").graph
    attached = attach_graph(bare, checkpoint, path.with_suffix(".onnx")).path
    return checkpoint, keep(attached, checkpoint, path.with_suffix(".kept"))


def hold_to_transformers(checkpoint: Checkpoint, graph: Quantized) -> None:
    report = check_parity(
        checkpoint, graph.graph, reference=Reference(checkpoint), folder=graph.folder
    )
    assert report.error < 1e-4


FILES = {
    "llama in Q4_0": ("llama", "Q4_0"),
    "llama in Q5_0 and F16": ("llama", "Q5_0", "F16"),
    "qwen3 in Q8_0": ("qwen3", "Q8_0"),
    "qwen3 in Q6_K": ("qwen3", "Q6_K"),
    "gemma3 in a mixture": ("gemma3", "Q4_0", "Q5_0", "Q6_K", "Q8_0"),
    "llama in Q4_1": ("llama", "Q4_1"),
    "qwen3 in Q4_K and Q6_K": ("qwen3", "Q4_K", "Q6_K"),
    "llama in Q5_K and Q5_1": ("llama", "Q5_K", "Q5_1"),
    "llama in IQ4_NL": ("llama", "IQ4_NL"),
    "qwen3 in MXFP4": ("qwen3", "MXFP4"),
    "qwen3 in few bits": ("qwen3", "IQ4_XS", "Q3_K", "MXFP4", "IQ4_NL", "Q2_K"),
}
OFTEN = ("gemma3 in a mixture", "qwen3 in Q4_K and Q6_K", "qwen3 in few bits")
STORED_AS = dict.fromkeys(("Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K"), "int4") | {"MXFP4": "fp4"}
"""What codes are kept in; the others in int8."""


@pytest.mark.parametrize("case", nightly_but(OFTEN, FILES))
def test_weights_are_a_files_bit_for_bit_and_logits_transformers(case: str, tmp_path: Path) -> None:
    kind, *formats = FILES[case]
    checkpoint, graph = kept(write(tmp_path / "tiny.gguf", kind, *formats), f"gguf-{kind}")
    model = read_graph(graph.graph)
    nodes = {node.name: node for node in model.graph.node}
    readers = [one.choice.uses[0] for one in graph.stored]
    found = values_of(model, graph.folder, [nodes[r.node].input[r.input] for r in readers])
    assert checkpoint.gguf is not None
    for one, values in zip(graph.stored, found, strict=True):
        weight = checkpoint.gguf.weights[one.choice.weight]
        assert one.choice.precision == STORED_AS.get(weight.format.name, "int8")
        assert values.tobytes() == weight.floats(0, weight.shape[0]).tobytes()
    names = {one.choice.weight for one in graph.stored}
    assert names == {name for name, w in checkpoint.gguf.weights.items() if w.quantized}
    hold_to_transformers(checkpoint, graph)


def whole(written: Written) -> None:
    """Write a text model as the part of a larger one that it is published as."""
    text = dict(written.config)
    codes = {"quantization_config": text.pop("quantization_config")}
    written.config.clear()
    written.config.update(
        {"model_type": "gemma4", "text_config": text, "vision_config": {}}, **codes
    )
    stored = {n.replace("model.", "model.language_model."): t for n, t in written.tensors.items()}
    stored["model.vision_tower.table"] = ("F32", np.ones(4, np.float32))
    written.tensors.clear()
    written.tensors.update(stored)
    written.save()


FOLDERS: dict[str, tuple[str, Format]] = {
    "gptq in activation order": ("llama", Gptq(symmetric=False, ordered=True)),
    "awq": ("llama", Awq(64)),
    "packed": ("llama", PackQuantized(group=128, symmetric=False)),
    "fp8": ("llama", Bytes(True, "block", "fp8", block=(48, 96))),
    "nvfp4": ("llama", Fp4()),
    "lfm2 in gptq": ("lfm2", Gptq()),
    "lfm2 in awq": ("lfm2", Awq(64)),
    "lfm2 packed": ("lfm2", PackQuantized(symmetric=False)),
    "gemma4 in gptq": ("gemma4", Gptq(symmetric=False, ordered=True)),
    "gemma4 in awq": ("gemma4", Awq()),
    "gemma4 packed": ("gemma4", PackQuantized()),
}
OF_KIND = {"llama": 13, "lfm2": 17, "gemma4": 37}
"""Weights in codes."""


@pytest.mark.parametrize(
    "case", nightly_but([*list(FOLDERS)[:5], "lfm2 in gptq", "gemma4 packed"], FOLDERS)
)
def test_logits_of_a_folder_are_transformers(case: str, tmp_path: Path) -> None:
    kind, format_ = FOLDERS[case]
    written = write_folder(tmp_path / "model", format_, kind=kind, floats=is_mixed)
    if kind == "gemma4":
        whole(written)
    checkpoint, graph = kept(written.folder, f"coded-{kind}")
    assert len(checkpoint.coded) == OF_KIND[kind]
    for name, wanted in written.weights.items():
        assert np.array_equal(checkpoint.floats(name), wanted)
    hold_to_transformers(checkpoint, graph)


def test_a_head_of_its_own_is_read_though_the_config_ties_it(tmp_path: Path) -> None:
    """As transformers does it; a checkpoint in codes it does not read."""
    tokens, logits = np.arange(8)[None], []
    for tied in (False, True):
        written = write_folder(tmp_path / f"{tied}", Gptq(), tie_word_embeddings=False)
        written.config["tie_word_embeddings"] = tied
        written.save()
        logits.append(Reference(Checkpoint.open(written.folder))(tokens))
    assert np.array_equal(*logits)


PAIR = RECIPE.replace(
    'checkpoint = "target"', 'checkpoint = "target.gguf"\n[draft]\ncheckpoint = "draft.gguf"'
)


def recipe_of(folder: Path, text: str, **keys: str) -> Path:
    """Write a recipe with lines of the target's own."""
    path = folder / "recipe.toml"
    lines = "\n".join(f"{key} = {value}" for key, value in keys.items())
    path.write_text(text.replace("[target]", f"[target]\n{lines}"), encoding="utf-8")
    return path


def graph_line() -> str:
    return f'"{exported(f"coded-llama{BARE}").graph}"'


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The recipe of two GGUF files."""
    write(tmp_path / "target.gguf", "llama", "Q4_K", "Q6_K", "Q8_0", "Q4_0")
    few = ("IQ4_XS", "Q3_K", "MXFP4", "IQ4_NL", "Q2_K")
    write(tmp_path / "draft.gguf", "qwen3", "Q5_1", "F16", "Q5_K", *few)
    return recipe_of(tmp_path, PAIR)


def test_a_bundle_says_what_is_left_out(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "target", Bytes(True, "tensor", "fp8"))
    written.config["quantization_config"]["activation_scheme"] = "static"
    written.tensors["model.layers.0.mlp.up_proj.input_scale"] = ("F32", np.ones(1, np.float32))
    written.save()
    recipe = recipe_of(tmp_path, RECIPE, graph=graph_line())
    with pytest.raises(SpecrtError, match="weight_only = true"):
        build(read_recipe(recipe), tmp_path / "out")
    recipe_of(tmp_path, RECIPE, graph=graph_line(), weight_only="true")
    assert estimate(read_recipe(recipe)).models[0].precision == "stored"
    build(read_recipe(recipe), tmp_path / "out")
    assert Bundle.open(tmp_path / "out").manifest.origins["target"].left_out == "activations in FP8"
    told = CliRunner().invoke(inspect, [str(tmp_path / "out")]).output
    assert "; weight-only, left out: activations in FP8" in told


WRONG_OF_FILES = {
    "another precision": (
        "[engine]", '[engine]\nprecision = "fp16"',
        r"\.precision is 'fp16', and target\.gguf is quantized .*target\.precision to 'stored'",
    ),
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
WRONG_OF_FOLDERS = {
    "bits": (
        "[engine]", 'bits = "auto"\nmax_kl = 0.1\n[engine]',
        r"target\.bits is 'auto', and target is quantized already \(GPTQ int4.*; remove it",
    ),
}  # fmt: skip


def refused(recipe: Path, message: str) -> None:
    """Hold a build to be refused in one line before any stage of it."""
    stages: list[str] = []
    out = recipe.parent / "bundle"
    with pytest.raises(SpecrtError, match=message) as caught:
        build(read_recipe(recipe), out, lambda stage, done: stages.append(stage))
    assert "\n" not in str(caught.value)
    assert not stages
    assert not out.exists()


@pytest.mark.parametrize(("old", "new", "message"), WRONG_OF_FILES.values(), ids=WRONG_OF_FILES)
def test_what_a_file_stores_is_not_stored_otherwise(
    old: str, new: str, message: str, pair: Path
) -> None:
    pair.write_text(PAIR.replace(old, new), encoding="utf-8")
    refused(pair, message)


@pytest.mark.parametrize(("old", "new", "message"), WRONG_OF_FOLDERS.values(), ids=WRONG_OF_FOLDERS)
def test_what_a_folder_stores_is_not_stored_otherwise(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "target", Gptq())
    refused(recipe_of(tmp_path, RECIPE.replace(old, new)), message)


def test_floats_are_not_stored_as_codes(pair: Path, tmp_path: Path) -> None:
    write(tmp_path / "draft.gguf", "qwen3", "F16")
    pair.write_text(PAIR.replace("[draft]", '[draft]\nprecision = "stored"'), encoding="utf-8")
    refused(pair, r"draft\.precision is 'stored', and .* are floats; set")


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "model", Awq(), intermediate_size=192)
    with pytest.raises(SpecrtError, match=r"mlp\.\w+\.weight has shape .*config\.json calls for"):
        kept(written.folder)
