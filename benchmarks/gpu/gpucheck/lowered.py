"""Lower a portable graph and build its plan, with a rewrite in between where one is tried."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from gpucheck.built import Built
from gpucheck.place import MAX_LENGTH, PREFILL
from gpucheck.step import Facts, NotRunError
from specrt.bundle import Geometry
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN
from specrt.engine.tensorrt.library import NATIVE, open_library
from specrt.errors import BuildError
from specrt_export.compile.engine_file import ENGINE, WEIGHTS, write_engine
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.compile.tensorrt.builder_config import PlanOptions
from specrt_export.compile.tensorrt.network import profiles
from specrt_export.compile.tensorrt.plan_builder import build_plan
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.tensorrt_lowering import TensorRtTarget, lower_tensorrt, mark_decomposable
from specrt_export.portable.graph import geometry_of, read_graph

CANDIDATES = 64
Rewrite = Callable[[onnx.ModelProto, Geometry], None]


@dataclass(frozen=True)
class Source:
    """A portable graph, and the folder of its weights."""

    graph: Path
    weights: Path
    role: str = "target"

    @property
    def geometry(self) -> Geometry:
        """Its geometry."""
        return geometry_of(read_graph(self.graph))


def lower(
    source: Source, out: Path, *, compute: str = "fp16", form: str = NATIVE,
    max_length: int = MAX_LENGTH, rewrite: Rewrite | None = None,
) -> TensorRtTarget:  # fmt: skip
    """Write the lowered graph of a model and its weights into a new folder."""
    portable = read_graph(source.graph)
    geometry = geometry_of(portable)
    target = TensorRtTarget(
        geometry, max_length, 1, compute, form, min(CANDIDATES, geometry.vocab_size),
        source.role == "draft",
    )  # fmt: skip
    made = lower_tensorrt(portable, stored_weights(portable, source.weights), target)
    if rewrite is not None:
        rewrite(made.model, geometry)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_engine(made.model, made.weights, out)
    return target


def mark(folder: Path) -> Path:
    """Let TensorRT take attention apart where it has no kernel for it; return the graph."""
    path = folder / ENGINE
    graph = onnx.load(path, load_external_data=False)
    mark_decomposable(graph)
    path.write_bytes(graph.SerializeToString(deterministic=True))
    return path


def build_tensorrt(
    source: Source, out: Path, backend: str, *, gammas: Sequence[int], form: str = NATIVE,
    precision: str = "fp16", options: PlanOptions | None = None, aside: Path | None = None,
) -> Facts:  # fmt: skip
    """Build a plan that the runtime opens; nothing is held to a CPU here.

    The lowered graph lies in `aside` meanwhile, beside the plan when None.

    Raises: NotRunError where the machine has too little memory; BuildError.
    """
    library, began = open_library(backend), time.monotonic()
    lowered = (aside or out.parent) / f"{out.name}.lowered"
    target = lower(source, lowered, form=form)
    between = time.monotonic()
    wanted = replace(options or PlanOptions(), candidates=target.candidates)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        report = build_plan(
            mark(lowered), out / PLAN, library, profiles(source.role, PREFILL, gammas), wanted,
            lambda stage, done: None, form=form,
        )  # fmt: skip
    except BuildError as error:
        if str(error).startswith("building this plan takes"):
            raise NotRunError(str(error)) from error
        raise
    (out / FILE_NAME).write_text(report.record.to_json(), encoding="utf-8")
    read = (lowered / WEIGHTS).stat().st_size
    shutil.rmtree(lowered)
    Built(out / PLAN, backend, target.geometry, MAX_LENGTH, PREFILL, read, precision).write()
    record = report.record
    return {
        "lower_seconds": round(between - began, 1),
        "build_seconds": round(report.seconds, 1),
        "plan_bytes": record.plan_bytes,
        "weight_bytes": record.weight_bytes,
        "read_bytes": read,
        "capabilities": list(record.capabilities),
        "library": record.version,
        "profiles": {
            one.profile: {"kernels": one.launches, "attention": one.attention}
            for one in record.compiled
        },
    }


def build_ort_cuda(source: Source, out: Path, *, precision: str, captured: int) -> Facts:
    """Write an engine for ort-cuda; nothing is held to a CPU here."""
    began = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    made = compile_ort_cuda(
        source.graph, source.weights, out, MAX_LENGTH, captured=captured,
        confidence=source.role == "draft",
    )  # fmt: skip
    read = (out / WEIGHTS).stat().st_size
    Built(out / ENGINE, "ort-cuda", made.geometry, MAX_LENGTH, PREFILL, read, precision).write()
    return {"build_seconds": round(time.monotonic() - began, 1), "read_bytes": read}
