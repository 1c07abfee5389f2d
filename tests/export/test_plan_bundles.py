"""Bundles of plans, from a recipe to the command line, on a machine without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from specrt.bundle import Bundle
from specrt.cli import run
from specrt.cli.inspect import memory
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, EngineRecord, read_engine_record
from specrt.engine.tensorrt.library import is_installed, open_library
from specrt.errors import BuildError, EngineError
from specrt.system.gpu import survey
from specrt_export.compile import tensorrt_compiler as plan
from specrt_export.compile.compiler import LoweredModel
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.recipe.recipe import Recipe
from support.builds import build, is_fresh

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, so nothing is built")
no_gpu = pytest.mark.skipif(not survey().problem, reason="this machine has a GPU")


def record(bundle: Path, role: str = "target") -> EngineRecord:
    return read_engine_record(bundle / role / FILE_NAME)


def nothing_left(out: Path) -> bool:
    return not out.exists() and (not out.parent.exists() or not list(out.parent.iterdir()))


def test_a_bundle_of_two_plans(pair: Path) -> None:
    manifest = Bundle.open(pair).manifest
    library = open_library("tensorrt-rtx")
    assert manifest.draft is not None
    assert manifest.versions["tensorrt-rtx"] == library.version
    for role, model in (("target", manifest.target), ("draft", manifest.draft)):
        assert manifest.backend_of(model) == "tensorrt-rtx"
        assert (model.precision, model.per_row, model.kv_item_bytes) == ("fp16", False, 2)
        assert (model.engine, model.quality) == (f"{role}/{PLAN}", None)
        made = record(pair, role)
        assert manifest.files[f"{role}/{PLAN}"].sha256 == made.sha256
        assert made.plan_bytes == (pair / role / PLAN).stat().st_size
        assert model.weight_bytes == made.weight_bytes > 0
        assert (made.version, made.form, made.candidates) == (library.version, "native", 64)
    assert [p.name for p in record(pair).profiles] == ["prefill", "decode", "verify 1", "verify 3"]
    assert [p.name for p in record(pair, "draft").profiles] == ["prefill", "decode", "catch-up"]


def stage(line: str) -> str:
    """Return the stage that a line of progress names."""
    return re.sub(r"^build pair: +\d+% (.*) \(\d+ s\)$", r"\1", line)


@no_gpu
def test_an_older_version_gets_the_simpler_form(
    write_pair: Callable[..., Path], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a build says each stage where there is no terminal, and that nothing was tuned."""
    recipe = write_pair("[tensorrt]", 'version = "10.3"', "candidates = 0", gammas="[]\ngamma = 0")
    text = re.sub(r"\[draft\][^[]*", "", recipe.read_text("utf-8"))
    recipe.write_text(text, "utf-8")
    assert run(["build", str(recipe), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert "not tuned here (" in said
    stages = list(dict.fromkeys(stage(line) for line in said.splitlines()))
    wanted = [
        "lower target", "target: parse", "target: profile prefill (1 of 2)",
        "target: profile decode (2 of 2)", "target: plan built",
    ]  # fmt: skip
    assert [stage for stage in stages if stage in wanted] == wanted
    assert (record(out).form, record(out).candidates) == ("decomposed", 0)
    assert [p.name for p in record(out).profiles] == ["prefill", "decode"]
    manifest = Bundle.open(out).manifest
    assert (manifest.draft, manifest.gammas) == (None, (0,))
    assert memory(out, manifest)["kv_bytes"] == 2 * manifest.kv_bytes(), "one set is read"


def test_passes_that_read_a_part_of_the_kv_buffers(
    read_pair: Callable[..., Recipe], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = read_pair("[tensorrt]", "kv_lengths = [32]", "grouped_queries = true", gammas="[1]")
    build(asked, out)
    length = asked.engine.max_length
    for role in ("target", "draft"):
        assert record(out, role).kv_lengths == (32, length)
        assert record(out, role).messages == ()
        # A single key head: as one group its queries would have no attention kernel.
        assert {one.attention for one in record(out, role).compiled} == {"gemm"}
    assert run(["inspect", str(out)]) == 0
    said = capsys.readouterr().out
    for words in ("prefix 2/2", "profile decode of 32 ", f"decode of {length} "):
        assert words in said
    assert not is_fresh(read_pair("[tensorrt]", "kv_lengths = [32]", gammas="[1]"), out)
    old = replace(asked.tensorrt, version="10.3")
    with pytest.raises(BuildError, match=r"kv_lengths is .* write whole KV buffers"):
        build(replace(asked, tensorrt=old), out)


def test_a_build_that_may_lack_memory_warns_and_goes_on(
    read_pair: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "available_bytes", lambda: 1 << 10)
    stages: list[str] = []
    recipe = replace(read_pair(gammas="[1]"), draft=None)
    build(recipe, out, lambda stage, done: stages.append(stage))
    (warning,) = (stage for stage in stages if stage.startswith("warning: "))
    assert "KV buffers of 128 positions" in warning
    assert "lower max_length" in warning
    assert Bundle.open(out)


def test_the_gate_measures_the_graph_that_the_plan_is_made_of(
    read_pair: Callable[..., Recipe], calibrated: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any plan is built."""

    def never(*given: Any, **named: Any) -> Any:
        raise AssertionError("too late")

    monkeypatch.setattr(plan, "build_plan", never)
    limited = read_pair(calibrated, "max_kl = 0.01", precision='"int8"')
    recipe = replace(limited, draft=None)
    with pytest.raises(AssertionError, match="too late"):
        build(recipe, out)  # within the limit: on to the plan
    lower = plan.TensorRtCompiler.lower

    def spoil(*given: Any) -> LoweredModel:
        made = lower(*given)
        graph = onnx.load(made.folder / ENGINE, load_external_data=False)
        for node in graph.graph.node:
            for attribute in node.attribute:
                if (node.op_type, attribute.name) == ("Attention", "scale"):
                    attribute.f *= 3
        (made.folder / ENGINE).write_bytes(graph.SerializeToString())
        return made

    monkeypatch.setattr(plan.TensorRtCompiler, "lower", spoil)
    with pytest.raises(BuildError, match="differs from the portable graph"):
        build(recipe, out)
    monkeypatch.setattr("specrt_export.check.measured_model.check_engine", lambda *given: 0.0)
    with pytest.raises(BuildError, match=r"further from its checkpoint .* allows.* max_kl 0\.01"):
        build(recipe, out)
    assert nothing_left(out)


@pytest.mark.skipif(is_installed("tensorrt"), reason="TensorRT is installed")
def test_a_library_that_is_missing_is_named(
    write_pair: Callable[..., Path], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build", str(write_pair()), "--backend", "tensorrt", "--out", str(out)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("specrt: backend tensorrt needs TensorRT, which is not installed")
    assert nothing_left(out)


def test_what_a_library_does_not_offer_is_refused_before_any_work(
    read_pair: Callable[..., Recipe], out: Path
) -> None:
    """Whichever of the models is to be a plan."""
    recipe = read_pair("[tensorrt]", 'capabilities = ["9.0"]')
    mixed = replace(recipe, target=replace(recipe.target, backend="ort-cpu"))
    stages: list[str] = []
    with pytest.raises((BuildError, EngineError), match=r"capability '9\.0'; it knows"):
        build(mixed, out, lambda stage, done: stages.append(stage))
    assert stages == []
    assert nothing_left(out)
