"""Models lowered for a backend as a build lowers them, and held to the graphs they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from specrt_export.check.equivalence import TOLERANCES, check_engine, max_width
from specrt_export.compile.compiler import Compiler, GraphSource, LoweredModel
from specrt_export.lint import Finding, lint
from specrt_export.lower.lazy_tensor import ENGINE
from specrt_export.lower.tensorrt_lowering import mark_decomposable
from specrt_export.portable.graph import GraphRun
from specrt_export.quantize.quantizer import quantize
from specrt_export.recipe.compiler_spec import COMPILERS
from specrt_export.recipe.recipe import Recipe
from specrt_export.recipe.recipe_tables import (
    EngineOptions,
    ModelSource,
    QualityOptions,
    TensorRtOptions,
)

MAX_LENGTH = 128
WIDTHS = (1, 2, 5)
NEW, OLD = "11.0", "10.3"
"""Versions of TensorRT that have attention and caches of their own, and that have neither."""
DIFFERS = "differs from the portable graph by"
GRAPHS = ("engine", "encoder", "cross")
"""Of a model; the last two of an encoder-decoder."""


@dataclass(frozen=True)
class Lowering:
    """What a model is lowered for."""

    backend: str
    precision: str = "fp32"
    batch: int = 1
    version: str = NEW
    """Of TensorRT."""
    error: float = 1e-5
    """The largest there may be, as a part of the spread of the logits."""
    grouped_queries: bool = False
    kv_lengths: tuple[int, ...] = ()

    def recipe(self, **options: Any) -> Recipe:
        """Return a recipe of a pair, as it is after reading."""
        engine = EngineOptions(
            **{"max_length": MAX_LENGTH, "gammas": (1, 4), "batch": self.batch,
               "backend": self.backend, "precision": self.precision, **options}
        )  # fmt: skip
        lengths = tuple(length for length in self.kv_lengths if length < engine.max_length)
        tensorrt = TensorRtOptions(
            candidates=16, version=self.version, grouped_queries=self.grouped_queries,
            kv_lengths=lengths,
        )  # fmt: skip
        source = ModelSource("target")
        parts = engine, QualityOptions(), tensorrt
        return Recipe(Path("recipe.toml"), "x", source, source, False, *parts)

    def compiler(self, library: Any = None, role: str = "draft", **options: Any) -> Compiler:
        """Return the compiler of a model; graphs are lowered without TensorRT's library."""
        module, _, name = COMPILERS[self.backend].compiler.partition(":")
        kind = getattr(import_module(module), name)
        given = [library or object()] if name == "TensorRtCompiler" else []
        compiler: Compiler = kind(self.recipe(**options).models[role], *given)
        return compiler


LOWERINGS = {
    "cpu": Lowering("ort-cpu"),
    "cpu-int8": Lowering("ort-cpu", "int8"),
    "cpu-int4": Lowering("ort-cpu", "int4"),
    "cpu-rows": Lowering("ort-cpu", batch=3),
    "cuda-fp16": Lowering("ort-cuda", "fp16", error=TOLERANCES["fp16"]),
    "cuda-bf16": Lowering("ort-cuda", "bf16", error=TOLERANCES["bf16"]),
    "tensorrt": Lowering("tensorrt"),
    "tensorrt-old": Lowering("tensorrt", version=OLD),
    "tensorrt-attention": Lowering("tensorrt", grouped_queries=True, kv_lengths=(16, 40)),
    "tensorrt-attention-rows": Lowering(
        "tensorrt", batch=3, grouped_queries=True, kv_lengths=(16, 40)
    ),
    "tensorrt-old-rows": Lowering("tensorrt", batch=3, version=OLD),
}


@dataclass(frozen=True)
class Case:
    """A model that was lowered, and the graph that it must be equal to."""

    source: GraphSource
    lowered: LoweredModel
    compiler: Compiler

    @property
    def model(self) -> onnx.ModelProto:
        """The lowered graph."""
        return onnx.load(self.lowered.folder / ENGINE, load_external_data=False)

    def save(self, model: onnx.ModelProto) -> None:
        """Put another graph in its place."""
        (self.lowered.folder / ENGINE).write_bytes(model.SerializeToString())

    def error(self, widths: Sequence[int] = WIDTHS) -> float:
        """Compare it with its graph at some widths; return the largest error."""
        length = self.compiler.model.engine.max_length  # type: ignore[attr-defined]
        widest = max_width(self.lowered.geometry, length, widths)
        reference = GraphRun(self.source.graph, self.source.weights)
        with self.compiler.score(self.lowered, widest, exact=True) as engine:
            return check_engine(reference, engine, widths, self.lowered.compute, "lowered")


def lowered(
    graph: Path, weights: Path, out: Path, lowering: Lowering, role: str = "draft", **options: Any
) -> Case:
    """Quantize and lower a model into a new folder."""
    compiler = lowering.compiler(role=role, **options)
    source = GraphSource(graph, weights)
    precision = lowering.recipe(**options).models[role].precision
    if precision.rewrites:
        stored = quantize(graph, weights, out / "stored", precision)
        source = GraphSource(stored.graph, stored.folder)
    return Case(source, compiler.lower(source, out / "lowered"), compiler)


def findings(folder: Path, version: tuple[int, int] = (11, 0)) -> list[Finding]:
    """Return what TensorRT has against the lowered graphs of a model, but that they are slow."""
    found = []
    for path in (folder / f"{name}.onnx" for name in GRAPHS):
        if path.exists():
            graph = onnx.load(path, load_external_data=False)
            mark_decomposable(graph)
            found += [one for one in lint(graph, version, folder) if one.severity != "slow"]
    return found


def spoil(graph: Path, name: str) -> None:
    """Let a graph leave something else under a name."""
    model = onnx.load(graph, load_external_data=False)
    for node in model.graph.node:
        node.output[:] = ["right" if one == name else one for one in node.output]
    one = np.array(1, np.int64 if name == "argmax" else np.float32)
    model.graph.initializer.append(numpy_helper.from_array(one, "one.more"))
    model.graph.node.append(helper.make_node("Add", ["right", "one.more"], [name]))
    graph.write_bytes(model.SerializeToString())
