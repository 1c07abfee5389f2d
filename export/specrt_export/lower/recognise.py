"""Bring what models write in many ways into one, before a backend's own rewrites."""

from __future__ import annotations

import onnx

from specrt.geometry import Geometry
from specrt_export.lower.flatten import drop_reshapes, unfold_rows
from specrt_export.lower.fold import fold_values
from specrt_export.lower.layers import fold_query_scale
from specrt_export.lower.linear import find_projections
from specrt_export.lower.lowered import Counts
from specrt_export.lower.norm import fuse_rms_norm, lift_transposes
from specrt_export.lower.parts import split_heads, split_projections
from specrt_export.lower.rows import fuse_row_selection
from specrt_export.lower.view import GraphView


def fix_shapes(graph: onnx.GraphProto, geometry: Geometry, batch: int, max_length: int) -> None:
    """Fix the batch and the length of the KV buffers; the width stays free."""
    buffer = (batch, geometry.kv_heads, max_length, geometry.head_dim)
    for value in [*graph.input, *graph.output]:
        dims = value.type.tensor_type.shape.dim
        if value.name.removeprefix("present_").partition(".")[0] in ("key", "value"):
            for dim, size in zip(dims, buffer, strict=True):
                dim.dim_value = size
        elif value.name in ("input_ids", "start", "logits", "argmax"):
            dims[0].dim_value = batch


def recognise(view: GraphView, counts: Counts) -> None:
    """Find projections, norms, heads and scales, whatever they were exported as."""
    fold_values(view)
    counts["linear"] = find_projections(view)
    counts["rms_norm"] = fuse_rms_norm(view)
    fuse_row_selection(view)
    unfold_rows(view)
    drop_reshapes(view)
    split_projections(view)
    split_heads(view)
    lift_transposes(view)
    fold_query_scale(view)
