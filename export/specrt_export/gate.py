"""The gate a quantized model passes: measured on a text, held to the recipe's limits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from specrt.engine import open_engine
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt.manifest import Quality
from specrt_export.compile.halved import on_cpu
from specrt_export.compile.lowered_engine import lowered_engine
from specrt_export.compile.ort_cpu import ENGINE, compile_ort_cpu
from specrt_export.portable import GraphRun, Tokens, runs_here
from specrt_export.problems import TENSORRT
from specrt_export.quality import EngineScorer, GraphScorer, Scorer, measure
from specrt_export.quantize.quantize import Quantized
from specrt_export.quantize.sensitivity import sensitivities
from specrt_export.recipe import EngineOptions, QualityOptions

_NAMED = 3
"""Parts named when a limit is exceeded."""


@dataclass(frozen=True)
class Source:
    """A portable graph, and the folder of its weights."""

    graph: Path
    weights: Path


@dataclass(frozen=True)
class Gate:
    """Holds compiled engines to the checkpoints they were made from."""

    options: EngineOptions
    limits: QualityOptions
    pieces: Sequence[Tokens]
    """The calibration text; pieces of it are scored one by one."""

    def hold(
        self, role: str, original: Source, quantized: Quantized, engine: Path, geometry: Geometry,
        backend: str,
    ) -> Quality:  # fmt: skip
        """Return how far the engine in a folder is from the model it was made from.

        Raises: BuildError beyond a limit, naming the parts of the model that hurt most.
        """
        with (
            self._reference(original, engine) as reference,
            self._engine(engine, geometry, backend) as made,
        ):
            quality = measure(reference, made, self.pieces)
        if not isfinite(quality.kl):
            raise BuildError(
                f"the quantized {role} returns no numbers on the calibration text. This is a "
                "defect of the lowering: please report the architecture"
            )
        exceeded = self._exceeded(quality)
        if exceeded:
            raise BuildError(
                f"the quantized {role} is further from its checkpoint than the recipe allows: "
                f"{exceeded}. {self._parts(original, quantized)}Give it more bits "
                f"({role}.precision, {role}.embedding, {role}.head, a smaller {role}.block), or "
                "change the limits in [quality]"
            )
        return quality

    def _exceeded(self, quality: Quality) -> str:
        most, least = self.limits.max_kl, self.limits.min_top1
        found = []
        if most is not None and quality.kl > most:
            found.append(f"KL divergence {quality.kl:.4f} nats, max_kl {most}")
        if least is not None and quality.top1 < least:
            found.append(f"top-1 agreement {quality.top1:.4f}, min_top1 {least}")
        return "; ".join(found)

    def _parts(self, original: Source, quantized: Quantized) -> str:
        if not runs_here():
            return ""
        found = sensitivities(original.graph, original.weights, quantized, self.pieces[0])
        worst = ", ".join(f"{one.part} ({one.kl:.4f})" for one in found[:_NAMED])
        return f"Quantized alone, these hurt most, in nats: {worst}. "

    @contextmanager
    def _reference(self, original: Source, beside: Path) -> Iterator[Scorer]:
        """Give the unquantized model: its portable graph, or an engine where that cannot run."""
        if runs_here():
            run = GraphRun(original.graph, original.weights)
            yield GraphScorer(run, max(map(len, self.pieces)))
            return
        with tempfile.TemporaryDirectory(dir=beside.parent) as folder:
            whole = Path(folder) / "engine"
            compiled = compile_ort_cpu(
                original.graph, original.weights, whole, self.options.max_length,
                batch=self.options.batch,
            )  # fmt: skip
            with self._engine(whole, compiled.geometry, "ort-cpu") as scorer:
                yield scorer

    @contextmanager
    def _engine(self, folder: Path, geometry: Geometry, backend: str) -> Iterator[EngineScorer]:
        if backend == "ort-cuda":  # scored without a GPU
            widest = max(map(len, self.pieces))
            with on_cpu(folder, geometry, self.options.max_length, widest) as halved:
                yield EngineScorer(halved)
            return
        if backend in TENSORRT:  # the graph that the plan will be made of
            options = self.options
            with lowered_engine(
                folder, geometry, batch=options.batch, max_length=options.max_length
            ) as lowered:
                yield EngineScorer(lowered)
            return
        engine = open_engine(
            backend,
            folder / ENGINE,
            geometry,
            batch=self.options.batch,
            max_length=self.options.max_length,
            max_width=max(map(len, self.pieces)),
            threads=len(os.sched_getaffinity(0)),
        )
        try:
            yield EngineScorer(engine)
        finally:
            engine.close()
