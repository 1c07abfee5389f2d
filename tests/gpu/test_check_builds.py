"""What is built on a machine without a GPU: bundles, grown targets, probes, rewritten graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpucheck import checks, codelet, experiments, models, probe, rewrites
from gpucheck.built import read_built
from gpucheck.lowered import lower
from gpucheck.place import Place, import_tools
from gpucheck.rough import roughen
from gpucheck.step import CheckError, NotRunError
from gpucheck.steps import GROWN

from specrt.bundle import Geometry
from specrt.engine.ort_cuda import OrtCudaEngine
from specrt.errors import BundleError

RTX = "tensorrt-rtx"


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="plans are built by tensorrt-rtx")


@pytest.mark.parametrize("name", ["filled", "grouped"])
def test_rewritten_graphs_compute_the_same(place: Place, name: str) -> None:
    found = experiments.held_on_cpu(place, experiments.VARIANTS[name])
    assert found["largest_relative_error"] < experiments.EXACT
    assert list(place.work.iterdir()) == []


def test_a_rewrite_that_changes_numbers_is_told(place: Place) -> None:
    def wrong(model: onnx.ModelProto, geometry: Geometry) -> None:
        rewrites.grouped(model, geometry)
        first = next(n for n in model.graph.node if n.op_type == "Attention")
        scale = next(a for a in first.attribute if a.name == "scale")
        scale.f *= 1.5

    with pytest.raises(CheckError, match="of the spread off on the CPU"):
        experiments.held_on_cpu(place, experiments.Variant("wrong", wrong))


def test_a_slice_that_is_too_short_is_told(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "EXTENTS", (64,))
    with pytest.raises(CheckError, match="of the spread off on the CPU"):
        experiments.held_on_cpu(place, experiments.VARIANTS["filled"])


def test_every_attention_is_rewritten(tmp_path: Path) -> None:
    for name, inputs in (("filled", ("Slice",) * 3), ("grouped", None)):
        rewrite = experiments.VARIANTS[name].rewrite
        lower(models.codelet_source("target"), tmp_path / name, rewrite=rewrite)
        graph = onnx.load(tmp_path / name / "engine.onnx", load_external_data=False).graph
        makers = {o: n.op_type for n in graph.node for o in n.output}
        attentions = [n for n in graph.node if n.op_type == "Attention"]
        assert len(attentions) == 8
        for node in attentions:
            made = tuple(makers[i] for i in node.input[1:4])
            assert made == (inputs or ("TensorScatter", "TensorScatter", "Concat"))
        caches = [o.name for o in graph.output if o.name.startswith("present_")]
        assert {makers[name] for name in caches} == {"TensorScatter"}


def test_both_plans_of_a_question_are_built(
    rtx: None, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = models.codelet_source("draft")
    monkeypatch.setattr(experiments, "held_on_cpu", lambda place, variant: {})
    monkeypatch.setattr(experiments, "source_of", lambda place, size: small)
    found = experiments.build(place, RTX, "grouped")
    widths = {f"width {width}" for width in experiments.WIDTHS}
    assert found["base"]["profiles"].keys() == found["grouped"]["profiles"].keys() == widths
    assert all(one["kernels"] > 0 for one in found["grouped"]["profiles"].values())
    cut = experiments.build(place, RTX, "filled")
    assert len(cut["filled"]["profiles"]) == len(experiments.EXTENTS) * len(widths)
    plan = place.work / f"codelet-base-{RTX}" / "engine.plan"
    before = plan.stat().st_mtime_ns
    experiments.build(place, RTX, "streams")
    assert plan.stat().st_mtime_ns == before, "what is there is not built again"
    assert not list(place.work.glob("*.lowered"))


def test_the_probe_writes_down_how_far_each_way_comes(rtx: None, place: Place) -> None:
    found = probe.probe(place, RTX, [probe.DEFAULT, "SM89", "NOSUCH"])
    assert found["default"]["build"]["ok"]
    assert "8.9" in found["SM89"]["build"]["capabilities"]
    assert found["NOSUCH"]["ended"].startswith("build: ")
    assert "NOSUCH" in found["NOSUCH"]["ended"]
    if not place.has_gpu:
        assert found["ways_that_run"] == []
        assert "no GPU" in found["default"]["validity"]["said"]
    assert {"CURRENT", "SM120", probe.DEFAULT} <= set(probe.ways(RTX))


def test_a_probe_that_crashes_is_written_down(
    rtx: None, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "check.py").write_text(
        "import os, sys, json\n"
        "open(sys.argv[4] + '/' + sys.argv[3] + '.jsonl', 'w').write("
        "json.dumps({'build': {'ok': True, 'said': ''}}) + '\\n')\n"
        "os.abort()\n"
    )
    monkeypatch.setattr(probe, "HERE", tmp_path)
    found = probe.probe(place, RTX, [probe.DEFAULT])
    assert found["default"]["build"]["ok"]
    assert not found["default"]["runs"]
    assert "ended with -6" in found["default"]["ended"]


class Opened:
    """An engine and a device that may be closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def staged(monkeypatch: pytest.MonkeyPatch, failing: str) -> dict[str, Any]:
    """Run the stages of a probe with everything in its place, one of them failing."""
    monkeypatch.setattr(probe, "why_not", lambda backend, found: "")

    def stage(name: str) -> Any:
        def run(*arguments: Any) -> dict[str, Any]:
            if name == "open":
                arguments[2].update(engine=Opened(), device=Opened())
            if name == failing:
                raise CheckError(f"{name} says no", {"code": 7})
            return {"stage": name}

        return run

    for name in ("build", "validity", "open", "pass", "numbers"):
        monkeypatch.setattr(probe, f"_{name}", stage(name))
    said: dict[str, Any] = {}
    probe.stages(RTX, "default", Path("nowhere"), said.__setitem__)
    return said


@pytest.mark.parametrize(
    ("failing", "reached"),
    [("", 5), ("build", 1), ("validity", 5), ("open", 3), ("pass", 4), ("numbers", 5)],
)
def test_the_stages_of_a_probe_end_with_the_first_that_fails(
    rtx: None, monkeypatch: pytest.MonkeyPatch, failing: str, reached: int
) -> None:
    said = staged(monkeypatch, failing)
    assert list(said) == list(probe.STAGES[:reached])
    wrong = [name for name, facts in said.items() if not facts["ok"]]
    assert len(wrong) == bool(failing)
    assert all(said[name]["code"] == 7 for name in wrong)


def test_codelet_is_built_as_a_bundle(place: Place) -> None:
    found = models.build_bundle(place, "ort-cuda")
    built = models.target_of(place, "ort-cuda", "codelet")
    assert (built.backend, built.max_length, built.precision) == ("ort-cuda", 2048, "fp16")
    assert found["target"]["read_bytes"] == built.read_bytes > 30_000_000
    with pytest.raises(NotRunError, match="build step comes first"):
        models.target_of(place, "ort-cuda", "1B")
    if not place.has_gpu:
        for check in (codelet.logits, codelet.engine, codelet.rounds, codelet.verify):
            with pytest.raises(NotRunError, match="no GPU"):
                check(place, "ort-cuda")


def test_what_is_asked_for_goes_into_the_recipe(
    rtx: None, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(models, "build", lambda recipe, out: asked.append(recipe))
    for backend in (RTX, "ort-cuda"):
        with pytest.raises(BundleError):  # nothing was built
            models.build_bundle(replace(place, capabilities=("8.9",)), backend)
    assert [recipe.engine.backend for recipe in asked] == [RTX, "ort-cuda"]
    assert [recipe.tensorrt.capabilities for recipe in asked] == [("8.9",), ()]
    assert asked[0].engine.gammas == place.gammas


def test_plans_of_a_grown_target_in_a_smaller_precision(
    rtx: None, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(models.codelet_source("draft"), role="target")
    monkeypatch.setattr(models, "source_of", lambda place, size: small)
    made = models.build_sized(replace(place, gammas=(4,)), RTX, "1B", "int8")
    built = read_built(models.sized(place, "1B", "int8", RTX))
    assert [p.name for p in built.record.profiles] == ["prefill", "decode", "verify 4"]
    assert made["read_bytes"] == built.read_bytes < 3 << 20
    assert built.precision == "int8"
    assert not [p for p in place.work.iterdir() if p.suffix in (".stored", ".lowered")]


@pytest.mark.export
def test_a_grown_target_still_says_what_codelet_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="grown checkpoints are exported")
    import_tools()
    from growth import shape

    grown = shape.Shape(384, 9, 6, 2, 64, 1024)
    monkeypatch.setitem(shape.PRESETS, "1B", grown)
    found = models.grow(place, "1B")
    assert found["shape"] == str(grown)
    assert found["roughened_bytes"] == 2 * 384 * (384 + 1024), "what one added layer writes"
    models.build_sized(place, "ort-cuda", "1B", "fp16")
    built = read_built(models.sized(place, "1B", "fp16", "ort-cuda"))
    engine = OrtCudaEngine(
        built.path, built.geometry, batch=1, max_length=built.max_length,
        max_width=built.max_width, device="cpu",
    )  # fmt: skip
    assert built.geometry.layers == 9
    assert checks.logits(engine, codelet.reference("target"), GROWN["fp16"])


def test_a_disk_that_is_too_small_is_no_failure(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="grown checkpoints are exported")
    usage = type("Usage", (), {"free": 10**9})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(NotRunError, match="GB of disk are needed"):
        models.grow(place, "8B")
    assert not (models.grown(place, "8B")).exists()


def test_a_pair_on_the_cpu_is_held_to_codelet_in_fp32(place: Place, generator: Any) -> None:
    asked = replace(place, prompts=2, tokens=16)
    found = codelet.beside_cpu(generator, asked, codelet.texts(asked))
    assert found["identical"] == 2
    assert found["unexplained"] == 0
    assert json.dumps(found)


def test_matrices_of_zeros_become_different_ones(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kept = rng.standard_normal((6, 8)).astype(np.float16)
    kept[0] = 0  # not all of it
    tensors: dict[str, Any] = {
        "a": np.zeros((6, 8), np.float16), "b": kept, "c": np.zeros((6, 8), np.float16),
        "norm": np.zeros(8, np.float16), "other": np.zeros((6, 8), np.float32),
    }  # fmt: skip
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        at = [len(data), len(data) + array.nbytes]
        dtype = "F16" if array.dtype == np.float16 else "F32"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": at}
        data += array.tobytes()
    text = json.dumps(header).encode()
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert roughen(tmp_path) == 2 * 96
    left = shard.read_bytes()[8 + len(text) :]
    for name, array in tensors.items():
        begin, end = header[name]["data_offsets"]
        found = np.frombuffer(left[begin:end], array.dtype).reshape(array.shape)
        if name in "ac":
            assert (np.abs(found) == np.float16(6e-8)).all()
            assert found.min() < 0 < found.max()
            tensors[name] = found
        else:
            np.testing.assert_array_equal(found, array)
    assert not np.array_equal(tensors["a"], tensors["c"])
