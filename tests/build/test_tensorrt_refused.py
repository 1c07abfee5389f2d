"""What is refused on the way to bundles of plans, and on a machine that cannot run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrt.cli import run
from specrt.engine.tensorrt.library import is_installed
from specrt.errors import BuildError, EngineError, RecipeError
from specrt.system import survey
from specrt_export.builder import ModelBuilder, build
from specrt_export.compile import tensorrt_compiler as plan
from specrt_export.recipe import Recipe, read_recipe

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed, so nothing is built")
no_gpu = pytest.mark.skipif(not survey().problem, reason="this machine has a GPU")

WRONG_TABLES = [
    ("candidatez = 5", r"tensorrt has an unknown key 'candidatez'; did you mean 'candidates'"),
    ('version = "abc"', r"tensorrt.version is 'abc'; expected one such as '10.3'"),
    ('version = "9.9"', r"tensorrt.version is '9.9'; .* TensorRT 10.3 and later"),
    ("candidates = 5000", r"tensorrt.candidates is 5000; expected 0 to 3840"),
    ("candidates = -1", r"tensorrt.candidates is -1; expected a whole number from 0"),
    ('capabilities = "8.9"', r"tensorrt.capabilities is '8.9'; expected a list"),
    ("optimization_level = true", r"tensorrt.optimization_level is True; expected a whole"),
]

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


def never(*given: Any) -> Any:
    raise AssertionError("too late")


def nothing_left(out: Path) -> bool:
    return not out.exists() and (not out.parent.exists() or not list(out.parent.iterdir()))


@pytest.mark.skipif(is_installed("tensorrt"), reason="TensorRT is installed")
def test_a_library_that_is_missing_is_named(
    write_pair: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / "bundle"
    for more in ([], ["--if-stale"]):
        said = ["build", str(write_pair()), "--backend", "tensorrt", "--out", str(out), *more]
        assert run(said) == 2
        told = capsys.readouterr().err.splitlines()
        assert told[0] == "build pair: read checkpoints"
        assert told[1].startswith("specrt: backend tensorrt needs TensorRT, which is not installed")
        assert "JetPack" in told[1]
        assert "backend tensorrt-rtx would use it" in told[1]
        assert len(told) == 2
        assert nothing_left(out)


@pytest.mark.parametrize(("line", "told"), WRONG_TABLES)
def test_a_wrong_table_is_refused_when_it_is_read(
    read_pair: Callable[..., Recipe], line: str, told: str
) -> None:
    with pytest.raises(RecipeError, match=told) as refused:
        read_pair("[tensorrt]", line)
    assert "\n" not in str(refused.value)


def test_a_table_that_is_none_is_refused(write_pair: Callable[..., Path]) -> None:
    path = write_pair()
    path.write_text("tensorrt = 5\n" + path.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(RecipeError, match="tensorrt is 5; expected an object"):
        read_recipe(path)


@pytest.mark.parametrize(("line", "told"), NOT_OFFERED)
def test_what_a_library_does_not_offer_is_refused_before_any_work(
    read_pair: Callable[..., Recipe],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    told: str,
) -> None:
    """Whichever of the models is to be a plan."""
    monkeypatch.setattr(ModelBuilder, "build", never)
    recipe = read_pair("[tensorrt]", line)
    mixed = replace(recipe, target=replace(recipe.target, backend="ort-cpu"))
    for asked in (recipe, mixed):
        stages: list[str] = []
        with pytest.raises((BuildError, EngineError)) as refused:
            build(asked, out, lambda stage, done, stages=stages: stages.append(stage))
        assert told in str(refused.value)
        assert "\n" not in str(refused.value)
        assert stages == ["read checkpoints"]
        assert nothing_left(out)


def test_what_cannot_be_measured_is_refused_before_any_work(
    read_pair: Callable[..., Recipe], calibrated: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last ONNX Runtime for Python 3.10 runs graphs of the older form only."""
    monkeypatch.setattr(ModelBuilder, "build", never)
    monkeypatch.setattr(plan, "runs_here", lambda: False)
    with pytest.raises(BuildError, match=r"cannot run the graph .* quality\.calibration"):
        build(read_pair(calibrated, precision='"int8"'), out)
    for recipe in (read_pair(), read_pair(calibrated, "[tensorrt]", 'version = "10.3"')):
        with pytest.raises(AssertionError, match="too late"):
            build(recipe, out)


def test_options_of_a_backend_that_is_not_used_are_not_looked_at(
    read_pair: Callable[..., Recipe], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBuilder, "build", never)
    recipe = read_pair("[tensorrt]", "optimization_level = 3", backend='"ort-cpu"')
    with pytest.raises(AssertionError, match="too late"):
        build(recipe, out)


def test_a_prefill_narrower_than_a_verify_pass_is_refused(read_pair: Callable[..., Recipe]) -> None:
    with pytest.raises(RecipeError, match="expected 4 or more"):
        read_pair(prefill="3")


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
    assert "specrt build RECIPE --backend ort-cpu" in said.err
    assert said.err.count("\n") == 1
