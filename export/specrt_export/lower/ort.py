"""Lower a portable graph to the operators that ONNX Runtime has fast CPU kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from specrt.geometry import Geometry
from specrt_export.lower.attention import fuse_attention
from specrt_export.lower.embedding import emit_embeddings
from specrt_export.lower.flatten import drop_reshapes, fix_reshapes
from specrt_export.lower.fold import fold_layouts
from specrt_export.lower.head import add_confidence, cheapen_argmax
from specrt_export.lower.join import gated, join_siblings
from specrt_export.lower.linear import emit_projections
from specrt_export.lower.lowered import Counts, Lowered
from specrt_export.lower.norm import fuse_skip_norm
from specrt_export.lower.opset import stamp_oldest_opset
from specrt_export.lower.pack import pack
from specrt_export.lower.recognise import fix_shapes, recognise
from specrt_export.lower.stored import Stored
from specrt_export.lower.view import GraphView


@dataclass(frozen=True)
class Target:
    """What an engine is to be."""

    geometry: Geometry
    max_length: int
    batch: int = 1
    accuracy_level: int = 4
    """How MatMulNBits reads activations: 4 as int8, 1 as fp32, 0 as the kernel likes."""
    confidence: bool = False
    """Whether the graph also tells the probability of the likeliest token."""


def lower(portable: onnx.ModelProto, weights: Mapping[str, Stored], target: Target) -> Lowered:
    """Rewrite a portable graph; no weight is read."""
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    fix_shapes(copy.graph, target.geometry, 1, target.max_length)
    view = GraphView(copy, weights)
    counts = Counts()
    recognise(view, counts)
    _fuse(view, target, counts)
    _emit(view, target, counts)
    if target.batch > 1:
        view.tidy()
        layers = pack(view, target.batch)
        counts["packed"] = layers, layers
    model = view.tidy()
    stamp_oldest_opset(model)
    return Lowered(model, view.weights(), counts.said)


def _fuse(view: GraphView, target: Target, counts: Counts) -> None:
    """Replace groups of operators by the one that does it all."""
    _attend(view, target, counts)
    pairs = gated(view)
    join_siblings(view)
    counts["gate_up"] = sum(view.maker(a) is view.maker(b) for a, b in pairs), len(pairs)
    counts["skip_norm"] = fuse_skip_norm(view)
    drop_reshapes(view)
    fix_reshapes(view)
    cheapen_argmax(view)
    if target.confidence:
        add_confidence(view)


def _attend(view: GraphView, target: Target, counts: Counts) -> None:
    layers = len(view.nodes("Attention"))
    turning = layers if view.nodes("Cos") else 0
    found = fuse_attention(view, target.geometry, target.max_length)
    counts["attention"], counts["rotary"] = (found.layers, layers), (found.rotated, turning)
    counts["qkv"] = found.joined, layers


def _emit(view: GraphView, target: Target, counts: Counts) -> None:
    """Say it in ONNX Runtime's operators."""
    projections = emit_projections(view, target.accuracy_level)
    embeddings = emit_embeddings(view)
    emitted, of = (a + b for a, b in zip(projections, embeddings, strict=True))
    counts["quantized"] = emitted, of
    fold_layouts(view)
