"""Compiles a portable graph for ONNX Runtime on a CPU: lower, optimise, write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from specrt.bundle import Geometry
from specrt.engine.backends import open_engine
from specrt.engine.ort import silent_options
from specrt.engine.protocol import Engine
from specrt.errors import BuildError, first_line
from specrt_export.compile import CompiledModel, GraphSource, LoweredModel, Progress
from specrt_export.lower.cpu_lowering import LAYOUT, lower_cpu
from specrt_export.lower.lazy_tensor import (
    ENGINE,
    INLINE_BYTES,
    WEIGHTS,
    LazyTensor,
    stored_weights,
    weight_bytes,
    write_engine,
)
from specrt_export.lower.ort_lowering import OrtTarget
from specrt_export.portable.external_data import disk_full, narrow, widen
from specrt_export.portable.graph import MODEL_TYPE, check_length, facts_of, geometry_of, read_graph
from specrt_export.precision import Precision
from specrt_export.recipe import EngineOptions, Recipe

BACKEND = "ort-cpu"


@dataclass(frozen=True)
class OrtCpuCompiler:
    """The compiler of `ort-cpu`; see `Compiler`."""

    recipe: Recipe
    backend: str

    def check(self, role: str, *, measured: bool) -> None:
        """Accept everything: what a recipe may ask of a CPU was checked when it was read."""

    def versions(self) -> dict[str, str]:
        """Return the version of ONNX Runtime, and the layout that the CPU kernels read."""
        return {"onnxruntime": ort.__version__, "kernels": LAYOUT}

    def lower(self, role: str, source: GraphSource, folder: Path) -> LoweredModel:
        """Write the engine itself: nothing is left to compile."""
        return compile_ort_cpu(
            source.graph,
            source.weights,
            folder,
            self.recipe.engine.max_length,
            role=role,
            batch=self.recipe.engine.batch,
            confidence=role == "draft",  # what stops a draft early; a target has no use for it
            precision=self.recipe.precisions[role],
        )

    @contextmanager
    def score(
        self, lowered: LoweredModel, max_width: int, *, exact: bool = False
    ) -> Iterator[Engine]:
        """Open the engine; an exact one multiplies with fp32 activations."""
        file, options = lowered.folder / ENGINE, self.recipe.engine
        with (
            exact_copy(file) if exact else nullcontext(file) as path,
            open_ort_cpu(path, lowered.geometry, options, max_width) as engine,
        ):
            yield engine

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Put the engine in its place."""
        return move_engine(lowered, out)


@contextmanager
def open_ort_cpu(
    path: Path, geometry: Geometry, options: EngineOptions, max_width: int
) -> Iterator[Engine]:
    """Open an engine with all cores, and close it."""
    engine = open_engine(
        BACKEND,
        path,
        geometry,
        batch=options.batch,
        max_length=options.max_length,
        max_width=max_width,
        threads=len(os.sched_getaffinity(0)),
    )
    try:
        yield engine
    finally:
        engine.close()


def move_engine(lowered: LoweredModel, out: Path) -> CompiledModel:
    """Move an engine that lowering wrote into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (ENGINE, WEIGHTS):
        shutil.move(lowered.folder / name, out / name)
    return CompiledModel(ENGINE, lowered.weight_bytes)


def compile_ort_cpu(
    graph: Path,
    checkpoint: Path,
    out: Path,
    max_length: int,
    *,
    role: str = "target",
    batch: int = 1,
    accuracy_level: int = 4,
    confidence: bool = False,
    precision: Precision | None = None,
) -> LoweredModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    Weights are read, changed and written a slice at a time, never all at once.
    Raises: BuildError, CheckpointError, ExportError for what is no portable graph.
    """
    portable = read_graph(graph)
    geometry = geometry_of(portable)
    check_length(geometry, max_length, checkpoint)
    target = OrtTarget(geometry, max_length, batch, accuracy_level, confidence)
    lowered = lower_cpu(portable, stored_weights(portable, checkpoint), target)
    out.mkdir(parents=True, exist_ok=True)
    model = optimise(lowered.model, lowered.weights, out)
    weights, size = lowered.weights, weight_bytes(model, lowered.weights)
    write_engine(model, weights, out)
    kind = facts_of(portable).get(MODEL_TYPE, "unknown")
    return LoweredModel(role, out, geometry, "fp32", kind, lowered.fused, size)


_OPTIMISED = "optimised.onnx"


def optimise(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], folder: Path
) -> onnx.ModelProto:
    """Return a graph as ONNX Runtime optimises it; weights are inputs meanwhile.

    What a fusion of its own would have to know of a weight, a rewrite of ours has done before.
    Raises: BuildError when the library refuses the graph.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    placeholders = [t for t in model.graph.initializer if t.name in weights]
    inline = [t for t in model.graph.initializer if t.name not in weights]
    del bare.graph.initializer[:]
    bare.graph.initializer.extend(inline)
    bare.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in placeholders
    )
    optimised = onnx.load(_optimise(bare, folder))
    (folder / _OPTIMISED).unlink()
    return _restored(optimised, {t.name: t for t in placeholders})


def _optimise(model: onnx.ModelProto, folder: Path) -> Path:
    options = silent_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / _OPTIMISED)
    try:
        ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # the library raises its own pybind types
        reason = first_line(error)
        if "serialization failed" in reason:  # said of a full disk
            raise disk_full(folder / _OPTIMISED) from error
        raise BuildError(f"ONNX Runtime {ort.__version__} could not compile: {reason}") from error
    return folder / _OPTIMISED


def _restored(
    model: onnx.ModelProto, placeholders: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto:
    inputs = [i for i in model.graph.input if i.name not in placeholders]
    read = {name for node in model.graph.node for name in node.input}
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(t for name, t in placeholders.items() if name in read)
    return model


_TYPES = {"bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}


def store_half(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], precision: Precision
) -> dict[str, LazyTensor]:
    """Store weights as fp16 or bf16 where a precision says so; return the weights to write.

        w (fp32) ── Op      =>      w (bf16) ── Cast ── Op

    The CPU computes in fp32. Quantizing rounded these weights already, so a weight that comes back
    from the smaller type bit for bit is stored in it, and folding the cast when the engine is
    opened gives the same engine. What does not, such as a table of angles, stays fp32.
    """
    kinds = [kind for kind in _TYPES if kind in precision.names]
    stored = dict(weights)
    chosen: dict[str, str] = {}
    for tensor in model.graph.initializer if kinds else ():
        weight = weights.get(tensor.name)
        if weight is None or weight.onnx_type != TensorProto.FLOAT or weight.nbytes <= INLINE_BYTES:
            continue
        if weight.identity not in chosen:  # a table may be there in two shapes
            chosen[weight.identity] = _smallest(weight, kinds)
        if chosen[weight.identity]:
            stored[tensor.name] = _half(weight, chosen[weight.identity])
            tensor.data_type = stored[tensor.name].onnx_type
    _add_casts(model)
    return stored


def _smallest(weight: LazyTensor, kinds: Sequence[str]) -> str:
    """Return the first of some types that holds a weight bit for bit; empty where none does."""
    left = list(kinds)
    for _, part in weight.slices():
        bits = part.view(np.uint32)
        left = [
            kind
            for kind in left
            if (widen(narrow(part, kind), _TYPES[kind]).view(np.uint32) == bits).all()
        ]
    return left[0] if left else ""


def _half(weight: LazyTensor, kind: str) -> LazyTensor:
    return replace(
        weight, onnx_type=_TYPES[kind], rows=lambda low, high: narrow(weight.rows(low, high), kind)
    )


def _add_casts(model: onnx.ModelProto) -> None:
    """Widen what is stored as fp16 or bf16 before anything reads it."""
    casts = [
        helper.make_node("Cast", [name], [f"{name}/Cast"], f"{name}/Cast", to=TensorProto.FLOAT)
        for tensor in model.graph.initializer
        if tensor.data_type in _TYPES.values() and (name := tensor.name)
    ]
    renamed = {cast.input[0]: cast.output[0] for cast in casts}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])


_FP32 = 1
"""MatMulNBits' `accuracy_level` of sums and activations in fp32; 4 has int8 activations."""


@contextmanager
def exact_copy(engine: Path) -> Iterator[Path]:
    """Give a copy of an engine that computes products of quantized weights in fp32.

    The copy reads the engine's own weights, and is gone afterwards.
    """
    model = onnx.load(engine, load_external_data=False)
    levels = [a for node in model.graph.node for a in node.attribute if a.name == "exact"]
    if not levels:
        yield engine
        return
    for level in levels:
        level.i = _FP32
    copy = engine.with_name("exact.onnx")
    copy.write_bytes(model.SerializeToString())
    try:
        yield copy
    finally:
        copy.unlink()
