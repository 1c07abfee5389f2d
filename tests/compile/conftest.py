"""TensorRT for RTX, which builds without a GPU, and plans that are built once for all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from compile.plans import Planned, make
from lower.lowering import NEW, Case, Lowering, lowered
from portable.zoo import Exported
from shared import locked, shared_folder
from specrt.engine.tensorrt.engine_record import FILE_NAME
from specrt.engine.tensorrt.library import Library, open_library
from specrt_export.lower.tensorrt_lowering import mark_decomposable


@pytest.fixture(scope="session")
def library() -> Library:
    """TensorRT for RTX."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing is built")
    return open_library("tensorrt-rtx")


@pytest.fixture(scope="session")
def source(engines: Path, request: pytest.FixtureRequest) -> Callable[[str], tuple[Path, Path]]:
    """Find a graph and its weights: codelet's `target` and `draft`, or one of the zoo's."""

    def find(name: str) -> tuple[Path, Path]:
        pair = engines / "codelet"
        if name in ("target", "draft"):
            return pair / "portable" / f"{name}.onnx", pair / "checkpoint" / name
        exported: Exported = request.getfixturevalue("exported")(name)
        return exported.source

    return find


@pytest.fixture
def draft(source: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> Case:
    """Codelet's draft, lowered for TensorRT in a folder that a test may change."""
    case = lowered(*source("draft"), tmp_path / "draft", Lowering("tensorrt", "fp16"))
    model = case.model
    mark_decomposable(model)  # as a compiler does before TensorRT sees it
    case.save(model)
    return case


@pytest.fixture(scope="session")
def plans(
    tmp_path_factory: pytest.TempPathFactory,
    library: Library,
    source: Callable[[str], tuple[Path, Path]],
) -> Callable[..., Planned]:
    """Build the plan of a model in a precision, once."""
    root = shared_folder(tmp_path_factory) / "plans"
    root.mkdir(exist_ok=True)

    def built(name: str, precision: str, version: str = NEW) -> Planned:
        folder = root / "-".join((name, precision, version))
        role = "draft" if name == "draft" else "target"
        with locked(folder.with_suffix(".lock")):
            if not (folder / FILE_NAME).is_file():
                make(source(name), role, precision, folder, library, version)
        return Planned(folder, role)

    return built
