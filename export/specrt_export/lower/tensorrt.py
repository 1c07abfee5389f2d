"""Lower a portable graph to the form that TensorRT parses into its fastest layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from specrt.engines.tensorrt.contract import DECOMPOSED as DECOMPOSED
from specrt.engines.tensorrt.contract import NATIVE as NATIVE
from specrt.engines.tensorrt.library import NATIVE_FROM
from specrt.geometry import Geometry
from specrt_export.lower.attend import scatter_elements, write_out
from specrt_export.lower.flatten import drop_reshapes, fix_reshapes
from specrt_export.lower.halve import TYPES, halve
from specrt_export.lower.head import add_confidence
from specrt_export.lower.join import gated, join_siblings
from specrt_export.lower.layers import find_layers, positions
from specrt_export.lower.lowered import Counts, Lowered
from specrt_export.lower.norm import write_out_norms
from specrt_export.lower.opset import stamp_opset
from specrt_export.lower.peak import cut_candidates, find_peak
from specrt_export.lower.products import cut_columns, emit_products, emit_tables
from specrt_export.lower.recognise import fix_shapes, recognise
from specrt_export.lower.rotary import Rotations, match_rotary
from specrt_export.lower.stored import Stored
from specrt_export.lower.view import GraphView

CANDIDATES = 64
"""Best scores of each row that are cut out for sampling."""

_OLD_OPSETS = (20, 21)
"""What TensorRT 10.3 documents; blocks of scales came with the later one."""

_LOWEST = {"fp32": -3.4028234e38, "bf16": -3.3895314e38, "fp16": -65504.0}
_MASKED = -1e30
"""What is below this in a mask stands for minus infinity."""


@dataclass(frozen=True)
class TensorRtTarget:
    """What a plan is to be."""

    geometry: Geometry
    max_length: int
    batch: int = 1
    compute: str = "fp16"
    """`fp16`, `bf16` or `fp32`."""
    form: str = NATIVE
    candidates: int = CANDIDATES
    confidence: bool = False


def form_of(version: tuple[int, ...]) -> str:
    """Return the form that a version of TensorRT parses."""
    return NATIVE if version[:2] >= NATIVE_FROM else DECOMPOSED


def lower_tensorrt(
    portable: onnx.ModelProto, weights: Mapping[str, Stored], target: TensorRtTarget
) -> Lowered:
    """Rewrite a portable graph in standard operators; no weight is read.

    The result runs in ONNX Runtime as it is. `mark_decomposable` goes between it and TensorRT.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    fix_shapes(copy.graph, target.geometry, target.batch, target.max_length)
    view = GraphView(copy, weights)
    counts = Counts()
    recognise(view, counts)
    exact = _attend(view, target, counts)
    pairs = gated(view)
    join_siblings(view)
    counts["gate_up"] = sum(view.maker(a) is view.maker(b) for a, b in pairs), len(pairs)
    drop_reshapes(view)
    fix_reshapes(view)
    counts["quantized"] = emit_products(view)
    cut_columns(view)
    emit_tables(view)
    _guard_tokens(view)
    _score(view, target)
    _soften_masks(view, target.compute)
    if target.compute in TYPES:
        halve(view, target.compute, exact)
    model = view.tidy()
    if target.form == DECOMPOSED:
        in_blocks = any(a.name == "block_size" for n in model.graph.node for a in n.attribute)
        stamp_opset(model, _OLD_OPSETS[in_blocks])
    return Lowered(model, view.weights(), counts.said)


def mark_decomposable(model: onnx.ModelProto) -> None:
    """Let TensorRT compute attention in several kernels where it has none that does it all.

    It has none in fp32, nor at width 1 for fewer than four query heads. Where it has one the plan
    is the same. The attribute is TensorRT's own: ONNX Runtime refuses it.
    """
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))


def _attend(view: GraphView, target: TensorRtTarget, counts: Counts) -> set[str]:
    """Choose operators for rotation, attention and norms; return what stays in fp32."""
    native = target.form == NATIVE
    layers = find_layers(view)
    turning = len(layers) if view.nodes("Cos") else 0
    if native:
        counts["rotary"] = _rotate(view, target), turning
    masked = write_out(view, target.geometry, everything=not native)
    counts["attention"] = (len(layers) - len(masked) if native else len(masked)), len(layers)
    exact = masked | _layer_norms(view)
    if not native:
        scatter_elements(view)
        return exact | write_out_norms(view)
    for node in view.nodes("SimplifiedLayerNormalization"):
        node.op_type = "RMSNormalization"
    return exact


def _layer_norms(view: GraphView) -> set[str]:
    return {node.output[0] for node in view.nodes("LayerNormalization")}


def _rotate(view: GraphView, target: TensorRtTarget) -> int:
    """Rotate queries and keys in one node each; return how many layers.

    ```
    x [B, H, S, D], cosines, sines, positions ─ RotaryEmbedding ─ y
    ```
    """
    rotations = Rotations(view, target.max_length)
    rotated = 0
    for layer in find_layers(view):
        names = (layer.node.input[0], layer.key_update.input[1])
        turned = [_rotate_one(view, name, rotations, target.geometry) for name in names]
        rotated += all(turned)
    view.tidy()
    return rotated


def _rotate_one(view: GraphView, name: str, rotations: Rotations, geometry: Geometry) -> bool:
    found = match_rotary(view, name)
    tables = rotations.tables(found) if found else None
    if found is None or tables is None:
        return False
    cos, sin, width = tables
    part = 0 if width == geometry.head_dim else width
    inputs = [found.x, cos, sin, positions(view)]
    view.add("RotaryEmbedding", inputs, outputs=[name], rotary_embedding_dim=part)
    return True


def _guard_tokens(view: GraphView) -> None:
    """Look up token 0 for what is no token: a draft without a number to choose by says -1.

    ```
    input_ids ─ Max 0 ─ whoever looks tokens up
    ```
    """
    readers = [node for node in view.readers("input_ids") if node.op_type != "Shape"]
    none = view.add_constant("none", np.array(0, np.int64))
    guarded = view.add("Max", ["input_ids", none])
    for node in readers:
        for index, name in enumerate(node.input):
            if name == "input_ids":
                node.input[index] = guarded
    view.tidy()


def _score(view: GraphView, target: TensorRtTarget) -> None:
    vocabulary = target.geometry.vocab_size
    find_peak(view, vocabulary)
    if target.confidence:
        add_confidence(view)
    if target.candidates:
        cut_candidates(view, min(target.candidates, vocabulary))


def _soften_masks(view: GraphView, compute: str) -> None:
    """Let masks hold the lowest number of the type they are computed in: not minus infinity."""
    for tensor in view.graph.initializer:
        array = view.constant(tensor.name)
        if (
            array is None
            or array.dtype != np.float32
            or array.size != 1
            or not array.min() < _MASKED
        ):
            continue
        lowest = np.full(array.shape, _LOWEST[compute], np.float32)
        tensor.CopyFrom(numpy_helper.from_array(lowest, tensor.name))
