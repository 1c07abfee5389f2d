"""Bundles of plans, from a recipe to the command line, on a machine without a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from conftest import locked, shared_folder
from specrt.bundle import Bundle
from specrt.cli import run
from specrt.cuda import survey
from specrt.engines.tensorrt.library import is_installed, open_library
from specrt.engines.tensorrt.record import FILE_NAME, PLAN, EngineRecord, read_engine_record
from specrt.errors import BuildError, EngineError, RecipeError, SpecrtError
from specrt_export.build import build, is_fresh
from specrt_export.compile import plan
from specrt_export.compile.engine_file import ENGINE
from specrt_export.model import ModelBuilder
from specrt_export.recipe import Recipe, read_recipe

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, so nothing is built")
no_gpu = pytest.mark.skipif(not survey().problem, reason="this machine has a GPU")

PAIR = """
name = "pair"

[target]
checkpoint = "{codelet}/checkpoint/draft"
graph = "{codelet}/portable/draft.onnx"

[draft]
checkpoint = "{codelet}/checkpoint/draft"
graph = "{codelet}/portable/draft.onnx"

[engine]
backend = "tensorrt-rtx"
precision = "fp16"
max_length = 128
prefill = 32
gammas = [1, 3]
"""

WriteRecipe = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, engines: Path) -> WriteRecipe:
    """Write the recipe of a pair, both codelet's draft, with changes and more lines."""

    def written(*lines: str, **changes: str) -> Path:
        text = PAIR.format(codelet=engines / "codelet")
        for key, value in changes.items():
            start = text.index(f"{key} = ")
            text = text[:start] + f"{key} = {value}" + text[text.index("\n", start) :]
        path = tmp_path / "recipe.toml"
        path.write_text("\n".join([text, *lines, ""]), encoding="utf-8")
        return path

    return written


@pytest.fixture
def read(write: WriteRecipe) -> Callable[..., Recipe]:
    return lambda *lines, **changes: read_recipe(write(*lines, **changes))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Path:
    """The bundle of the recipe as it is, beside the recipe."""
    folder = shared_folder(tmp_path_factory) / "pair-of-plans"
    folder.mkdir(exist_ok=True)
    path, bundle = folder / "recipe.toml", folder / "bundle"
    with locked(folder / "lock"):
        if not bundle.exists():
            path.write_text(PAIR.format(codelet=engines / "codelet"), encoding="utf-8")
            build(read_recipe(path), bundle)
    return bundle


@pytest.fixture
def calibrated(engines: Path) -> str:
    return f'[quality]\ncalibration = "{engines / "codelet" / "calibration.jsonl"}"'


def record(bundle: Path, role: str = "target") -> EngineRecord:
    return read_engine_record(bundle / role / FILE_NAME)


def files(bundle: Path, role: str) -> list[str]:
    return sorted(path.name for path in (bundle / role).iterdir())


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
        assert files(pair, role) == [FILE_NAME, PLAN]
        made = record(pair, role)
        assert manifest.files[f"{role}/{PLAN}"].sha256 == made.sha256
        assert made.plan_bytes == (pair / role / PLAN).stat().st_size
        assert model.weight_bytes == made.weight_bytes > 0
        assert (made.version, made.form, made.candidates) == (library.version, "native", 64)
    assert [p.name for p in record(pair).profiles] == ["prefill", "decode", "verify 1", "verify 3"]
    assert [p.name for p in record(pair, "draft").profiles] == ["prefill", "decode", "catch-up"]
    assert manifest.host_bytes() == 0, "all of it is in the GPU's memory"


def test_a_bundle_is_stale_once_an_option_changes(
    pair: Path, read: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = pair.parent / "recipe.toml"
    assert is_fresh(read_recipe(recipe), pair)
    assert is_fresh(read(), pair), "wherever the recipe is"
    for line in ("candidates = 32", 'version = "10.3"', "weight_streaming = true"):
        assert not is_fresh(read("[tensorrt]", line), pair), line
    assert not is_fresh(read(precision='"bf16"'), pair)
    before = (pair / "manifest.json").stat().st_mtime_ns
    assert run(["build", str(recipe), "--out", str(pair), "--if-stale"]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert (pair / "manifest.json").stat().st_mtime_ns == before


def test_inspect_shows_the_plans(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(pair)]) == 0
    said = capsys.readouterr().out
    version = open_library("tensorrt-rtx").version
    for told in (
        f"tensorrt-rtx {version}", "native (KV buffers in place), fp16", "profile prefill",
        "width 1 to 32", "profile decode", "profile verify 3", "profile catch-up",
        "gemm attention", "candidates", "compute capabilities",
    ):  # fmt: skip
        assert told in said


@no_gpu
@pytest.mark.parametrize("verb", ["generate", "verify", "bench", "tune"])
def test_without_a_gpu_every_verb_says_so(
    pair: Path, code_prompts: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"generate": ["--prompt", "x"], "tune": []}.get(verb, ["--prompts", str(code_prompts)])
    assert run([verb, str(pair), *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("specrt: TensorRT for RTX")
    assert "runs on an NVIDIA GPU only" in said.err
    assert said.err.count("\n") == 1


@no_gpu
def test_a_build_notes_that_nothing_was_tuned(
    write: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says each stage once, where there is no terminal."""
    recipe, out = write(gammas="[1]"), tmp_path / "out" / "bundle"
    assert run(["build", str(recipe), "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "note: " in said.err
    assert "is not tuned: TensorRT for RTX" in said.err
    lines = said.err.splitlines()
    assert len(set(lines)) == len(lines)
    stages = [line.removeprefix("build pair: ") for line in lines]
    for role, last in (("target", "verify 1"), ("draft", "catch-up")):
        wanted = [
            f"lower {role}", f"{role}: parse", f"{role}: profile prefill (1 of 3)",
            f"{role}: profile decode (2 of 3)", f"{role}: profile {last} (3 of 3)",
            f"{role}: plan built",
        ]  # fmt: skip
        assert [stage for stage in stages if stage in wanted] == wanted
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]


@pytest.mark.skipif(is_installed("tensorrt"), reason="TensorRT is installed")
def test_a_library_that_is_missing_is_named(
    write: WriteRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "bundle"
    for more in ([], ["--if-stale"]):
        said = ["build", str(write()), "--backend", "tensorrt", "--out", str(out), *more]
        assert run(said) == 2
        told = capsys.readouterr().err.splitlines()
        assert told[0] == "build pair: read checkpoints"
        assert told[1].startswith("specrt: backend tensorrt needs TensorRT, which is not installed")
        assert "JetPack" in told[1]
        assert "backend tensorrt-rtx would use it" in told[1]
        assert len(told) == 2
        assert nothing_left(out)


def test_a_quantized_target_beside_a_draft_on_the_cpu(
    read: Callable[..., Recipe], engines: Path, calibrated: str, out: Path
) -> None:
    recipe = read(calibrated, gammas="[3]")
    folder = engines / "codelet"
    target = replace(
        recipe.target, checkpoint=str(folder / "checkpoint" / "target"), precision="int8",
        graph=str(folder / "portable" / "target.onnx"),
    )  # fmt: skip
    assert recipe.draft is not None
    draft = replace(recipe.draft, backend="ort-cpu", precision="fp32")
    build(replace(recipe, target=target, draft=draft), out)
    manifest = Bundle.open(out).manifest
    assert manifest.draft is not None
    made = manifest.target
    assert (made.precision, made.embedding, made.head) == ("int8", "int8", "int8")
    assert (made.per_row, made.block, made.kv_item_bytes) == (True, 0, 2)
    assert made.quality is not None
    assert 0 < made.quality.kl < 0.02
    assert 0.9 < made.quality.top1 < 1
    assert manifest.backend_of(manifest.draft) == "ort-cpu"
    assert (manifest.draft.per_row, manifest.draft.kv_item_bytes) == (False, 4)
    assert files(out, "target") == [FILE_NAME, PLAN]
    assert files(out, "draft") == ["engine.data", "engine.onnx"]
    kept = manifest.draft.geometry.kv_bytes(1, manifest.max_length, 4)
    assert manifest.host_bytes() == manifest.draft.weight_bytes + kept
    if survey().problem:
        assert run(["generate", str(out), "--prompt", "x"]) == 2


def test_a_target_alone(read: Callable[..., Recipe], out: Path) -> None:
    build(replace(read(gammas="[]", prefill="16"), draft=None), out)
    manifest = Bundle.open(out).manifest
    assert manifest.draft is None
    assert manifest.gammas == (0,)
    assert [p.name for p in record(out).profiles] == ["prefill", "decode"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["target"]


def test_an_older_version_gets_the_simpler_form(read: Callable[..., Recipe], out: Path) -> None:
    recipe = read("[tensorrt]", 'version = "10.3"', "candidates = 0", gammas="[1]")
    build(replace(recipe, draft=None), out)
    assert (record(out).form, record(out).candidates) == ("decomposed", 0)


def spoiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lowered graphs attend otherwise, behind the back of what holds them."""
    lower = plan.PlanCompiler.lower

    def spoil(*given: Any) -> plan.LoweredModel:
        made = lower(*given)
        graph = onnx.load(made.folder / ENGINE, load_external_data=False)
        for node in graph.graph.node:
            for attribute in node.attribute:
                if (node.op_type, attribute.name) == ("Attention", "scale"):
                    attribute.f *= 3
        (made.folder / ENGINE).write_bytes(graph.SerializeToString())
        return made

    monkeypatch.setattr(plan.PlanCompiler, "lower", spoil)


def test_the_gate_measures_the_graph_the_plan_is_made_of(
    read: Callable[..., Recipe], calibrated: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(read(calibrated, "max_kl = 0.01", precision='"int8"'), draft=None)
    monkeypatch.setattr(ModelBuilder, "_plan", never)
    with pytest.raises(AssertionError, match="too late"):
        build(recipe, out)  # within the limit: on to the plan
    spoiled(monkeypatch)
    with pytest.raises(BuildError, match="further from its checkpoint than the recipe allows"):
        build(recipe, out)
    assert nothing_left(out)


def never(*given: Any) -> Any:
    raise AssertionError("too late")


def test_a_limit_stops_before_the_plan_is_built(
    read: Callable[..., Recipe], calibrated: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "build_plan", never)
    recipe = read(calibrated, "max_kl = 1e-9", precision='"int8"')
    with pytest.raises(BuildError, match="max_kl 1e-09"):
        build(recipe, out)
    assert nothing_left(out)


WRONG_TABLES = [
    ("candidatez = 5", r"unknown key tensorrt.candidatez; did you mean 'candidates'"),
    ('version = "abc"', r"tensorrt.version is 'abc'; expected one such as '10.3'"),
    ('version = "9.9"', r"tensorrt.version is '9.9'; .* TensorRT 10.3 and later"),
    ("candidates = 5000", r"tensorrt.candidates is 5000; expected 0 to 3840"),
    ("candidates = -1", r"tensorrt.candidates is -1; expected 0 to 3840"),
    ('capabilities = "8.9"', r"tensorrt.capabilities is '8.9'; expected a list of strings"),
    ("optimization_level = true", r"tensorrt.optimization_level is True; expected a whole"),
]


@pytest.mark.parametrize(("line", "told"), WRONG_TABLES)
def test_a_wrong_table_is_refused_when_it_is_read(
    read: Callable[..., Recipe], line: str, told: str
) -> None:
    with pytest.raises(RecipeError, match=told) as refused:
        read("[tensorrt]", line)
    assert "\n" not in str(refused.value)


def test_a_table_that_is_none_is_refused(write: WriteRecipe) -> None:
    path = write()
    path.write_text("tensorrt = 5\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(RecipeError, match=r"expected a table \[tensorrt\]"):
        read_recipe(path)


NOT_OFFERED = [
    ('capabilities = ["9.0"]', "builds no plans for compute capability '9.0'; it knows 7.5"),
    ("optimization_level = 3", "optimization_level has no effect on tensorrt-rtx"),
    ("optimization_level = 9", "optimization_level is 9; expected 0 to 5"),
    ("workspace_mib = 0", "workspace_mib is 0; expected 1 or more"),
    ("aux_streams = 65", "aux_streams is 65; expected 0 to 64"),
    ("version_compatible = true", "cannot make version_compatible plans"),
    ('hardware_compatible = "ampere+"', "has no hardware_compatible"),
    pytest.param("stripped = true", "on a machine without a GPU", marks=no_gpu),
]


@pytest.mark.parametrize(("line", "told"), NOT_OFFERED)
def test_what_a_library_does_not_offer_is_refused_before_any_work(
    read: Callable[..., Recipe],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    told: str,
) -> None:
    """Whichever of the models is to be a plan."""
    monkeypatch.setattr(ModelBuilder, "build", never)
    recipe = read("[tensorrt]", line)
    mixed = replace(recipe, target=replace(recipe.target, backend="ort-cpu"))
    for asked in (recipe, mixed):
        stages: list[str] = []
        with pytest.raises((BuildError, EngineError)) as refused:
            build(asked, out, lambda stage, done, stages=stages: stages.append(stage))
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)
        assert stages == ["read checkpoints"]
        assert nothing_left(out)


def test_options_of_a_backend_that_is_not_used_are_not_looked_at(
    read: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBuilder, "build", never)
    recipe = read("[tensorrt]", "optimization_level = 3", backend='"ort-cpu"')
    with pytest.raises(AssertionError, match="too late"):
        build(recipe, out)


def test_a_prefill_narrower_than_a_verify_pass_is_refused(read: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="expected 4 or more"):
        read(prefill="3")


def test_ctrl_c_leaves_no_bundle(write: WriteRecipe, tmp_path: Path) -> None:
    out = tmp_path / "out" / "bundle"
    script = "from specrt.cli import main; main()"
    command = [sys.executable, "-c", script, "build", str(write()), "--out", str(out), "--no-tune"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        seen = b""
        while b"target: profile" not in seen:
            got = os.read(process.stderr.fileno(), 4096)
            assert got, seen
            seen += got
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stdout == b""
    lines = (seen + stderr).decode().splitlines()
    assert lines[-2:] == ["build pair: target: stopping", "specrt: interrupted"]
    assert "Traceback" not in "".join(lines)
    assert nothing_left(out)


def test_a_build_that_fails_keeps_the_older_bundle(
    read: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(read(gammas="[1]"), draft=None)
    build(recipe, out)
    before = (out / "manifest.json").read_bytes()

    def fail(*given: Any, **named: Any) -> Any:
        raise BuildError("the library gave up")

    monkeypatch.setattr(plan, "build_plan", fail)
    with pytest.raises(SpecrtError, match="gave up"):
        build(recipe, out)
    assert (out / "manifest.json").read_bytes() == before
    assert is_fresh(recipe, out)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
