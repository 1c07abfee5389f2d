"""Bundles of folders that are quantized already: weights as they are, logits transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from click.testing import CliRunner

import specrt
from specrt.bundle import Bundle
from specrt.cli.export import command as export
from specrt.cli.inspect import command as inspect
from specrt.errors import SpecrtError
from specrt.params import SamplingParams
from specrt_export.check.equivalence import Reference, check_parity
from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.estimate.estimate import estimate
from specrt_export.portable.attachment import attach_graph
from specrt_export.portable.exporter import export_graph
from specrt_export.portable.graph import read_graph
from specrt_export.quantize.quantizer import Quantized, keep
from specrt_export.recipe.recipe import read_recipe
from support import quantized_folders
from support.builds import build, is_fresh
from support.quantized_folders import (
    RECIPE,
    Awq,
    Bytes,
    Format,
    Fp4,
    Gptq,
    PackQuantized,
    write_folder,
)

pytestmark = pytest.mark.export


def is_mixed(layer: str) -> bool:
    """Leave one layer in bf16."""
    return layer.endswith("layers.1.self_attn.o_proj")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of the model without its weights: the same whatever they are stored as."""
    folder = tmp_path_factory.mktemp("bare")
    write_folder(folder / "model", Gptq())
    checkpoint = Checkpoint.open(folder / "model", config_only=True)
    return export_graph(checkpoint, folder / "graph.onnx").path


def kept(folder: Path, bare: Path) -> tuple[Checkpoint, Quantized]:
    checkpoint = Checkpoint.open(folder)
    graph = attach_graph(bare, checkpoint, folder.with_suffix(".onnx")).path
    return checkpoint, keep(graph, checkpoint, folder.with_suffix(".kept"))


CASES: dict[str, Format] = {
    "gptq in activation order": Gptq(symmetric=False, ordered=True),
    "awq": Awq(64),
    "packed": PackQuantized(group=128, symmetric=False),
    "fp8": Bytes(True, "block", "fp8", block=(48, 96)),
    "nvfp4": Fp4(),
}


@pytest.mark.parametrize("format_", CASES.values(), ids=CASES)
def test_a_kept_graph_gives_transformers_logits(
    format_: Format, bare: Path, tmp_path: Path
) -> None:
    written = write_folder(tmp_path / "model", format_, floats=is_mixed)
    checkpoint, graph = kept(written.folder, bare)
    assert len(checkpoint.coded) == 13
    report = check_parity(
        checkpoint, graph.graph, reference=Reference(checkpoint), folder=graph.folder
    )
    assert report.error < 1e-4


def test_a_head_of_its_own_is_read_though_the_config_ties_it(tmp_path: Path) -> None:
    """As transformers does it; a checkpoint in codes it does not read."""
    tokens, logits = np.arange(8)[None], []
    for tied in (False, True):
        written = write_folder(tmp_path / f"{tied}", Gptq(), tie_word_embeddings=False)
        written.config["tie_word_embeddings"] = tied
        written.save()
        logits.append(Reference(Checkpoint.open(written.folder))(tokens))
    assert np.array_equal(*logits)


def test_inputs_are_put_in_order_once_for_layers_that_share_them(
    bare: Path, tmp_path: Path
) -> None:
    written = write_folder(tmp_path / "model", Gptq(ordered=True))
    nodes = read_graph(kept(written.folder, bare)[1].graph).graph.node
    ordered = [n for n in nodes if n.op_type == "Gather" and n.name.endswith("inputs/Gather")]
    assert len(ordered) == 2 * 4  # queries with keys and values, gate with up, two alone
    readers = [n.op_type for n in nodes for name in n.input if name == ordered[0].output[0]]
    assert readers == ["MatMul"] * 3


def test_layers_with_orders_of_their_own_have_their_inputs_each_in_its_own(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_folders, "READS", {})
    written = write_folder(tmp_path / "model", Gptq(ordered=True))
    checkpoint, graph = kept(written.folder, bare)
    report = check_parity(
        checkpoint, graph.graph, reference=Reference(checkpoint), folder=graph.folder
    )
    assert report.error < 1e-4


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def test_a_quantized_folder_speculates_without_loss(
    recipe: Path, bare: Path, tmp_path: Path
) -> None:
    """From a graph that was exported of the config alone, so without torch."""
    graph = f'[target]\ngraph = "{bare}"'
    recipe.write_text(RECIPE.replace("[target]", graph), encoding="utf-8")
    write_folder(tmp_path / "target", Gptq(symmetric=False, ordered=True), floats=is_mixed)
    out, stages = tmp_path / "bundle", list[str]()
    build(read_recipe(recipe), out, lambda stage, done: stages.append(stage))
    assert "compare target with transformers" in stages
    warnings = [stage for stage in stages if "warning" in stage]
    assert len(warnings) == 1  # the layer that is left in floats, as `is_mixed` says
    assert "self_attn.o_proj.weight is stored as" in warnings[0]
    assert is_fresh(read_recipe(recipe), out)
    manifest = Bundle.open(out).manifest
    assert (manifest.target.precision, manifest.target.head) == ("stored", "stored")
    guess = estimate(read_recipe(recipe)).models[0]
    assert guess.precision == "stored"
    assert guess.engine_bytes == pytest.approx(manifest.target.weight_bytes, rel=0.2)
    with specrt.load(out, threads=1) as generator:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        prompt = list(b"hello world, the")
        texts = [generator.generate(prompt, params, gamma=g).token_ids for g in (0, 1, 3)]
    assert len(texts[0]) == 40
    assert texts[0] == texts[1] == texts[2]


def test_a_bundle_says_what_is_left_out(recipe: Path, bare: Path, tmp_path: Path) -> None:
    written = write_folder(tmp_path / "target", Bytes(True, "tensor", "fp8"))
    written.config["quantization_config"]["activation_scheme"] = "static"
    written.tensors["model.layers.0.mlp.up_proj.input_scale"] = ("F32", np.ones(1, np.float32))
    written.save()
    recipe.write_text(RECIPE.replace("[target]", f'[target]\ngraph = "{bare}"'), encoding="utf-8")
    with pytest.raises(SpecrtError, match="weight_only = true"):
        build(read_recipe(recipe), tmp_path / "out")
    recipe.write_text(
        recipe.read_text("utf-8").replace("[target]", "[target]\nweight_only = true"), "utf-8"
    )
    assert estimate(read_recipe(recipe)).models[0].precision == "stored"
    build(read_recipe(recipe), tmp_path / "out")
    assert Bundle.open(tmp_path / "out").manifest.origins["target"].left_out == "activations in FP8"
    told = CliRunner().invoke(inspect, [str(tmp_path / "out")]).output
    assert "; weight-only, left out: activations in FP8" in told


WRONG = {
    "bits": (
        "[engine]", 'bits = "auto"\nmax_kl = 0.1\n[engine]',
        r"target\.bits is 'auto', and target is quantized already \(GPTQ int4.*; remove it",
    ),
    "an embedding": (
        "[engine]", 'embedding = "int8"\n[engine]',
        r"target\.embedding is 'int8', and target\.precision 'stored'; .* remove target\.embedding",
    ),
    "another precision": (
        "[engine]", '[engine]\nprecision = "fp16"',
        r"\.precision is 'fp16', and target is quantized already \(GPTQ int4.*precision to 'stored",
    ),
    "a device's operators": (
        "[engine]", '[engine]\nbackend = "tensorrt"',
        r"target is quantized \(GPTQ int4.*operators of tensorrt do not take .*build for ort-cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG)
def test_what_is_stored_is_not_stored_otherwise(
    old: str, new: str, message: str, recipe: Path, tmp_path: Path
) -> None:
    write_folder(tmp_path / "target", Gptq())
    recipe.write_text(RECIPE.replace(old, new), encoding="utf-8")
    stages: list[str] = []
    with pytest.raises(SpecrtError, match=message) as caught:
        build(read_recipe(recipe), tmp_path / "out", lambda stage, done: stages.append(stage))
    assert "\n" not in str(caught.value)
    assert not stages
    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_named(bare: Path, tmp_path: Path) -> None:
    written = write_folder(tmp_path / "model", Awq(), intermediate_size=192)
    with pytest.raises(SpecrtError, match=r"mlp\.\w+\.weight has shape .*config\.json calls for"):
        kept(written.folder, bare)


def test_a_graph_of_codes_is_one_without_weights(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", Gptq())
    command = [str(tmp_path / "model"), "--out", str(tmp_path / "graph.onnx")]
    refused = CliRunner().invoke(export, command)
    assert isinstance(refused.exception, SpecrtError)
    assert "--config-only" in str(refused.exception)


def test_a_checkpoint_says_what_a_weight_comes_to(tmp_path: Path) -> None:
    written = write_folder(tmp_path / "model", Awq(), floats=is_mixed)
    checkpoint = Checkpoint.open(tmp_path / "model")
    for name, wanted in written.weights.items():
        assert np.array_equal(checkpoint.floats(name), wanted)
