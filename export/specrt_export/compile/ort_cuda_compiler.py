"""Compiles a portable graph for ONNX Runtime on an NVIDIA GPU; no GPU is needed to do so."""

from __future__ import annotations

from pathlib import Path

from onnx import helper

from specrt.bundle import Geometry
from specrt.engine.ort_cuda import CAPTURED
from specrt.errors import BuildError
from specrt_export.compile.engine_file import WEIGHTS, write_engine
from specrt_export.compile.ort_cpu_compiler import CompiledModel
from specrt_export.lower.half import TYPES, halve, keep_on_device
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.ort_lowering import OrtTarget, lower
from specrt_export.lower.view import GraphView, Lowered
from specrt_export.portable.graph import (
    MODEL_TYPE,
    check_length,
    facts_of,
    geometry_of,
    read_graph,
)

KV_ITEM_BYTES = 2

_HEAD_STEP, _WIDEST_HEAD = 8, 256


def compute_type(precision: str) -> str:
    """Return what an engine computes in, from what the weights of its layers are stored as.

    Whole numbers are multiplied with fp16 activations.
    """
    return "bf16" if precision == "bf16" else "fp16"


def compile_ort_cuda(
    graph: Path,
    checkpoint: Path,
    out: Path,
    max_length: int,
    *,
    compute: str = "fp16",
    captured: int = 1,
    batch: int = 1,
    confidence: bool = False,
) -> CompiledModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    Passes of up to `captured` tokens are run as CUDA graphs. Weights are read, narrowed and
    written a slice at a time.
    Raises: BuildError, CheckpointError, ExportError for what is no portable graph.
    """
    portable = read_graph(graph)
    geometry = geometry_of(portable)
    check_length(geometry, max_length, checkpoint)
    _check(geometry, batch, compute)
    weights = stored_weights(portable, checkpoint)
    target = OrtTarget(geometry, max_length, batch, confidence=confidence)
    lowered = lower(portable, weights, target)
    _check_fused(lowered)
    view = GraphView(lowered.model, lowered.weights)
    keep_on_device(view, max_length)
    halve(view, compute)
    model = view.tidy()
    helper.set_model_props(model, {**facts_of(model), CAPTURED: str(captured)})
    out.mkdir(parents=True, exist_ok=True)
    write_engine(model, view.weights(), out)
    return CompiledModel(
        geometry=geometry,
        model_type=facts_of(portable).get(MODEL_TYPE, "unknown"),
        parameters=sum(w.items for w in weights.values()),
        weight_bytes=(out / WEIGHTS).stat().st_size,
        fused=lowered.fused,
    )


def _check(geometry: Geometry, batch: int, compute: str) -> None:
    """Refuse what the CUDA kernels of ONNX Runtime do not take."""
    head = geometry.head_dim
    if compute not in TYPES:
        raise BuildError(f"compute type is {compute!r}; expected {' or '.join(TYPES)}")
    if batch != 1:
        raise BuildError(
            f"engine.batch is {batch}, and ort-cuda builds batch 1: its attention takes several "
            "tokens at once for one row only. Build with batch 1"
        )
    if head % _HEAD_STEP or head > _WIDEST_HEAD:
        raise BuildError(
            f"the model has heads of {head}, and ort-cuda needs multiples of {_HEAD_STEP} up to "
            f"{_WIDEST_HEAD}; build for ort-cpu"
        )


def _check_fused(lowered: Lowered) -> None:
    fused, layers = lowered.fused.get("attention", "0/0").split("/")
    if fused != layers:
        raise BuildError(
            f"{fused} of {layers} attention layers could be fused, and ort-cuda needs all of them; "
            "build for ort-cpu, and please report the architecture"
        )
