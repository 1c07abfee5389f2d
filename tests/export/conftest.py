"""A small pair to build from: codelet's draft, as both models, in a folder a test may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shared import locked, shared_folder
from specrt_export.recipe.recipe import Recipe, read_recipe
from support.builds import build

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

PLANS = """
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
def built(small: Path, out: Path, engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the small recipe, in `out`; built once for all workers."""
    shared = shared_folder(tmp_path_factory) / "small-bundle"
    with locked(shared.with_suffix(".lock")):
        if not shared.exists():
            build(read_recipe(small), shared)
    return Path(shutil.copytree(shared, out))


@pytest.fixture
def draftless(small: Path) -> Recipe:
    """The recipe of a target alone."""
    recipe = read_recipe(small)
    return replace(recipe, draft=None, engine=replace(recipe.engine, gamma=0))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where bundles go."""
    return tmp_path / "bundles" / "small"


@pytest.fixture
def write_pair(tmp_path: Path, engines: Path) -> Callable[..., Path]:
    """Write the recipe of a pair, both codelet's draft, with changes and more lines."""

    def written(*lines: str, **changes: str) -> Path:
        text = PLANS.format(codelet=engines / "codelet")
        for key, value in changes.items():
            start = text.index(f"{key} = ")
            text = text[:start] + f"{key} = {value}" + text[text.index("\n", start) :]
        path = tmp_path / "recipe.toml"
        path.write_text("\n".join([text, *lines, ""]), encoding="utf-8")
        return path

    return written


@pytest.fixture
def read_pair(write_pair: Callable[..., Path]) -> Callable[..., Recipe]:
    return lambda *lines, **changes: read_recipe(write_pair(*lines, **changes))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Path:
    """Two plans: the bundle of the recipe as it is, next to the recipe."""
    folder = shared_folder(tmp_path_factory) / "pair-of-plans"
    folder.mkdir(exist_ok=True)
    path, bundle = folder / "recipe.toml", folder / "bundle"
    with locked(folder / "lock"):
        if not bundle.exists():
            path.write_text(PLANS.format(codelet=engines / "codelet"), encoding="utf-8")
            build(read_recipe(path), bundle)
    return bundle


@pytest.fixture
def text(tmp_path: Path, engines: Path) -> Path:
    """A calibration text, about as short as one may be, where the small recipe is."""
    path = tmp_path / "small" / "text.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = (engines / "codelet" / "calibration.jsonl").read_text("utf-8").splitlines()
    path.write_text(lines[0] + "\n", "utf-8")
    return path


@pytest.fixture
def calibrated(text: Path) -> str:
    return f'[quality]\ncalibration = "{text}"'
