"""Plans of real models, made as a recipe makes them and kept for every test that asks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lower.comparing import recipe
from specrt.bundle import Geometry
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, EngineRecord, read_engine_record
from specrt.engine.tensorrt.library import Library
from specrt_export.compile import GraphSource
from specrt_export.compile.tensorrt_compiler import TensorRtCompiler
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.portable.graph import geometry_of, read_graph
from specrt_export.precision import Precision
from specrt_export.quantize import quantize
from specrt_export.recipe import TensorRtOptions

MAX_LENGTH, PREFILL, GAMMAS = 128, 32, (1, 4)
OLD = "10.3"


@dataclass(frozen=True)
class Model:
    """A portable graph, the folder of its weights, and what it is in a pair."""

    graph: Path
    weights: Path
    role: str

    @property
    def geometry(self) -> Geometry:
        return geometry_of(read_graph(self.graph))


@dataclass(frozen=True)
class Planned:
    """A plan with its record, and the graph it was made of."""

    folder: Path
    geometry: Geometry

    @property
    def record(self) -> EngineRecord:
        return read_engine_record(self.folder / FILE_NAME)

    @property
    def plan(self) -> Path:
        return self.folder / PLAN

    @property
    def graph(self) -> Path:
        return self.folder / "lowered" / ENGINE


def make(
    model: Model, precision: Precision, folder: Path, library: Library, version: str = ""
) -> Planned:
    """Quantize, lower and compile a model into a folder that is not there."""
    folder.mkdir(parents=True)
    graph, weights = model.graph, model.weights
    if precision.rewrites:
        stored = quantize(graph, weights, folder / "stored", precision)
        graph, weights = stored.graph, stored.folder
    one = recipe(
        MAX_LENGTH, tensorrt=TensorRtOptions(candidates=16, version=version),
        prefill=PREFILL, gammas=GAMMAS, precision=precision.layers,
    )  # fmt: skip
    pair = replace(one, draft=one.target)
    compiler = TensorRtCompiler(pair, library.backend, library)
    lowered = compiler.lower(model.role, GraphSource(graph, weights), folder / "lowered")
    compiler.compile(lowered, folder, folder / "previous", lambda stage, done: None)
    return Planned(folder, model.geometry)


@contextmanager
def parsed(library: Library, graph: Path) -> Iterator[Any]:
    """Parse a graph with the library itself; give the network."""
    module = library.module
    builder = module.Builder(library.logger)
    network = builder.create_network(0)
    parser = module.OnnxParser(network, library.logger)
    said = parser.parse_from_file(str(graph))
    errors = [parser.get_error(at).desc() for at in range(parser.num_errors)]
    assert said, errors
    assert not errors
    yield network


def layers(network: Any, kind: str) -> list[Any]:
    """Return the layers of a kind."""
    found = (network.get_layer(at) for at in range(network.num_layers))
    return [layer for layer in found if layer.type.name == kind]
