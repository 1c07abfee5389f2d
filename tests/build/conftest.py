"""A small pair to build from: codelet's draft, as both models, in a folder a test may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specrt_export.recipe import Recipe, read_recipe

RECIPE = """
name = "small"

[target]
checkpoint = "target"
graph = "target.onnx"

[draft]
checkpoint = "draft"
graph = "draft.onnx"

[engine]
max_length = 128
prefill = 64
gammas = [1, 3]
gamma = 3
"""

DRAFTLESS = """
[target]
checkpoint = "target"
graph = "target.onnx"

[engine]
max_length = 128
prefill = 64
gamma = 0
"""

WriteRecipe = Callable[[str], Path]


@pytest.fixture
def small(tmp_path: Path, engines: Path) -> Path:
    """A recipe with its checkpoints and graphs, all in one folder."""
    folder = tmp_path / "small"
    for role in ("target", "draft"):
        shutil.copytree(engines / "codelet" / "checkpoint" / "draft", folder / role)
        shutil.copyfile(engines / "codelet" / "portable" / "draft.onnx", folder / f"{role}.onnx")
    path = folder / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


@pytest.fixture
def draftless(small: Path) -> Recipe:
    """The recipe of a target alone."""
    small.write_text(DRAFTLESS, encoding="utf-8")
    return read_recipe(small)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where bundles go."""
    return tmp_path / "bundles" / "small"
