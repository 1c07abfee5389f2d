"""Bundles whose models run on different backends, built on a machine without a GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import specrt
from specrt.bundle import Bundle
from specrt.cli.inspect import command as inspect
from specrt.engine.backends import host_bytes
from specrt.errors import EngineError
from specrt_export.builder import build
from specrt_export.compile import CompiledModel, LoweredModel, Progress
from specrt_export.compile.ort_cpu_compiler import OrtCpuCompiler
from specrt_export.compile.ort_cuda_compiler import on_cpu
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.recipe import COMPILERS, CompilerSpec, Recipe, read_recipe


def test_target_and_draft_may_run_on_different_devices(small: Path, tmp_path: Path) -> None:
    text = small.read_text(encoding="utf-8")
    mixed = '[target]\nbackend = "ort-cuda"\nprecision = "fp16"'
    small.write_text(text.replace("[target]", mixed), encoding="utf-8")
    out = tmp_path / "out"
    build(read_recipe(small), out)
    manifest = Bundle.open(out).manifest
    assert manifest.draft is not None
    assert manifest.backend_of(manifest.target) == "ort-cuda"
    assert manifest.backend_of(manifest.draft) == manifest.backend == "ort-cpu"
    assert (manifest.target.kv_item_bytes, manifest.draft.kv_item_bytes) == (2, 4)
    # A GPU's weights and buffers are not in main memory.
    full = manifest.draft.geometry.kv_bytes(1, manifest.max_length, 4)
    assert host_bytes(manifest) == manifest.draft.weight_bytes + full
    assert "ort-cuda (draft: ort-cpu)" in CliRunner().invoke(inspect, [str(out)]).output
    if shutil.which("nvidia-smi") is None:
        with pytest.raises(EngineError, match="runs on an NVIDIA GPU only"):
            specrt.load(out)


def test_the_same_recipe_builds_for_either_backend(small: Path, tmp_path: Path) -> None:
    text = small.read_text(encoding="utf-8")
    small.write_text(text.replace("[engine]", '[engine]\nprecision = "fp16"'), encoding="utf-8")
    for backend in ("ort-cpu", "ort-cuda"):
        build(read_recipe(small, backend=backend), tmp_path / backend)
    whole = Bundle.open(tmp_path / "ort-cpu").manifest
    halved = Bundle.open(tmp_path / "ort-cuda").manifest
    assert (whole.backend, halved.backend) == ("ort-cpu", "ort-cuda")
    assert halved.kv_bytes() * 2 == whole.kv_bytes()
    # What would run on a GPU gives the same tokens here, where it is widened for a CPU.
    folder = tmp_path / "ort-cuda" / "target"
    with on_cpu(folder, halved.target.geometry, halved.max_length, 64) as engine:
        found = engine.forward([[5, 6, 7, 8]], [0]).argmax.tolist()
    with specrt.load(tmp_path / "ort-cpu") as generator:
        assert generator.models.target.forward([[5, 6, 7, 8]], [0]).argmax.tolist() == found


class ToyCompiler(OrtCpuCompiler):
    """A backend of its own: what ort-cpu compiles, under another file name."""

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        progress("toy", 0.5)
        out.mkdir(parents=True)
        for name in (ENGINE, WEIGHTS):
            shutil.move(lowered.folder / name, out / f"toy.{name}")
        return CompiledModel(f"toy.{ENGINE}", 5)


def test_a_backend_registered_from_outside_builds(
    draftless: Recipe, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMPILERS, "toy", CompilerSpec(f"{__name__}:ToyCompiler", ("fp32",)))
    recipe = replace(draftless, engine=replace(draftless.engine, backend="toy"))
    stages: list[str] = []
    build(recipe, out, lambda stage, done: stages.append(stage))
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    model = manifest["target"]
    assert (model["backend"], model["engine"], model["weight_bytes"]) == (
        "toy", f"target/toy.{ENGINE}", 5,
    )  # fmt: skip
    assert stages[1:] == [
        "lower target", "check target", "compile target", "target: toy", "write manifest",
    ]  # fmt: skip
    assert sorted(p.name for p in (out / "target").iterdir()) == [
        f"toy.{WEIGHTS}", f"toy.{ENGINE}",
    ]  # fmt: skip
