"""A quantized build is measured, held to its limits, and leaves nothing where it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from lower.comparing import equal_on_cpu

import specrt
from specrt.bundle import Bundle, Quality, read_manifest
from specrt.cli.inspect import command as inspect
from specrt.engine.backends import open_engine
from specrt.errors import BuildError, BundleError
from specrt.params import SamplingParams
from specrt_export.builder import build, is_fresh
from specrt_export.check.quality import EngineScorer, measure
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu, exact_copy
from specrt_export.inputs import check_inputs, find_inputs
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.portable.graph import GraphRun, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize import quantize
from specrt_export.recipe import Recipe, read_recipe

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
QUALITY = '\n[quality]\ncalibration = "text.jsonl"\n'


@pytest.fixture
def text(small: Path, engines: Path) -> Path:
    """A calibration text beside the small recipe."""
    return Path(shutil.copy(engines / "codelet" / "calibration.jsonl", small.parent / "text.jsonl"))


@pytest.fixture
def asked(small: Path, text: Path) -> Callable[..., Recipe]:
    """The small recipe with a precision, and limits."""

    base = small.read_text(encoding="utf-8")

    def ask(precision: str, *lines: str, draft: str = "") -> Recipe:
        written = base.replace("[engine]", f'[engine]\nprecision = "{precision}"', 1)
        if draft:
            written = written.replace("[draft]", f'[draft]\nprecision = "{draft}"', 1)
        small.write_text(written + QUALITY + "\n".join(lines) + "\n", encoding="utf-8")
        return read_recipe(small)

    return ask


def complete(bundle: Path, gamma: int | None = None) -> list[int]:
    with specrt.load(bundle, threads=1) as generator:
        params = SamplingParams(max_tokens=24)
        return generator.generate("def f(x):\n", params, gamma=gamma).token_ids


def test_a_quantized_pair_is_measured(asked: Callable[..., Recipe], out: Path) -> None:
    recipe = asked("int4", draft="int8")
    stages: list[str] = []
    build(recipe, out, lambda stage, done: stages.append(stage))
    assert stages == [
        "read checkpoints",
        *(f"{verb} {role}" for role in ("target", "draft")
          for verb in ("quantize", "lower", "check", "measure", "compile")),
        "write manifest",
    ]  # fmt: skip
    manifest = Bundle.open(out).manifest
    target, draft = manifest.target, manifest.draft
    assert draft is not None
    assert manifest.precision == "int4"
    assert (target.precision, target.embedding, target.head, target.block) == (
        "int4", "int8", "int8", 32,
    )  # fmt: skip
    assert (draft.precision, draft.embedding, draft.head) == ("int8", "int8", "int8")
    assert target.quality is not None
    assert draft.quality is not None
    assert 0.01 < target.quality.kl < 0.2
    assert 0 < draft.quality.kl < 0.01
    assert 0.5 < target.quality.top1 < draft.quality.top1 < 1
    assert target.quality.tokens == 2048
    # Both are codelet's draft: scales and a second table are no parameters.
    assert target.parameters == draft.parameters == 1_417_856
    assert target.weight_bytes < draft.weight_bytes < 2.3e6
    assert {p.name for p in out.rglob("*") if p.is_dir()} == {"target", "draft"}
    assert sorted(p.name for p in (out / "target").iterdir()) == ["engine.data", "engine.onnx"]
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert len(complete(out)) == 24


def test_a_bundle_is_stale_once_its_text_changes(
    asked: Callable[..., Recipe], text: Path, out: Path
) -> None:
    recipe = asked("int8")
    build(recipe, out)
    assert is_fresh(recipe, out)
    written = text.read_text(encoding="utf-8")
    text.write_text(written + '{"prompt": "x"}\n', encoding="utf-8")
    assert not is_fresh(recipe, out)
    text.write_text(written, encoding="utf-8")
    assert is_fresh(recipe, out)
    assert not is_fresh(asked("int8", "max_kl = 0.5"), out)
    text.unlink()
    assert not is_fresh(recipe, out)


def refusal(recipe: Recipe, out: Path) -> str:
    with pytest.raises(BuildError) as refused:
        build(recipe, out)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())
    said = str(refused.value)
    assert "\n" not in said
    return said


@needs_reference
def test_a_model_beyond_a_limit_is_refused_with_the_parts_that_hurt(
    asked: Callable[..., Recipe], out: Path
) -> None:
    said = refusal(asked("int4", "max_kl = 0.01", "min_top1 = 0.999", draft="int8"), out)
    assert "the quantized target is further from its checkpoint than the recipe allows" in said
    assert "KL divergence 0.0" in said
    assert "nats, max_kl 0.01; top-1 agreement 0." in said
    assert ", min_top1 0.999" in said
    assert "Quantized alone, these hurt most, in nats: layer 0 (0.0" in said
    assert "layer 1 (0.0" in said
    assert "target.precision" in said


def test_the_draft_is_held_to_the_limits_too(asked: Callable[..., Recipe], out: Path) -> None:
    said = refusal(asked("int8", "min_top1 = 0.95", draft="int4"), out)
    assert "the quantized draft is further from its checkpoint" in said
    assert "max_kl" not in said.split("Quantized alone")[0]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (None, "cannot be read: No such file"),
        ('{"prompt": "x = 1"}\n', "expected 256 or more"),
        ("{}\n", "text.jsonl:1 has neither"),
    ],
)
def test_a_text_that_will_not_do_is_refused_before_any_work(
    asked: Callable[..., Recipe], text: Path, out: Path, written: str | None, told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def never(*_: object, **__: object) -> None:
        raise AssertionError("quantized")

    monkeypatch.setattr("specrt_export.builder.quantize", never)
    recipe = asked("int8")
    text.unlink()
    if written is not None:
        text.write_text(written, encoding="utf-8")
    assert told in refusal(recipe, out)


def test_an_unquantized_build_asks_for_no_text(small: Path, text: Path, out: Path) -> None:
    small.write_text(small.read_text(encoding="utf-8") + QUALITY, encoding="utf-8")
    text.unlink()
    build(read_recipe(small), out)
    manifest = Bundle.open(out).manifest
    assert (manifest.precision, manifest.target.block, manifest.target.quality) == ("fp32", 0, None)


def test_storage_is_measured_where_there_is_a_text(
    asked: Callable[..., Recipe], small: Path, out: Path
) -> None:
    build(asked("bf16"), out)
    quality = Bundle.open(out).manifest.target.quality
    assert quality is not None
    assert quality.kl < 1e-8
    assert quality.top1 == 1
    written = small.read_text(encoding="utf-8")
    small.write_text(written.replace(QUALITY, ""), encoding="utf-8")
    build(read_recipe(small), out)
    record = Bundle.open(out).manifest.target
    assert (record.precision, record.quality) == ("bf16", None)


def test_where_portable_graphs_do_not_run_an_engine_is_the_reference(
    asked: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(asked("int8"), out)
    usual = Bundle.open(out).manifest.target.quality
    for module in ("builder", "check.quality"):
        monkeypatch.setattr(f"specrt_export.{module}.runs_here", lambda: False)
    build(asked("int8"), out)
    found = Bundle.open(out).manifest.target.quality
    assert usual is not None
    assert found is not None
    assert found.kl == pytest.approx(usual.kl, rel=1e-2)
    shutil.rmtree(out)
    said = refusal(asked("int8", "max_kl = 0.0"), out)
    assert "hurt most" not in said


def test_a_model_that_returns_no_numbers_is_refused(
    asked: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "specrt_export.check.quality.measure",
        lambda *_: Quality(kl=float("inf"), top1=0.0, tokens=1),
    )
    assert "returns no numbers on the calibration text" in refusal(asked("int8"), out)


def test_disk_is_asked_for_by_the_precision(
    asked: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 0

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk)
    needed = {}
    for precision in ("fp32", "bf16", "int8", "int4"):
        recipe = asked(precision)
        with pytest.raises(BuildError) as refused:
            check_inputs(recipe, find_inputs(recipe), out)
        needed[precision] = int(str(refused.value).split("about ")[1].split(" MiB")[0])
    # What is stored as bf16 is written as fp32 in between.
    assert needed["bf16"] > needed["fp32"] > needed["int8"] > needed["int4"] > 16


@needs_reference
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_an_engine_with_a_wrong_scale_is_found(
    engines: Path, tmp_path: Path, precision: str
) -> None:
    codelet = engines / "codelet"
    made = quantize(
        codelet / "portable" / "draft.onnx", codelet / "checkpoint" / "draft", tmp_path / "q",
        Precision.of(precision),
    )  # fmt: skip
    compiled = compile_ort_cpu(made.graph, made.folder, tmp_path / "engine", 128)
    source = made.graph, made.folder
    assert equal_on_cpu(source, compiled, 128, [1, 4]) < 1e-5
    scale = next(t for one in made.stored for t in one.tensors if t.name.endswith(".scale"))
    place = {e.key: e.value for e in scale.external_data}
    with (made.folder / "weights.data").open("r+b") as file:
        file.seek(int(place["offset"]))
        first = np.frombuffer(file.read(4), np.float32)
        file.seek(int(place["offset"]))
        file.write((first * 1.5).tobytes())
    with pytest.raises(BuildError, match="differs from the portable graph"):
        equal_on_cpu(source, compiled, 128, [1, 4])
    assert sorted(p.name for p in (tmp_path / "engine").iterdir()) == ["engine.data", "engine.onnx"]


def test_the_check_computes_in_fp32_and_leaves_no_file(engines: Path, tmp_path: Path) -> None:
    codelet = engines / "codelet"
    made = quantize(
        codelet / "portable" / "draft.onnx", codelet / "checkpoint" / "draft", tmp_path / "q",
        Precision.of("int8"),
    )  # fmt: skip
    compiled = compile_ort_cpu(made.graph, made.folder, tmp_path / "engine", 128)
    engine = tmp_path / "engine" / ENGINE

    def levels(path: Path) -> set[int]:
        nodes = onnx.load(path, load_external_data=False).graph.node
        return {a.i for n in nodes for a in n.attribute if a.name == "accuracy_level"}

    assert levels(engine) == {4}
    with exact_copy(engine) as path:
        assert levels(path) == {1}
        scorers = [
            EngineScorer(
                open_engine("ort-cpu", place, compiled.geometry, batch=1, max_length=128,
                            max_width=64, threads=1)
            )
            for place in (engine, path)
        ]  # fmt: skip
        tokens = np.random.default_rng(0).integers(0, 8192, 64)
        # Activations as int8: near, and not the same.
        assert 1e-7 < measure(scorers[1], scorers[0], [tokens]).kl < 1e-2
    assert not path.exists()
    with pytest.raises(KeyboardInterrupt), exact_copy(engine) as path:
        raise KeyboardInterrupt
    assert not path.exists()


@needs_reference
def test_rows_of_a_batch_are_checked_and_measured(asked: Callable[..., Recipe], out: Path) -> None:
    recipe = asked("int8")
    build(recipe, out)
    alone = Bundle.open(out).manifest.target.quality
    build(replace(recipe, engine=replace(recipe.engine, batch=3)), out)
    manifest = Bundle.open(out).manifest
    assert manifest.batch == 3
    graph = onnx.load(out / manifest.target.engine, load_external_data=False).graph
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in graph.input}
    assert [shapes[f"key.0.{row}"][0] for row in range(3)] == [1, 1, 1]
    found = manifest.target.quality
    assert alone is not None
    assert found is not None
    assert found.kl == pytest.approx(alone.kl, rel=0.2)
    with specrt.load(out) as generator:
        many = generator.generate_many([[1, 2, 3], [4] * 20], SamplingParams(max_tokens=9))
        assert [c.error for (c,) in many] == [None, None]


@needs_reference
@pytest.mark.parametrize("backend", ["ort-cpu", "ort-cuda"])
def test_references_have_no_more_positions_than_passes_reach(
    asked: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    reset, lengths = GraphRun.reset, []

    def record(run: GraphRun, batch: int, length: int) -> None:
        lengths.append(length)
        reset(run, batch, length)

    monkeypatch.setattr(GraphRun, "reset", record)
    recipe = asked("int8")
    options = replace(recipe.engine, backend=backend, max_length=2048)
    build(replace(recipe, engine=options), out)
    # A calibration text in pieces of 512; passes of 1 and 4 tokens behind at most 24 and a window.
    assert max(lengths) == 512
    assert min(lengths) <= 24 + 2 * (1 + 4)


def shown(bundle: Path) -> str:
    return " ".join(CliRunner().invoke(inspect, [str(bundle)]).output.split())


def test_inspect_says_what_quantizing_did(asked: Callable[..., Recipe], out: Path) -> None:
    build(asked("int8", draft="fp32"), out)
    said = shown(out)
    assert "int8; embedding int8, head int8, 32 weights to a scale" in said
    assert "KL divergence 0.000" in said
    assert "of 2048 places" in said
    assert said.count("output is that of this quantized target decoding plainly") == 1
    assert "fp32; embedding fp32, head fp32" in said


def edited(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = bundle / "manifest.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_a_manifest_from_before_quantization_is_read(small: Path, out: Path) -> None:
    build(read_recipe(small), out)

    def forget(data: dict[str, Any]) -> None:
        for role in ("target", "draft"):
            for key in ("precision", "embedding", "head", "block", "quality"):
                del data[role][key]

    whole = Bundle.open(out).manifest
    edited(out, forget)
    assert Bundle.open(out).manifest == whole
    assert "fp32; embedding fp32, head fp32" in shown(out)


@pytest.mark.parametrize(
    ("quality", "told"),
    [
        ({"kl": -1, "top1": 0.5, "tokens": 9}, "target.quality.kl is -1; expected a finite number"),
        ({"kl": 1e999, "top1": 0.5, "tokens": 9}, "kl is inf; expected a finite number, 0 or more"),
        ({"kl": 10**400, "top1": 0.5, "tokens": 9}, "expected a finite number, 0 or more"),
        ({"kl": 0, "top1": 1.5, "tokens": 9}, "quality.top1 is above 1; expected a share"),
        ({"kl": 0, "top1": 0.5, "tokens": 0}, "tokens is 0; expected a whole number from 1"),
        ({"kl": 0, "top1": 0.5}, "target.quality.tokens is missing"),
        ([], "target.quality is []; expected an object"),
    ],
)
def test_a_quality_that_is_none_is_named(
    draftless: Recipe, out: Path, quality: object, told: str
) -> None:
    build(draftless, out)
    edited(out, lambda data: data["target"].update(quality=quality))
    with pytest.raises(BundleError) as refused:
        read_manifest(out)
    assert told in str(refused.value)


def test_a_gamma_may_be_left_to_be_chosen(small: Path, out: Path) -> None:
    recipe = read_recipe(small)
    build(replace(recipe, engine=replace(recipe.engine, gamma="auto")), out)
    assert Bundle.open(out).manifest.gamma is None
    assert "0, 1, 3 (default auto)" in shown(out)
