"""Engines of each backend, compared with the portable graphs that they were made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specrt.engine.protocol import Engine
from specrt_export.check.equivalence import check_engine, max_width
from specrt_export.compile import Compiler, LoweredModel
from specrt_export.compile.ort_cpu_compiler import OrtCpuCompiler
from specrt_export.compile.ort_cuda_compiler import OrtCudaCompiler
from specrt_export.compile.tensorrt_compiler import TensorRtCompiler
from specrt_export.portable.graph import GraphRun
from specrt_export.recipe import EngineOptions, ModelSource, QualityOptions, Recipe, TensorRtOptions

Source = tuple[Path, Path]
"""A portable graph, and the folder of its weights."""


def recipe(max_length: int, *, tensorrt: TensorRtOptions | None = None, **said: object) -> Recipe:
    """A recipe of one model, as it is after reading; `said` are options of the engine."""
    options = EngineOptions(max_length=max_length, **said)  # type: ignore[arg-type]
    source, plan = ModelSource("target"), tensorrt or TensorRtOptions()
    return Recipe(Path("recipe.toml"), "x", source, None, options, QualityOptions(), plan)


def equal_on_cpu(
    source: Source, lowered: LoweredModel, max_length: int, widths: Sequence[int], batch: int = 1
) -> float:
    """Compare an ort-cpu engine with its graph; return the largest error."""
    compiler = OrtCpuCompiler(recipe(max_length, batch=batch), "ort-cpu")
    return _equal(compiler, source, lowered, max_length, widths)


def equal_halved(
    source: Source, lowered: LoweredModel, max_length: int, widths: Sequence[int]
) -> float:
    """Compare an ort-cuda engine, run on the CPU provider, with its graph."""
    compiler = OrtCudaCompiler(recipe(max_length), "ort-cuda")
    return _equal(compiler, source, lowered, max_length, widths)


def _equal(
    compiler: Compiler, source: Source, lowered: LoweredModel, max_length: int,
    widths: Sequence[int],
) -> float:  # fmt: skip
    widest = max_width(lowered.geometry, max_length, widths)
    with compiler.score(lowered, widest, exact=True) as engine:
        return check_engine(GraphRun(*source), engine, widths, lowered.compute, "compiled")


@contextmanager
def opened(lowered: LoweredModel, max_length: int, batch: int = 1) -> Iterator[Engine]:
    """Open a graph lowered for TensorRT."""
    library: Any = object()  # lowered graphs run without one
    compiler = TensorRtCompiler(recipe(max_length, batch=batch), "tensorrt", library)
    with compiler.score(lowered, max_length, exact=True) as engine:
        yield engine
