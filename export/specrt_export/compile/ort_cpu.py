"""Compile a portable graph for ONNX Runtime on a CPU: lower, fold, optimise, save."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort

from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.lower.attention import fuse_attention
from specrt_export.lower.norm import fuse_rms_norm
from specrt_export.lower.opset import stamp_oldest_opset
from specrt_export.lower.rows import fuse_row_selection
from specrt_export.lower.view import GraphView
from specrt_export.mapped import Weight, map_weights
from specrt_export.portable import MODEL_TYPE, facts_of, geometry_of, read_graph

ENGINE, WEIGHTS = "engine.onnx", "engine.data"
BATCH = 1
"""GroupQueryAttention on a CPU takes several tokens with a past at batch 1 only."""


@dataclass(frozen=True)
class CompiledModel:
    """A saved engine, and what is known about it."""

    geometry: Geometry
    model_type: str
    parameters: int
    weight_bytes: int
    fused: dict[str, str]


def compile_ort_cpu(graph: Path, checkpoint: Path, out: Path, max_length: int) -> CompiledModel:
    """Write `engine.onnx` and `engine.data` for a portable graph into a folder.

    Raises: BuildError, CheckpointError, ExportError for what is no portable graph.
    """
    portable = read_graph(graph)
    geometry = geometry_of(portable)
    if max_length > geometry.max_positions:
        raise BuildError(
            f"max_length {max_length} is more than the {geometry.max_positions} positions "
            f"{checkpoint} was trained for; lower `max_length` in the recipe"
        )
    weights = map_weights(portable, checkpoint)
    lowered, fused = lower(portable, geometry, max_length)
    out.mkdir(parents=True, exist_ok=True)
    _optimise(lowered, weights, out)
    return CompiledModel(
        geometry=geometry,
        model_type=facts_of(portable).get(MODEL_TYPE, "unknown"),
        parameters=sum(w.array.size for w in weights),
        weight_bytes=(out / WEIGHTS).stat().st_size,
        fused=fused,
    )


def lower(
    portable: onnx.ModelProto, geometry: Geometry, max_length: int
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Rewrite a portable graph into the operators ONNX Runtime has fast CPU kernels for.

    Returns the graph, with its weights still in the checkpoint, and per rewrite how many of how
    many places it took.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    view = GraphView(copy)
    attentions = len(view.nodes("Attention"))
    rotated = attentions if view.nodes("Cos") else 0
    norms = fuse_rms_norm(view)
    fuse_row_selection(view)
    attention, rotary = fuse_attention(view, geometry, max_length)
    _fix_shapes(view.graph, geometry, max_length)
    model = view.finish()
    stamp_oldest_opset(model)
    left = len(view.nodes("Reciprocal"))
    return model, {
        "attention": f"{attention}/{attentions}",
        "rotary": f"{rotary}/{rotated}",
        "rms_norm": f"{norms}/{norms + left}",
    }


def _quiet_options(level: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = level
    return options


def _fix_shapes(graph: onnx.GraphProto, geometry: Geometry, max_length: int) -> None:
    """Fix the batch and the length of the KV buffers; the width stays free."""
    for value in [*graph.input, *graph.output]:
        dims = value.type.tensor_type.shape.dim
        if value.name.removeprefix("present_").partition(".")[0] in ("key", "value"):
            for dim, size in zip(
                dims, (BATCH, geometry.kv_heads, max_length, geometry.head_dim), strict=True
            ):
                dim.dim_value = size
        elif value.name in ("input_ids", "start", "logits", "argmax"):
            dims[0].dim_value = BATCH


def _optimise(model: onnx.ModelProto, weights: list[Weight], out: Path) -> None:
    """Fold the weights' casts and transposes, fuse what is left, and save."""
    options = _quiet_options(ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED)
    options.optimized_model_filepath = str(out / ENGINE)
    key = "session.optimized_model_external_initializers"
    options.add_session_config_entry(f"{key}_file_name", WEIGHTS)
    options.add_session_config_entry(f"{key}_min_size_in_bytes", "1024")
    names = {t.name for t in model.graph.initializer}
    used = [w for w in weights if w.name in names]
    values = [ort.OrtValue.ortvalue_from_numpy_with_onnx_type(w.array, w.onnx_type) for w in used]
    options.add_external_initializers([w.name for w in used], values)
    try:
        ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception as error:  # the library raises its own pybind types
        reason = str(error).splitlines()[0]
        if "Failed to write" in reason:
            free = shutil.disk_usage(out).free >> 20
            raise BuildError(
                f"{out / WEIGHTS} could not be written, with {free} MiB free on its disk; free "
                "some, or build elsewhere with --out"
            ) from error
        raise BuildError(f"ONNX Runtime {ort.__version__} could not compile: {reason}") from error
    if not (out / WEIGHTS).exists():
        raise BuildError(f"ONNX Runtime {ort.__version__} wrote no weights to {out / WEIGHTS}")
