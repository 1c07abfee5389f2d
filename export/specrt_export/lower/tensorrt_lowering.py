"""Lowers a portable graph to the form that TensorRT parses into its fastest layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from specrt.bundle import Geometry
from specrt.engine.tensorrt.library import DECOMPOSED, NATIVE, NATIVE_FROM
from specrt_export.lower.attention import Layer, find_layers, positions
from specrt_export.lower.canonical import canonicalize, drop_reshapes, fix_reshapes, fix_shapes
from specrt_export.lower.half import TYPES, halve
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.logits import add_confidence, cut_candidates, find_peak
from specrt_export.lower.norm import write_out_norms
from specrt_export.lower.projections import gated, join_siblings
from specrt_export.lower.rotary import Rotations, match_rotary
from specrt_export.lower.tensorrt_matmul import cut_columns, emit_products, emit_tables
from specrt_export.lower.view import Counts, GraphView, Lowered, stamp_opset


def write_out(view: GraphView, geometry: Geometry, *, everything: bool) -> set[str]:
    """Write attention out in products and a softmax; return a value a layer, to be kept in fp32.

    ```
    q [B, H, S, D] · scale ─ Reshape [B, Hkv, G · S, D] ─┐
    keys ─ Transpose ─────────────────────────────────── MatMul ─ (cap · tanh(· / cap)) ─┐
    mask [B, 1, S, M] ───────────────────────────────────────── Add [B, H, S, M] ────────┘
                                                                 └─ Softmax ─ MatMul values ─ y
    ```
    Queries of one group are rows of one product, so that keys and values are not repeated.
    All layers where TensorRT is too old for attention; else only those with a soft cap, which its
    attention layer refuses. The masked scores are what is kept: in half precision they would be
    rounded a second time.
    """
    layers = find_layers(view)
    chosen = [at for at in layers if everything or view.attributes(at.node).get("softcap", 0.0)]
    masked = {_write_layer(view, layer, geometry) for layer in chosen}
    view.tidy()
    return masked


def _write_layer(view: GraphView, layer: Layer, geometry: Geometry) -> str:
    """Write one layer out; return its masked scores."""
    said = view.attributes(layer.node)
    scale = said.get("scale", geometry.head_dim**-0.5)
    query, keys, values, mask = layer.node.input[:4]
    # Scaled before the product, which then stays far from the ends of half precision.
    factor = view.add_constant("scale", np.array(scale, np.float32))
    rows = _reshaped(view, view.add("Mul", [query, factor]), geometry.kv_heads, geometry.head_dim)
    turned = view.add("Transpose", [keys], perm=[0, 1, 3, 2])
    length = _length(view, layer)
    scores = view.add("MatMul", [rows, turned])
    scores = _capped(view, scores, said.get("softcap", 0.0))
    masked = view.add("Add", [_reshaped(view, scores, geometry.heads, length), mask])
    shares = view.add("Softmax", [masked], axis=-1)
    grouped = _reshaped(view, shares, geometry.kv_heads, length)
    found = view.add("MatMul", [grouped, values])
    shape = view.add_constant("heads", _shape(geometry.heads, geometry.head_dim))
    view.add("Reshape", [found, shape], outputs=[layer.node.output[0]])
    return masked


def _capped(view: GraphView, scores: str, cap: float) -> str:
    if not cap:
        return scores
    most = view.add_constant("cap", np.array(cap, np.float32))
    return view.add("Mul", [view.add("Tanh", [view.add("Div", [scores, most])]), most])


def _reshaped(view: GraphView, name: str, heads: int, last: int) -> str:
    return view.add("Reshape", [name, view.add_constant("heads", _shape(heads, last))])


def _shape(heads: int, last: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return [B, heads, -1, last], B being whatever it was."""
    return np.array([0, heads, -1, last], np.int64)


def _length(view: GraphView, layer: Layer) -> int:
    """Return M, which lowering has fixed."""
    cache = next(i for i in view.graph.input if i.name == layer.key_update.input[0])
    return int(cache.type.tensor_type.shape.dim[2].dim_value)


def scatter_elements(view: GraphView) -> int:
    """Write new keys and values by their positions; return how many buffers.

    ```
    key.i, k, start ─ TensorScatter ─ present_key.i

      =>  positions ─ Unsqueeze [B, 1, S, 1] ─ Expand like k ─┐
          key.i, k ───────────────────────────────── ScatterElements ─ present_key.i
    ```
    The result is a new buffer: TensorRT before 10.15 updates none in place.
    """
    updates = view.nodes("TensorScatter")
    axes = view.add_constant("axes", np.array([1, 3], np.int64))
    place = view.add("Unsqueeze", [positions(view), axes]) if updates else ""
    for node in updates:
        cache, new = node.input[:2]
        at = view.add("Expand", [place, view.add("Shape", [new])])
        view.add("ScatterElements", [cache, at, new], outputs=[node.output[0]], axis=2)
    view.tidy()
    return len(updates)


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
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: TensorRtTarget
) -> Lowered:
    """Rewrite a portable graph in standard operators; no weight is read.

    The result runs in ONNX Runtime as it is. `mark_decomposable` goes between it and TensorRT.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    fix_shapes(copy.graph, target.geometry, target.batch, target.max_length)
    view = GraphView(copy, weights)
    counts = Counts()
    canonicalize(view, counts)
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
