"""Checkpoints that are named without a recipe, and the recipe that says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cli.conftest import Run
from specrt.errors import CheckpointError, RecipeError, SpecrtError
from specrt_export.recipe.pair import CheckpointPair
from specrt_export.recipe.recipe import Recipe, read_recipe

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096}

Model = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Makes folders that have nothing but a configuration, in the folder that a test runs in."""
    monkeypatch.chdir(tmp_path)

    def make(name: str, **config: Any) -> Path:
        path = Path(name)
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
        return path

    return make


def same(text: str, file: Path) -> Recipe:
    """Return the recipe of a text that was written to a file."""
    file.write_text(text, encoding="utf-8")
    return read_recipe(file)


@pytest.mark.parametrize("name", ["a\x7fb", "a\nb", "a\udce9b"])
def test_a_name_that_no_recipe_holds_is_refused(name: str, model: Model) -> None:
    model(name)
    with pytest.raises(SpecrtError, match=r"printable characters|is not UTF-8") as caught:
        CheckpointPair(name).recipe()
    assert "\n" not in str(caught.value)


def test_a_precision_is_for_the_checkpoints_of_floats(model: Model) -> None:
    model("floats")
    model("codes", quantization_config={"quant_method": "gptq"})

    def precisions(pair: CheckpointPair) -> list[str]:
        recipe, _ = pair.recipe()
        return [recipe.engine.precision, *(s.precision for s in recipe.sources.values())]

    assert precisions(CheckpointPair("codes", "floats", precision="bf16")) == ["", "", "bf16"]
    assert precisions(CheckpointPair("floats", "codes", precision="bf16")) == ["", "bf16", ""]
    assert precisions(CheckpointPair("floats", precision="bf16")) == ["bf16", ""]
    assert precisions(CheckpointPair("codes", precision="stored")) == ["stored", ""]
    with pytest.raises(SpecrtError, match=r"is 'fp16', and .*already: codes \(gptq, 4 bits\);"):
        CheckpointPair("codes", precision="fp16").recipe()
    model(
        "seen", model_type="gemma3", text_config={"model_type": "gemma3_text"},
        compression_config={
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}
        },
    )  # fmt: skip
    with pytest.raises(SpecrtError, match=r"already: seen \(compressed-tensors, 4 bits\);"):
        CheckpointPair("seen", precision="fp16").recipe()
    with pytest.raises(SpecrtError, match="--precision int4 needs --calibration F"):
        CheckpointPair("floats", precision="int4").recipe()


def test_activations_are_left_out_of_folders_that_quantize_them(model: Model) -> None:
    model("floats")
    model("codes", quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.raises(CheckpointError, match=r"draft: .*activation_scheme .* --weight-only"):
        CheckpointPair("floats", "codes").recipe()
    recipe, text = CheckpointPair("floats", "codes", weight_only=True).recipe()
    assert [source.weight_only for source in recipe.sources.values()] == [False, True]
    assert "weight_only = true\n" in text
    with pytest.raises(RecipeError, match="--weight-only is for folders of quantized weights"):
        CheckpointPair("floats", weight_only=True).recipe()


def test_a_checkpoint_that_is_not_there_is_named_with_its_role(model: Model) -> None:
    model("big")
    for pair, named in (
        (CheckpointPair("no/where/at/all"), "target: there is no folder no/where/at/all"),
        (CheckpointPair("big", "none.gguf"), "draft: none.gguf cannot be read"),
        (CheckpointPair("r.toml"), "target: "),
    ):
        Path("r.toml").touch()
        with pytest.raises(CheckpointError, match=named) as caught:
            pair.recipe()
        assert "\n" not in str(caught.value)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recipe, Path]]:
    """What was asked to be built; nothing is."""
    asked: list[tuple[Recipe, Path]] = []

    def build(plan: Recipe, place: Path, **_: object) -> list[str]:
        asked.append((plan, place))
        return []

    monkeypatch.setattr("specrt.cli.build.build_bundle", build)
    monkeypatch.setattr("specrt.doctor.missing_exporter", lambda: None)
    manifest = Mock(target=None, draft=None, acceptance=None)
    monkeypatch.setattr("specrt.cli.build.read_manifest", lambda place: manifest)
    return asked


def test_the_command_shows_or_writes_the_recipe_that_it_builds(
    cli: Run, built: list[tuple[Recipe, Path]], model: Model, tmp_path: Path
) -> None:
    model("big")
    model("small")
    words = ("build", "--target", "big", "--draft", "small", "--precision", "bf16")
    shown = cli(*words, "--out", "out/x")
    assert (shown.status, shown.err) == (0, "")
    written = cli(*words, "--write-recipe", "mine.toml", "--backend", "tensorrt")
    assert (written.status, written.err) == (0, "")
    (first, place), (second, other) = built
    assert (place, other) == (Path("out/x"), Path("engines/build/big-tensorrt"))
    text = shown.out[shown.out.index("#") :]
    assert replace(same(text, tmp_path / "s.toml"), path=first.path) == first
    assert read_recipe(Path("mine.toml")) == second
    again = cli(*words, "--write-recipe", "mine.toml", "--backend", "tensorrt")
    assert again.status == 0
    before = Path("mine.toml").read_bytes()
    assert (
        "mine.toml is there and says something else"
        in cli(*words, "--write-recipe", "mine.toml").refusal
    )
    assert Path("mine.toml").read_bytes() == before
    assert "--write-recipe" in cli(*words, "--write-recipe", "no/where.toml").refusal
    assert len(built) == 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "name a RECIPE, or a checkpoint with --target"),
        ("--draft small", "--draft belongs to --target"),
        ("r.toml --target big", "r.toml is a recipe, and --target"),
        ("big", "big is a checkpoint, no recipe; name it with --target"),
        ("--target=", "--target is ''; expected a name"),
        ("--target big --precision int3", "specrt: --precision is 'int3'; "),
        ("--target big --draft no/thing/here", "--draft: there is no folder no/thing/here"),
        ("--target big --max-length 1", "--max-length is 1; expected a whole number of 2 or more"),
        ("--target no/thing/here", "--target: there is no folder no/thing/here"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(
    line: str, says: str, cli: Run, built: list[tuple[Recipe, Path]], model: Model
) -> None:
    model("big")
    assert says in cli("build", *line.split()).refusal
    assert built == []
