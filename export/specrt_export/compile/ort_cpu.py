"""Compile a portable graph for ONNX Runtime on a CPU: lower, optimise, write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrt.geometry import Geometry
from specrt_export.compile.engine_file import ENGINE as ENGINE
from specrt_export.compile.engine_file import WEIGHTS, write_engine
from specrt_export.compile.weightless import optimise
from specrt_export.lower.ort import Target, lower
from specrt_export.lower.stored import stored_weights
from specrt_export.portable import (
    MODEL_TYPE,
    check_length,
    facts_of,
    geometry_of,
    read_graph,
)

BATCH = 1
"""Rows of an engine, unless more are asked for."""


@dataclass(frozen=True)
class CompiledModel:
    """A saved engine, and what is known about it."""

    geometry: Geometry
    model_type: str
    parameters: int
    weight_bytes: int
    fused: dict[str, str]
    """Per rewrite, how many places it took of how many there are, as `"8/8"`."""


def compile_ort_cpu(
    graph: Path,
    checkpoint: Path,
    out: Path,
    max_length: int,
    *,
    batch: int = BATCH,
    accuracy_level: int = 4,
    confidence: bool = False,
) -> CompiledModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    Weights are read, changed and written a slice at a time, never all at once.
    Raises: BuildError, CheckpointError, ExportError for what is no portable graph.
    """
    portable = read_graph(graph)
    geometry = geometry_of(portable)
    check_length(geometry, max_length, checkpoint)
    weights = stored_weights(portable, checkpoint)
    target = Target(geometry, max_length, batch, accuracy_level, confidence)
    lowered = lower(portable, weights, target)
    out.mkdir(parents=True, exist_ok=True)
    write_engine(optimise(lowered.model, lowered.weights, out), lowered.weights, out)
    return CompiledModel(
        geometry=geometry,
        model_type=facts_of(portable).get(MODEL_TYPE, "unknown"),
        parameters=sum(w.items for w in weights.values()),
        weight_bytes=(out / WEIGHTS).stat().st_size,
        fused=lowered.fused,
    )
