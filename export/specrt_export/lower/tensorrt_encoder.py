"""Lowers what conditions a decoder on a source for TensorRT: its encoder and cross projections.

Both run once a source, of one row. The encoder takes as many positions as the source has, and so
pads nothing; the cross projections take all that there may be, and fill whole buffers of a row:

    input_ids [1, E] ── encoder ── hidden [1, E, W], written into [1, max_source, W]
    hidden [1, max_source, W], length [1] ── cross ── cross_key.{i} [1, H, max_source, D], ...
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from specrt.engine.tensorrt.library import NATIVE
from specrt_export.lower.canonical import (
    canonicalize,
    drop_reshapes,
    fix_reshapes,
    fix_shapes,
    is_cross,
)
from specrt_export.lower.encoder_lowering import LENGTH, adding_masks, drop_length
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.norm import write_out_norms
from specrt_export.lower.projections import gated, join_siblings
from specrt_export.lower.tensorrt_lowering import (
    TensorRtTarget,
    cut_columns,
    emit_products,
    emit_tables,
    finish,
    layer_norms,
    name_norms,
    widen_products,
    write_out_plain,
)
from specrt_export.lower.view import Counts, GraphView, Lowered
from specrt_export.portable.graph import exact_modules

HIDDEN = "hidden"


def lower_tensorrt_encoder(
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: TensorRtTarget
) -> Lowered:
    """Rewrite a portable encoder, or a graph of cross projections, for one row; read no weight."""
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    fix_shapes(copy.graph, target.geometry, 1, target.max_length, target.max_source)
    view, counts = GraphView(copy, weights), Counts()
    canonicalize(view, counts)
    if HIDDEN in view.outputs:
        drop_length(view)
        _drop_masks(view)
    else:
        _clear_padding(view, target.max_source)
    layers = len(view.nodes("Attention"))
    counts["attention"] = layers, layers
    exact = layer_norms(view)
    if target.compute == "fp16":
        exact |= widen_products(view, exact_modules(portable))
    if target.form == NATIVE:
        name_norms(view)
    else:
        exact |= write_out_plain(view) | write_out_norms(view)
    pairs = gated(view)
    join_siblings(view)
    counts["gate_up"] = sum(view.maker(g.gate) is view.maker(g.up) for g in pairs), len(pairs)
    drop_reshapes(view)
    fix_reshapes(view)
    counts["quantized"] = emit_products(view, padded=False)
    cut_columns(view)
    emit_tables(view)
    return finish(view, target, counts, exact)


def _drop_masks(view: GraphView) -> None:
    """Leave out masks that add nothing to a source without padding."""
    adding = adding_masks(view)
    for node in view.nodes("Attention"):
        if len(node.input) > 3 and node.input[3] not in adding:
            del node.input[3:]
    view.tidy()


def _clear_padding(view: GraphView, max_source: int) -> None:
    """Read zeros where a source has ended: what an earlier one left there may be no number.

    ```
    length [1] ─ Less(0, 1, ...) [max_source, 1] ─ Where(hidden, 0) ─ whoever reads hidden
    ```
    """
    given = next(i for i in view.graph.input if i.name == HIDDEN)
    given.type.tensor_type.shape.dim[1].dim_value = max_source
    for value in view.graph.output:
        assert is_cross(value.name), "cross projections make no more"
    place = view.add_constant("positions", np.arange(max_source)[:, None])
    zero = view.add_constant("nothing", np.array(0, np.float32))
    readers = list(view.readers(HIDDEN))
    cleared = view.add("Where", [view.add("Less", [place, LENGTH]), HIDDEN, zero])
    for node in readers:
        node.input[:] = [cleared if name == HIDDEN else name for name in node.input]
    kind = onnx.TensorProto.INT64
    view.graph.input.append(helper.make_tensor_value_info(LENGTH, kind, [1]))
    view.tidy()
