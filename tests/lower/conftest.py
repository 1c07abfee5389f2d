"""Plans that several tests look at, each built by whichever worker comes first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lower.plans import Model, Planned, make
from lower.test_tensorrt_builder_decoder import decoder, save
from shared import locked, shared_folder
from specrt.engine.tensorrt.engine_record import FILE_NAME
from specrt.engine.tensorrt.library import Library, open_library
from specrt_export.precision import Precision

Plans = Callable[..., Planned]


@pytest.fixture(scope="session")
def rtx() -> Library:
    """TensorRT for RTX, which builds without a GPU."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: nothing is built")
    return open_library("tensorrt-rtx")


@pytest.fixture(scope="session")
def library(rtx: Library) -> Library:
    """The same, for tests of the builder."""
    return rtx


@pytest.fixture(scope="session")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random decoder, as lowering would leave it."""
    return save(decoder(), tmp_path_factory.mktemp("graph"))


@pytest.fixture(scope="session")
def model(engines: Path, request: pytest.FixtureRequest) -> Callable[[str], Model]:
    """Find a model: codelet's `target` and `draft`, or an architecture of the zoo as a target."""

    def find(name: str) -> Model:
        pair = engines / "codelet"
        if name in ("target", "draft"):
            return Model(pair / "portable" / f"{name}.onnx", pair / "checkpoint" / name, name)
        exported = request.getfixturevalue("exported")(name)
        return Model(exported.graph.path, exported.checkpoint.folder, "target")

    return find


@pytest.fixture(scope="session")
def plans(
    tmp_path_factory: pytest.TempPathFactory, rtx: Library, model: Callable[[str], Model]
) -> Plans:
    """Build the plan of a model in a precision, once."""
    root = shared_folder(tmp_path_factory) / "plans"
    root.mkdir(exist_ok=True)

    def built(name: str, precision: str, block: int = 0, version: str = "") -> Planned:
        folder = root / "-".join((name, precision, str(block), version or "native"))
        with locked(folder.with_suffix(".lock")):
            if not (folder / FILE_NAME).is_file():
                stored = Precision.of(precision, block=block, per_row=True)
                return make(model(name), stored, folder, rtx, version)
        return Planned(folder, model(name).geometry)

    return built
