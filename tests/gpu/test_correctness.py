"""Each check passes on engines that work, and fails on those broken on purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_double import GpuDouble
from gpucheck import correctness, probe, speed
from gpucheck.evidence import CheckError, Evidence
from gpucheck.inventory import RTX
from gpucheck.settings import RunSettings
from gpucheck.workbench import Workbench, codelet_source

from specrt.engine.ort_cuda import OrtCudaEngine
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from support.tensorrt_double import double_of

Damage = Callable[[Any], None]


def wrong_scores(engine: Any) -> None:
    plan = double_of(engine)
    run = plan.run

    def broken(addresses: Any, width: int, rows: int) -> None:
        run(addresses, width, rows)
        logits = plan.array(addresses["logits"], np.float32, (1, rows, plan.geometry.vocab_size))
        logits += np.linspace(0, 1, plan.geometry.vocab_size, dtype=np.float32) * (width > 1)

    plan.run = broken  # type: ignore[method-assign]


def stale_keys(engine: Any) -> None:
    """The second token of a pass is not written where something was before."""
    plan = double_of(engine)
    update = plan.update

    def broken(at: Any, fed: Any, start: Any) -> Any:
        cache = plan.unpacked(plan.cache(at["key.0"]))[0, 0, :, 0]
        if fed.shape[1] > 1 and cache[start[0] + 1] > 0:
            fed[0, 1] = int(cache[start[0] + 1]) - 1
        return update(at, fed, start)

    plan.update = broken  # type: ignore[method-assign]


def written_elsewhere(engine: Any) -> None:
    """A pass behind another leaves one buffer as it was."""
    plan = double_of(engine)
    run = plan.run

    def broken(addresses: Any, width: int, rows: int) -> None:
        cache = plan.cache(addresses["value.1"])
        before = cache.copy()
        run(addresses, width, rows)
        if before.any():
            cache[:] = before

    plan.run = broken  # type: ignore[method-assign]


def foreign_alias(engine: Any) -> None:
    double_of(engine).aliases["present_key.1"] = "key.0"


def never_refuses(engine: Any) -> None:
    forward = engine.forward
    engine.forward = lambda tokens, start, rows=None: forward(
        tokens, min(max(start, 0), engine.max_length - np.shape(tokens)[1]), rows
    )


def not_capturable(engine: Any) -> None:
    double_of(engine).capturable = False


def replays_differ(engine: Any) -> None:
    if engine._captures:
        wrong_scores(engine)


def computes_nothing(engine: Any) -> None:
    double_of(engine).run = lambda addresses, width, rows: None  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("damage", "failing"),
    [
        (wrong_scores, "limit"), (stale_keys, "rollback"), (written_elsewhere, "in place"),
        (foreign_alias, "in place"), (never_refuses, "limit"), (not_capturable, "captures"),
        (replays_differ, "replays"), (computes_nothing, "replays"),
    ],
)  # fmt: skip
def test_a_broken_engine_fails_its_check_and_the_others_are_run(
    double: GpuDouble, damage: Damage, failing: str
) -> None:
    evidence = Evidence()
    double.damage = damage
    with pytest.raises(CheckError):
        correctness.engine(double, RTX, evidence)
    assert len(evidence.facts) == 6
    failed = {name for name, facts in evidence.facts.items() if not facts["passed"]}
    assert failing in failed
    assert all(evidence.facts[name]["reason"] for name in failed)


def test_graphs_are_counted_by_the_engine_or_not_known(double: GpuDouble) -> None:
    evidence = Evidence()
    correctness.engine(double, "ort-cuda", evidence)
    assert evidence.facts["captures"]["captured"] == "unknown"
    for counted, passes in ((3, True), (0, False)):

        def count(engine: Any, counted: int = counted) -> None:
            engine.statistics = type("Statistics", (), {"captured": counted})

        double.damage = count
        evidence = Evidence()
        with (
            contextlib.nullcontext() if passes else pytest.raises(CheckError, match="0 CUDA graphs")
        ):
            correctness.engine(double, "ort-cuda", evidence)
        assert evidence.facts["captures"]["captured"] == counted
        assert evidence.facts["captures"]["passed"] is passes


def test_rounds_and_forms_that_differ_are_failures(double: GpuDouble) -> None:
    def late(engine: Any) -> None:
        if engine.model.record.confidence:  # the draft
            singly = engine.forward
            engine.forward = lambda tokens, start, rows=None: singly(
                tokens, max(0, start - 1), rows
            )

    double.damage = late
    with pytest.raises(CheckError, match="a round drafted"):
        correctness.rounds(double, RTX, Evidence())

    def decomposed(engine: Any) -> None:
        if engine.model.record.form == "decomposed":
            wrong_scores(engine)

    double.damage = decomposed
    with pytest.raises(CheckError):
        correctness.forms(double, RTX, Evidence())


def test_text_that_parts_from_plain_decoding_is_a_failure(double: GpuDouble) -> None:
    def wrong(engine: Any) -> None:
        forward = engine.forward

        def broken(tokens: Any, start: Any, rows: int | None = None) -> Any:
            output = forward(tokens, start, rows)
            if np.shape(tokens)[1] in (2, 5):
                output.argmax[:] = (output.argmax + 1) % 256
                output.logits[:] = np.roll(output.logits, 1, -1)
            return output

        engine.forward = broken

    double.damage = wrong
    for step in (correctness.verify, lambda *a: speed.speed(*a, "1B", "fp16")):
        with pytest.raises(CheckError):
            step(double, "ort-cuda", Evidence())


def test_the_first_capability_that_works_is_used(double: GpuDouble) -> None:
    assert probe.ways(double.library(RTX), "8.9") == ["default", "CURRENT", "8.6", "12.0"]
    assert probe.ways(double.library(RTX), "12.0")[:2] == ["default", "12.0"]
    start = double.start_way

    def refuse_default(backend: str, way: str, out: Path) -> Any:
        double.damage = computes_nothing if way == "default" else lambda engine: None
        return start(backend, way, out)

    double.start_way = refuse_default  # type: ignore[method-assign]
    evidence = Evidence()
    probe.probe(double, RTX, evidence)
    assert evidence.facts["chosen"] == "CURRENT"
    assert evidence.facts["default"]["status"] == "failed"
    assert evidence.facts["default"]["pass"], "the stage before the one that failed"
    assert "8.6" not in evidence.facts


def test_a_plan_for_this_gpu_whatever_its_number_is(settings: RunSettings) -> None:
    """A recipe names numbers only, so the number of this GPU stands for the library's CURRENT."""
    pytest.importorskip("tensorrt_rtx", reason="the library has the names")
    from dataclasses import replace

    from specrt.system import Gpu, Survey
    from specrt_export.compile.network import capability_names

    class Hopper(Workbench):
        def survey(self) -> Survey:
            return Survey((Gpu(0, "H100", "9.0"),))

    bench = Hopper(replace(settings, capability="CURRENT"))
    module: Any = bench.library(RTX).module
    try:
        assert bench._capabilities() == ("9.0",)
        assert capability_names(("9.0",), module) == ["SM90"]
        assert module.ComputeCapability.SM90 == module.ComputeCapability.CURRENT
    finally:
        del module.ComputeCapability.SM90


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> OrtCudaEngine:
    """Codelet's draft for ort-cuda, opened on the CPU provider."""
    out, source = tmp_path_factory.mktemp("cpu"), codelet_source("draft")
    model = compile_ort_cuda(source.graph, source.weights, out, 128, captured=9)
    return OrtCudaEngine(
        out / "engine.onnx", model.geometry, batch=1, max_length=128, max_width=64, device="cpu"
    )


def test_fp16_passes_for_fp16_and_not_for_fp32(compiled: OrtCudaEngine) -> None:
    evidence, tolerances = Evidence(), correctness.TOLERANCES
    reference = Workbench().reference("draft")
    correctness.check_logits(compiled, reference, tolerances["fp16"], evidence)
    assert 0 < evidence.facts["largest_relative_error"] < tolerances["fp16"]
    with pytest.raises(CheckError):
        correctness.check_logits(compiled, reference, tolerances["fp32"], Evidence())


@pytest.mark.export
@pytest.mark.nightly
def test_a_grown_target_still_says_what_codelet_does(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="its graph is exported")
    from gpucheck.settings import add_source

    add_source()
    from growth import shape

    monkeypatch.setitem(shape.PRESETS, "1B", shape.Shape(384, 9, 6, 2, 64, 1024))
    bench, evidence = Workbench(settings), Evidence()
    bench.export_grown("1B", evidence)
    bench.grow("1B", evidence)
    assert evidence.facts["distinct_bytes"] == 2 * 384 * (384 + 1024), "what the new layer writes"
    bench.build_target("1B", "fp16", "ort-cuda", evidence)
    again = Evidence()
    bench.build_target("1B", "fp16", "ort-cuda", again)
    assert again.facts == {"reused": True}
    built = bench.target("1B", "fp16", "ort-cuda")
    engine = OrtCudaEngine(
        built.path, built.geometry, batch=1, max_length=2048, max_width=256, device="cpu"
    )
    tolerance = correctness.GROWN["fp16"]
    correctness.check_logits(engine, bench.reference("target"), tolerance, evidence)
