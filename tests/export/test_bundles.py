"""Bundles of each precision and backend: measured, held to their limits, shown and run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import specrt
from shared import nightly_but
from specrt.bundle import Bundle
from specrt.cli.inspect import command as inspect
from specrt.engine.backends import BACKENDS, host_bytes
from specrt.errors import BuildError, EngineError, RecipeError
from specrt.params import SamplingParams
from specrt_export.compile.compiler import CompiledModel, LoweredModel, Progress
from specrt_export.compile.ort_cpu_compiler import OrtCpuCompiler
from specrt_export.compile.ort_cuda_compiler import on_cpu
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.portable.graph import runs_here
from specrt_export.recipe.compiler_spec import COMPILERS, CompilerSpec
from specrt_export.recipe.recipe import Recipe, read_recipe
from support.builds import build, is_fresh

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)
QUALITY = '\n[quality]\ncalibration = "text.jsonl"\n'
Ask = Callable[..., Recipe]


@pytest.fixture
def ask(small: Path, text: Path) -> Ask:
    """Give the small recipe a precision, limits, and lines of the draft's and the target's own."""
    base = small.read_text(encoding="utf-8")

    def written(precision: str, *lines: str, **tables: str) -> Recipe:
        recipe = base.replace("[engine]", f'[engine]\nprecision = "{precision}"', 1)
        for table, line in tables.items():
            recipe = recipe.replace(f"[{table}]", f"[{table}]\n{line}", 1)
        small.write_text(recipe + QUALITY + "\n".join(lines) + "\n", encoding="utf-8")
        return read_recipe(small)

    return written


def shown(bundle: Path) -> str:
    return " ".join(CliRunner().invoke(inspect, [str(bundle)]).output.split())


def leftovers(out: Path) -> list[str]:
    return [path.name for path in out.parent.iterdir() if path != out]


def complete(bundle: Path, gamma: int | None = None) -> list[int]:
    with specrt.load(bundle, threads=1) as generator:
        params = SamplingParams(max_tokens=24)
        return generator.generate("def f(x):\n", params, gamma=gamma).token_ids


def test_a_quantized_pair_is_measured_shown_and_lossless(ask: Ask, text: Path, out: Path) -> None:
    recipe = ask("int4", draft='precision = "int8"')
    build(recipe, out)
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
    # Both are codelet's draft: scales and a second table are not parameters.
    assert target.parameters == draft.parameters == 1_417_856
    assert target.weight_bytes < draft.weight_bytes < 2.3e6
    assert complete(out) == complete(out, gamma=0)
    said = shown(out)
    assert "int4; embedding int8, head int8, 32 weights to a scale" in said
    assert "KL divergence 0.0" in said
    assert said.count("this quantized target in plain decoding") == 1
    # Stale once its text or its limits change.
    assert is_fresh(recipe, out)
    assert not is_fresh(ask("int4", "max_kl = 0.5", draft='precision = "int8"'), out)
    text.write_text('{"prompt": "x"}\n', encoding="utf-8")
    assert not is_fresh(recipe, out)


@needs_reference
@pytest.mark.parametrize(
    "bound", nightly_but(["max_kl = 0.02"], ["max_kl = 0.02", "max_bytes = 1_500_000"])
)
def test_bits_that_are_chosen_keep_to_their_bound(ask: Ask, out: Path, bound: str) -> None:
    build(replace(ask("fp32", target=f'bits = "auto"\n{bound}'), draft=None), out)
    target = Bundle.open(out).manifest.target
    assert target.bits is not None
    assert target.quality is not None
    assert set(target.bits.values()) == {"int4", "int8"}
    assert len(target.bits) == 8, "four parts of each layer; the table is tied"
    assert target.quality.kl <= 0.02 or "bytes" in bound
    assert target.weight_bytes <= 1_500_000 or "kl" in bound
    assert target.fused["qkv"] == target.fused["gate_up"] == "2/2", "what is joined has one format"
    assert complete(out) == complete(out, gamma=0)
    assert "of 8 parts are int8, the others int4; layer " in shown(out)
    assert leftovers(out) == []


@needs_reference
def test_a_model_beyond_a_limit_is_refused_with_the_parts_that_hurt(ask: Ask, out: Path) -> None:
    told = r"draft is further from .* allows: .*max_kl 0\.01.*min_top1 0\.999.*hurt most.*layer 0"
    limits = ("max_kl = 0.01", "min_top1 = 0.999")
    with pytest.raises(BuildError, match=told):
        build(ask("fp32", *limits, draft='precision = "int4"'), out)
    assert not list(out.parent.iterdir())


def test_where_portable_graphs_do_not_run_an_engine_is_the_reference(
    ask: Ask, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the last ONNX Runtime for Python 3.10."""
    found = []
    for _ in range(2):
        build(replace(ask("int8"), draft=None), out)
        quality = Bundle.open(out).manifest.target.quality
        assert quality is not None
        found.append(quality.kl)
        for module in ("check.model_parity", "check.measured_model", "check.quality"):
            monkeypatch.setattr(f"specrt_export.{module}.runs_here", lambda: False)
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_target_and_draft_may_run_on_different_devices(ask: Ask, out: Path) -> None:
    """What would run on a GPU gives the same tokens here, where it is widened for a CPU."""
    build(ask("fp16", target='backend = "ort-cuda"', draft='precision = "fp32"'), out)
    manifest = Bundle.open(out).manifest
    assert manifest.draft is not None
    assert manifest.backend_of(manifest.target) == "ort-cuda"
    assert manifest.backend_of(manifest.draft) == manifest.backend == "ort-cpu"
    assert (manifest.target.kv_item_bytes, manifest.draft.kv_item_bytes) == (2, 4)
    # A GPU's weights and buffers are not in main memory.
    full = manifest.draft.geometry.kv_bytes(1, manifest.max_length, 4)
    assert host_bytes(manifest) == manifest.draft.weight_bytes + full
    assert "ort-cuda (draft: ort-cpu)" in shown(out)
    if shutil.which("nvidia-smi") is None:
        with pytest.raises(EngineError, match="runs on an NVIDIA GPU only"):
            specrt.load(out)
    geometry, length = manifest.target.geometry, manifest.max_length
    with on_cpu(out / "target", geometry, length, 64) as engine:
        found = engine.forward([[5, 6, 7, 8]], [0])
    build(ask("fp16", draft='precision = "fp32"'), out)
    assert Bundle.open(out).manifest.kv_bytes() > manifest.kv_bytes()
    with specrt.load(out, threads=1) as generator:
        expected = generator.models.target.forward([[5, 6, 7, 8]], [0])
    assert found.argmax.tolist() == expected.argmax.tolist()


class ToyCompiler(OrtCpuCompiler):
    """A backend of its own: what ort-cpu compiles, under another file name."""

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        progress("toy", 0.5)
        shutil.move(lowered.folder, out)
        return CompiledModel((out / ENGINE).rename(out / "toy.engine").name, 5)


def test_a_backend_registered_from_outside_builds(
    ask: Ask, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError, match=r"engine\.backend is 'toy'"):
        ask("fp32", engine='backend = "toy"')
    monkeypatch.setitem(BACKENDS, "toy", BACKENDS["ort-cuda"])
    monkeypatch.setitem(COMPILERS, "toy", CompilerSpec(f"{__name__}:ToyCompiler", ("fp32",)))
    recipe = ask("fp32", engine='backend = "toy"')
    recipe = replace(recipe, draft=None, engine=replace(recipe.engine, gamma=0))
    stages: list[str] = []
    build(recipe, out, lambda stage, done: stages.append(stage))
    model = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["target"]
    made = (model["backend"], model["engine"], model["weight_bytes"])
    assert made == ("toy", "target/toy.engine", 5)
    assert "target: toy" in stages
    assert {p.name for p in (out / "target").iterdir()} == {"toy.engine", WEIGHTS}
