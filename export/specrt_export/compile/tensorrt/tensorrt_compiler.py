"""Compile a portable graph for TensorRT: lower, check on the CPU, then build the plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnxruntime

from specrt.bundle import Geometry
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN
from specrt.engine.tensorrt.library import NATIVE, Library, parse_version
from specrt.errors import BuildError
from specrt.system import available_bytes
from specrt.system.gpu import survey
from specrt_export.compile.engine_file import ENGINE, WEIGHTS, write_engine
from specrt_export.compile.ort_cpu_compiler import CompiledModel
from specrt_export.compile.tensorrt.builder_config import PlanOptions, check_options
from specrt_export.compile.tensorrt.network import profiles
from specrt_export.compile.tensorrt.plan_builder import SUFFIX, build_plan
from specrt_export.lint import lint
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.tensorrt_lowering import (
    TensorRtTarget,
    form_of,
    lower_tensorrt,
    mark_decomposable,
)
from specrt_export.portable.graph import (
    MODEL_TYPE,
    check_length,
    facts_of,
    geometry_of,
    read_graph,
    runs_here,
)

CAPABLE = {"fp8": (8, 9), "bf16": (8, 0)}
"""The first compute capability that has a type."""

KV_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

Progress = Callable[[str, float], None]


def compute_type(precision: str) -> str:
    """Return what a plan computes in, from what the weights of its layers are stored as."""
    return precision if precision in KV_BYTES else "fp16"


@dataclass(frozen=True)
class LoweredModel:
    """A graph on its way to a plan: in standard operators, its weights beside it."""

    role: str
    folder: Path
    target: TensorRtTarget
    model_type: str
    fused: dict[str, str]


@dataclass(frozen=True)
class PlanCompiler:
    """Compiles the models of one recipe with one library."""

    library: Library
    options: PlanOptions
    version: str
    """Of the TensorRT that parses the graph; the library's own when empty."""
    max_length: int
    prefill: int
    gammas: Sequence[int]
    batch: int

    @property
    def parser(self) -> tuple[int, ...]:
        """The version of TensorRT that decides about the form."""
        if self.version:
            return parse_version(self.version)
        # TensorRT for RTX counts its own versions; its parser is that of TensorRT 11.
        return (11, 0) if self.library.native else self.library.number

    def check(self, precisions: Collection[str]) -> None:
        """Refuse settings that the library does not offer here; what takes long comes later.

        Raises: BuildError.
        """
        check_options(self.options, self.library, gpu=not survey().problem)
        for name, least in CAPABLE.items():
            lacking = [c for c in self.options.capabilities if parse_version(c)[:2] < least]
            if name in precisions and lacking:
                first = ".".join(map(str, least))
                raise BuildError(
                    f"capabilities holds {', '.join(lacking)}, and {name} needs {first} or later; "
                    "remove it, or take another precision"
                )

    def _capabilities(self, graph: onnx.ModelProto) -> tuple[str, ...]:
        """Return what to build for: where nothing was asked, all that has the types of a graph.

        TensorRT for RTX leaves others out by itself, but says in the plan that they are there.
        """
        if self.options.capabilities or not self.library.capabilities:
            return self.options.capabilities
        kinds = {t.data_type for t in graph.graph.initializer}
        if onnx.TensorProto.FLOAT8E4M3FN not in kinds:
            return ()
        known = self.library.capabilities
        return tuple(c for c in known if parse_version(c)[:2] >= CAPABLE["fp8"])

    def check_measurable(self) -> None:
        """Refuse to measure what the ONNX Runtime installed cannot run.

        Raises: BuildError.
        """
        if form_of(self.parser) == NATIVE and not runs_here():
            raise BuildError(
                f"onnxruntime {onnxruntime.__version__} cannot run the graph that the plan is made "
                "of, and quality.calibration asks for its quality; build with onnxruntime 1.25 or "
                "later, which needs Python 3.11 or later"
            )

    def lower(self, role: str, graph: Path, weights: Path, out: Path, compute: str) -> LoweredModel:
        """Write the lowered graph of a model into a folder.

        Raises: BuildError, CheckpointError, ExportError.
        """
        portable = read_graph(graph)
        geometry = geometry_of(portable)
        check_length(geometry, self.max_length, weights)
        self._check_room(geometry, compute)
        target = TensorRtTarget(
            geometry, self.max_length, self.batch, compute, form_of(self.parser),
            candidates=min(self.options.candidates, geometry.vocab_size),
            confidence=role == "draft",
        )  # fmt: skip
        made = lower_tensorrt(portable, stored_weights(portable, weights), target)
        out.mkdir(parents=True)
        write_engine(made.model, made.weights, out)
        kind = facts_of(portable).get(MODEL_TYPE, "unknown")
        return LoweredModel(role, out, target, kind, made.fused)

    def _check_room(self, geometry: Geometry, compute: str) -> None:
        """Refuse KV buffers that the check of the lowered graph has no memory for.

        It holds them twice: those a pass reads, and those it makes.
        """
        needed = 2 * geometry.kv_bytes(self.batch, self.max_length, KV_BYTES[compute])
        free = available_bytes()
        if runs_here() and free is not None and needed > free:
            raise BuildError(
                f"checking the lowered graph takes {needed >> 20} MiB for KV buffers of "
                f"{self.max_length} positions, and {free >> 20} MiB are free; lower max_length, or "
                "build on a machine with more memory"
            )

    def compile(
        self, lowered: LoweredModel, out: Path, previous: Path, progress: Progress
    ) -> CompiledModel:
        """Build the plan of a lowered graph, and write its record beside it.

        `previous` is where an older plan may have left its timing cache.
        Raises: BuildError; KeyboardInterrupt.
        """
        path = lowered.folder / ENGINE
        graph = onnx.load(path, load_external_data=False)
        mark_decomposable(graph)
        _check(graph, self.parser)
        path.write_bytes(graph.SerializeToString(deterministic=True))
        out.mkdir(parents=True, exist_ok=True)
        timing = (out / PLAN).with_suffix(SUFFIX)
        if (previous / timing.name).is_file():
            shutil.copyfile(previous / timing.name, timing)
        options = replace(
            self.options,
            candidates=lowered.target.candidates,
            capabilities=self._capabilities(graph),
        )
        report = build_plan(
            path, out / PLAN, self.library, profiles(lowered.role, self.prefill, self.gammas),
            options, progress, form=lowered.target.form, timing_cache=timing,
        )  # fmt: skip
        (out / FILE_NAME).write_text(report.record.to_json(), encoding="utf-8")
        if self.options.stripped:  # what the plan is filled from, on the device
            for name in (ENGINE, WEIGHTS):
                shutil.move(lowered.folder / name, out / name)
        return CompiledModel(
            geometry=lowered.target.geometry,
            model_type=lowered.model_type,
            parameters=0,
            weight_bytes=report.record.weight_bytes,
            fused=lowered.fused,
        )


def _check(graph: onnx.ModelProto, version: tuple[int, ...]) -> None:
    """Refuse a graph that TensorRT would refuse or misread.

    Raises: BuildError with the first reason and remedy.
    """
    major, minor = version[:2]
    found = [f for f in lint(graph, (major, minor)) if f.severity != "slow"]
    if found:
        one = found[0]
        more = f" ({len(found) - 1} more)" if len(found) > 1 else ""
        raise BuildError(
            f"TensorRT {major}.{minor} would not take the lowered graph: "
            f"{one.node}: {one.reason}; {one.remedy}{more}"
        )
