"""Build the engine of one model: quantize, compile, check, measure."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specrt.bundle import Geometry, ModelRecord, Quality
from specrt.engine.tensorrt.engine_record import PLAN
from specrt.engine.tensorrt.library import TENSORRT, open_library
from specrt.errors import BuildError
from specrt_export.check.equivalence import (
    check_engine,
    check_lowered,
    check_ort_cuda,
    lowered_engine,
)
from specrt_export.check.quality import GraphSource, QualityGate
from specrt_export.checkpoint import Checkpoint
from specrt_export.compile.engine_file import ENGINE
from specrt_export.compile.ort_cpu_compiler import CompiledModel, compile_ort_cpu, store_half
from specrt_export.compile.ort_cuda_compiler import KV_ITEM_BYTES as _CUDA_KV_BYTES
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda, compute_type
from specrt_export.compile.tensorrt import tensorrt_compiler as plan
from specrt_export.inputs import ModelInputs, check_graph
from specrt_export.portable.graph import GraphRun, external_tensors, read_graph, runs_here
from specrt_export.quantize.precision import Precision
from specrt_export.quantize.quantize import Quantized, quantize
from specrt_export.recipe import Recipe

_CPU_KV_BYTES = 4

Progress = Callable[[str, float], None]
"""Called with the stage that begins and the fraction of the work that is done."""


@dataclass(frozen=True)
class ModelBuilder:
    """Builds the models of one recipe, each into a folder of its role."""

    recipe: Recipe
    folder: Path
    gate: QualityGate | None
    """None without a calibration text."""
    previous: Path
    """Where an older bundle of the recipe may be."""

    def check(self) -> None:
        """Refuse, before any work, what a library would refuse after it.

        Raises: BuildError; EngineError where a library is missing.
        """
        for role in self.recipe.sources:
            if self.recipe.backend_of(role) in TENSORRT:
                compiler = self._compiler(role)
                try:
                    compiler.check(self.recipe.precisions[role].names)
                except BuildError as error:
                    raise BuildError(f"{self.recipe.path}: [tensorrt] {error}") from error
                if self.gate is not None and self.recipe.precisions[role].rewrites:
                    compiler.check_measurable()

    def build(self, model: ModelInputs, progress: Progress) -> ModelRecord:
        """Build an engine, hold it to the graph it came from, and measure what quantizing did.

        Raises: SpecrtError.
        """
        role = model.role
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            original = self._export(model, Path(scratch), progress)
            quantized = self._quantize(role, original, Path(scratch), progress)
            source = original
            if quantized is not None:
                source = GraphSource(quantized.graph, quantized.folder)
            if self.recipe.backend_of(role) in TENSORRT:
                lowered = self._lower(role, source, Path(scratch), progress)
                place, geometry = lowered.folder, lowered.target.geometry
                quality = self._measure(role, original, quantized, place, geometry, progress)
                compiled = self._plan(role, lowered, progress)
            else:
                compiled = self._compile(role, source, progress)
                place, geometry = self.folder / role, compiled.geometry
                quality = self._measure(role, original, quantized, place, geometry, progress)
            return self._record(role, original, compiled, quality)

    def _quantize(
        self, role: str, original: GraphSource, scratch: Path, progress: Progress
    ) -> Quantized | None:
        precision = self.recipe.precisions[role]
        if not precision.rewrites:
            return None
        progress(f"{'quantize' if precision.quantizes else 'narrow'} {role}", 0.2)
        return quantize(original.graph, original.weights, scratch / "quantized", precision)

    def _measure(
        self, role: str, original: GraphSource, quantized: Quantized | None, made: Path,
        geometry: Geometry, progress: Progress,
    ) -> Quality | None:  # fmt: skip
        """Say how far an engine, or the graph that it will be made of, is from its checkpoint."""
        if quantized is None or self.gate is None:
            return None
        progress(f"measure {role}", 0.5 if self.recipe.backend_of(role) in TENSORRT else 0.8)
        backend = self.recipe.backend_of(role)
        return self.gate.hold(role, original, quantized, made, geometry, backend)

    def _lower(
        self, role: str, source: GraphSource, scratch: Path, progress: Progress
    ) -> plan.LoweredModel:
        progress(f"lower {role}", 0.3)
        compute = plan.compute_type(self.recipe.precisions[role].layers)
        place = scratch / "lowered"
        compiler = self._compiler(role)
        lowered = compiler.lower(role, source.graph, source.weights, place, compute)
        if runs_here():
            widths = sorted({1, max(self.recipe.engine.gammas, default=0) + 1})
            target = lowered.target
            with lowered_engine(
                lowered.folder, target.geometry, batch=target.batch, max_length=target.max_length
            ) as engine:
                check_lowered(
                    GraphRun(source.graph, source.weights), engine, widths, compute,
                    compiler.library.backend,
                )  # fmt: skip
        return lowered

    def _plan(self, role: str, lowered: plan.LoweredModel, progress: Progress) -> CompiledModel:
        def part(stage: str, done: float) -> None:
            progress(f"{role}: {stage}", 0.6 + 0.4 * done)

        made, previous = self.folder / role, self.previous / role
        return self._compiler(role).compile(lowered, made, previous, part)

    def _compiler(self, role: str) -> plan.PlanCompiler:
        options, said = self.recipe.engine, self.recipe.tensorrt
        return plan.PlanCompiler(
            library=open_library(self.recipe.backend_of(role)),
            options=said.plan,
            version=said.version,
            max_length=options.max_length,
            prefill=options.prefill,
            gammas=options.gammas,
            batch=options.batch,
        )

    def _export(self, model: ModelInputs, scratch: Path, progress: Progress) -> GraphSource:
        """Return the portable graph the recipe names, or one made now."""
        graph, checkpoint = model.graph, model.checkpoint
        if graph is None:
            progress(f"export {model.role}", 0.0)
            graph = _export(checkpoint, scratch / f"{model.role}.onnx")
            check_graph(graph, checkpoint, self.recipe.engine.max_length)
        return GraphSource(graph, checkpoint.folder)

    def _compile(self, role: str, source: GraphSource, progress: Progress) -> CompiledModel:
        options, made = self.recipe.engine, self.folder / role
        progress(f"compile {role}", 0.3)
        if self.recipe.backend_of(role) == "ort-cuda":
            widest = max(options.gammas, default=0) + 1
            compiled = compile_ort_cuda(
                source.graph,
                source.weights,
                made,
                options.max_length,
                compute=compute_type(self.recipe.precisions[role].layers),
                captured=widest,  # every width up to the widest verify pass
                batch=options.batch,
                confidence=role == "draft",
            )
            check_ort_cuda(
                source.graph, source.weights, made, compiled.geometry, options.max_length,
                sorted({1, widest}),
            )  # fmt: skip
            return compiled
        compiled = compile_ort_cpu(
            source.graph,
            source.weights,
            made,
            options.max_length,
            batch=options.batch,
            confidence=role == "draft",  # what stops a draft early; a target has no use for it
        )
        store_half(made, self.recipe.precisions[role])
        progress(f"check {role}", 0.7)
        widths = sorted({1, max(options.gammas, default=0) + 1})
        check_engine(
            source.graph, source.weights, made, compiled.geometry, options.max_length, widths,
            options.batch,
        )  # fmt: skip
        return compiled

    def _record(
        self, role: str, original: GraphSource, compiled: CompiledModel, quality: Quality | None
    ) -> ModelRecord:
        precision, backend = self.recipe.precisions[role], self.recipe.backend_of(role)
        return ModelRecord(
            engine=f"{role}/{PLAN if backend in TENSORRT else ENGINE}",
            geometry=compiled.geometry,
            model_type=compiled.model_type,
            # Of the checkpoint: a quantized graph has scales besides, and may hold a table twice.
            parameters=sum(prod(t.dims) for t in external_tensors(read_graph(original.graph))),
            weight_bytes=compiled.weight_bytes,
            kv_item_bytes=_kv_bytes(backend, precision),
            fused=compiled.fused,
            precision=precision.layers,
            embedding=precision.embedding,
            head=precision.head,
            block=precision.block,
            per_row=precision.per_row,
            quality=quality,
            backend=backend,
        )


def _kv_bytes(backend: str, precision: Precision) -> int:
    if backend in TENSORRT:
        return plan.KV_BYTES[plan.compute_type(precision.layers)]
    return _CUDA_KV_BYTES if backend == "ort-cuda" else _CPU_KV_BYTES


def _export(checkpoint: Checkpoint, graph: Path) -> Path:
    try:
        from specrt_export.portable.exporter import export_graph
    except ImportError as error:
        raise BuildError(
            f"exporting a checkpoint needs {error.name}; install it with "
            '`pip install "specrt[export]"`, or name an exported `graph` in the recipe'
        ) from None
    return export_graph(checkpoint, graph).path
