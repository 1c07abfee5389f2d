"""Lowers a portable graph to the operators that ONNX Runtime has fast kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from specrt.geometry import Geometry
from specrt_export.lower.attention import (
    FusedKernel,
    GroupQueryAttention,
    fuse_attention,
    widen_values,
)
from specrt_export.lower.canonical import (
    canonicalize,
    drop_reshapes,
    fix_reshapes,
    fix_shapes,
    fold_layouts,
    sink_transposes,
)
from specrt_export.lower.convolution import write_out_convolutions
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.logits import add_confidence, cheapen_argmax
from specrt_export.lower.norm import fuse_skip_norm
from specrt_export.lower.projections import (
    emit_embeddings,
    emit_projections,
    gated,
    join_siblings,
)
from specrt_export.lower.recurrence import write_out_recurrences
from specrt_export.lower.view import Counts, GraphView, Lowered, stamp_oldest_opset
from specrt_export.lower.window import Windows
from specrt_export.portable.graph import geometry_of


def pad_to_even(view: GraphView) -> None:
    """Let the tokens of a pass, and the rows that it scores, be even numbers.

    ```
    input_ids [1, S] ─ Pad ─ [1, S + S % 2]      rows [R] ─ Pad ─ [R + R % 2]
    logits [1, R + R % 2, V] ─ Slice ─ logits [1, R, V], and the same of argmax and confidence
    feature [1, S + S % 2, H] ─ Slice ─ feature [1, S, H]
    ```
    Products and GroupQueryAttention compute rows in pairs, and round a lone row otherwise. So a row
    has the same bits at every width. The key of a pad lies after the last token's, and is
    overwritten before it is read.
    """
    _pad(view, "input_ids", axis=1)
    _pad(view, "rows", axis=0)
    rows, tokens = view.add("Shape", ["rows"]), view.add("Shape", ["input_ids"], start=1, end=2)
    zero, one = (view.add_constant("row", np.array([i], np.int64)) for i in (0, 1))
    for output in view.graph.output:
        count = tokens if output.name == "feature" else rows
        if not output.name.startswith("present_"):
            view.add("Slice", [view.rename(output.name), zero, count, one], outputs=[output.name])


def _pad(view: GraphView, name: str, axis: int) -> None:
    """Let all readers of an input read it with a zero more where its length is odd."""
    padded = view.fresh(name)
    view.replace(name, padded)
    length = view.add("Shape", [name], start=axis, end=axis + 1)
    odd = view.add("Mod", [length, view.add_constant("pair", np.array([2], np.int64))])
    none = view.add_constant("none", np.zeros(2 * axis + 1, np.int64))
    view.add("Pad", [name, view.add("Concat", [none, odd], axis=0)], outputs=[padded])


@dataclass(frozen=True)
class OrtTarget:
    """What an engine is to be."""

    geometry: Geometry
    max_length: int
    batch: int = 1
    accuracy_level: int = 4
    """How MatMulNBits reads activations: 4 as int8, 1 as fp32, 0 as the kernel likes."""
    confidence: bool = False
    """Whether the graph also tells the probability of the likeliest token."""
    max_source: int = 0
    """Positions of the source that a decoder attends to; 0 of one that attends to none."""
    max_width: int = 0
    """Tokens of the widest pass; 0 where every buffer has all positions."""
    lag: int = 0
    """How many latest positions the states of recurrent layers lag, as a draft's must."""
    even: bool = False
    """Whether passes of ONNX Runtime's operators are padded; see `pad_to_even`."""

    @property
    def positions(self) -> int:
        """Positions of a KV buffer: one more where a pad may follow the last token."""
        return self.max_length + self.even


def lower(
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: OrtTarget
) -> Lowered:
    """Rewrite a portable graph, for one row; no weight is read.

    The target's values are `as_wide_as_keys`.
    """
    view, counts = canonical_view(portable, weights, target)
    remember(view, counts, target.geometry, 1, target.positions, 0)
    widen_values(view, geometry_of(portable))
    attend(view, target, GroupQueryAttention(view, target.geometry), counts)
    pairs = gated(view)
    fuse_the_rest(view, counts)
    cheapen_argmax(view)
    if target.confidence:
        add_confidence(view)
    counts["gate_up"] = sum(view.maker(g.gate) is view.maker(g.up) for g in pairs), len(pairs)
    projections = emit_projections(view, target.accuracy_level)
    lowered = finish(view, projections, emit_embeddings(view), counts)
    if target.even:
        pad_to_even(view)
        view.tidy()
        stamp_oldest_opset(view.model)
    return lowered


def canonical_view(
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: OrtTarget
) -> tuple[GraphView, Counts]:
    """Return a copy of a portable graph in the form that the rewrites know, and their counts."""
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    fix_shapes(copy.graph, target.geometry, 1, target.positions)
    view, counts = GraphView(copy, weights), Counts()
    canonicalize(view, counts)
    return view, counts


def remember(
    view: GraphView, counts: Counts, geometry: Geometry, batch: int, positions: int, max_width: int
) -> set[str]:
    """Write out short convolutions and recurrences; return values to be kept in fp32.

    No backend but the CPU kernels has an operator for them.
    """
    windows = Windows(view) if geometry.recurs else None
    convolutions = write_out_convolutions(view, batch, positions, windows)
    if convolutions:
        counts["convolution"] = convolutions, convolutions
        sink_transposes(view)
    if windows is None:
        return set()
    return write_out_recurrences(view, counts, geometry, windows, max_width)


def attend(view: GraphView, target: OrtTarget, kernel: FusedKernel, counts: Counts) -> None:
    """Let a kernel take over attention."""
    layers = len(view.nodes("Attention"))
    turning = layers if view.nodes("Cos") else 0
    fusion = fuse_attention(view, target.geometry, target.positions, kernel)
    counts["attention"], counts["rotary"] = (fusion.layers, layers), (fusion.rotated, turning)
    counts["qkv"] = fusion.joined, layers


def fuse_the_rest(view: GraphView, counts: Counts, *, biases: bool = True) -> None:
    """Replace what is left of groups of operators by the one that does it all.

    `biases`: of projections, go into the norms after them; see `fuse_skip_norm`.
    """
    join_siblings(view)
    counts["skip_norm"] = fuse_skip_norm(view, biases)
    drop_reshapes(view)
    fix_reshapes(view)


def finish(
    view: GraphView, projections: tuple[int, int], embeddings: tuple[int, int], counts: Counts
) -> Lowered:
    """Return the graph, given how many weights were emitted in codes, and of how many."""
    emitted, of = (a + b for a, b in zip(projections, embeddings, strict=True))
    counts["quantized"] = emitted, of
    fold_layouts(view)
    model = view.tidy()
    stamp_oldest_opset(model)
    return Lowered(model, view.weights(), counts.ratios)
