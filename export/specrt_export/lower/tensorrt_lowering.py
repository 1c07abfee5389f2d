"""Lowers a portable graph to the form that TensorRT parses into its fastest layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from specrt.engine.tensorrt.engine_record import KV_LENGTH
from specrt.engine.tensorrt.library import DECOMPOSED, NATIVE, NATIVE_FROM
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.lower.attention import Layer, Rotations, find_layers, match_rotary, positions
from specrt_export.lower.canonical import (
    canonicalize,
    drop_reshapes,
    fix_reshapes,
    fix_shapes,
    is_cross,
)
from specrt_export.lower.half import TYPES, halve
from specrt_export.lower.lazy_tensor import LazyTensor, doubled, nonzero, reshaped
from specrt_export.lower.logits import add_argmax, add_confidence, cut_candidates
from specrt_export.lower.norm import write_out_norms
from specrt_export.lower.ort_lowering import remember
from specrt_export.lower.projections import (
    PROJECTION,
    Projection,
    WeightMatrix,
    add_projection,
    find_matrix,
    gated,
    join_siblings,
    read_projection,
)
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import Counts, GraphView, Lowered, stamp_opset
from specrt_export.portable.graph import exact_modules

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
    candidates: int = 0
    confidence: bool = False
    grouped_queries: bool = False
    """Whether the queries of a group are rows of one product; see `group_queries`."""
    reads_prefix: bool = False
    """Whether a pass says how much of the KV buffers attention reads; see `read_prefix`."""
    max_source: int = 0
    """Of an encoder-decoder: most positions of a source."""
    max_width: int = 0
    """Tokens of the widest pass."""


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
    fix_shapes(copy.graph, target.geometry, target.batch, target.max_length, target.max_source)
    view = GraphView(copy, weights)
    counts = Counts()
    canonicalize(view, counts)
    sizes = target.batch, target.max_length, target.max_width
    exact = remember(view, counts, target.geometry, *sizes)
    exact |= _attend(view, target, counts)
    if target.compute == "fp16":
        exact |= widen_products(view, exact_modules(portable))
    pairs = gated(view)
    join_siblings(view)
    counts["gate_up"] = sum(view.maker(g.gate) is view.maker(g.up) for g in pairs), len(pairs)
    drop_reshapes(view)
    fix_reshapes(view)
    counts["quantized"] = emit_products(view)
    cut_columns(view)
    emit_tables(view)
    _guard_tokens(view)
    _score(view, target)
    return finish(view, target, counts, exact)


def finish(view: GraphView, target: TensorRtTarget, counts: Counts, exact: set[str]) -> Lowered:
    """Return a graph in its type, but for what is `exact`, and in an opset of its form."""
    soften_masks(view, target.compute)
    if target.compute in TYPES:
        halve(view, target.compute, exact)
    model = view.tidy()
    if target.form == DECOMPOSED:
        in_blocks = any(a.name == "block_size" for n in model.graph.node for a in n.attribute)
        stamp_opset(model, _OLD_OPSETS[in_blocks])
    return Lowered(model, view.weights(), counts.ratios)


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
    exact = masked | layer_norms(view)
    if target.max_source:
        crossing = len(view.nodes("Attention")) - len(find_layers(view))
        counts["cross_attention"] = crossing, crossing
    if not native:
        exact |= write_out_plain(view)
        scatter_elements(view)
        return exact | write_out_norms(view)
    if target.reads_prefix:
        counts["prefix"] = read_prefix(view), len(layers) - len(masked)
    if target.grouped_queries:
        counts["grouped"] = group_queries(view, target.geometry), len(layers) - len(masked)
    name_norms(view)
    return exact


def name_norms(view: GraphView) -> None:
    """Call RMS norms what the standard calls them."""
    for node in view.nodes("SimplifiedLayerNormalization"):
        node.op_type = "RMSNormalization"


_SMALLER = 64.0
"""What the input of a product is divided by whose result may be beyond fp16. A power of two, which
rounds nothing from 4e-3 on; below it rounds by 2e-6."""

_SUMS = ("Add", "Div", "Identity", "Mul", "RMSNormalization", "SimplifiedLayerNormalization")


def widen_products(view: GraphView, modules: Collection[str]) -> set[str]:
    """Let products of some modules go beyond fp16; return the values that are kept in fp32.

    ```
    h ─ Projection wo ─┐               h ─ Mul 1 / 64 ─ Projection wo ─ Mul 64 ─┐
    x ───────────────  Add ─ norm  =>  x ───────────────────────────────────── Add ─ norm
    ```
    The product stays in fp16 and keeps its weight; what it is multiplied with again is fp32, and so
    are the sums that it goes into and their norms. As transformers has T5's: it keeps `wo` in fp32.
    """
    wide = set[str]()
    by = view.add_constant("smaller", np.array(1 / _SMALLER, np.float32)) if modules else ""
    back = view.add_constant("larger", np.array(_SMALLER, np.float32)) if modules else ""
    for node in view.nodes(PROJECTION) if modules else ():
        projection = read_projection(view, node)
        if projection.bias is None and set(modules) & set(projection.matrix.values.name.split(".")):
            output = projection.output
            smaller = view.add("Mul", [projection.x, by])
            product = add_projection(view, smaller, projection.matrix, None)
            wide.add(view.add("Mul", [product, back], outputs=[output]))
    stack = list(wide)
    while stack:
        for reader in view.readers(stack.pop()):
            new = {*reader.output} - wide if reader.op_type in _SUMS else set()
            wide |= new
            # What is normed is small again.
            stack.extend(() if reader.op_type.endswith("Normalization") else new)
    view.tidy()
    return wide


def layer_norms(view: GraphView) -> set[str]:
    """Return what layer norms make, which stays in fp32."""
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
        names = [layer.node.input[0], *([] if layer.shares else layer.written[:1])]
        width = target.geometry.memories[layer.index].key_width
        turned = [_rotate_one(view, name, rotations, width) for name in names]
        rotated += all(turned)
    view.tidy()
    return rotated


def _rotate_one(view: GraphView, name: str, rotations: Rotations, head: int) -> bool:
    rotary = match_rotary(view, name)
    tables = rotations.tables(rotary) if rotary else None
    if rotary is None or tables is None:
        return False
    cos, sin, width = tables
    part = 0 if width == head else width
    inputs = [rotary.x, cos, sin, positions(view)]
    view.add("RotaryEmbedding", inputs, outputs=[name], rotary_embedding_dim=part)
    return True


def _guard_tokens(view: GraphView) -> None:
    """Look up token 0 for what is not a token: a draft without a number to choose by says -1.

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
    scored = _entries(view)
    add_argmax(view, scored)
    if target.confidence:
        add_confidence(view)
    if target.candidates:
        cut_candidates(view, min(target.candidates, scored))


def _entries(view: GraphView) -> int:
    """Return how many entries of the vocabulary are scored."""
    logits = next(o for o in view.graph.output if o.name == "logits")
    return int(logits.type.tensor_type.shape.dim[-1].dim_value)


def soften_masks(view: GraphView, compute: str) -> None:
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


def write_out(view: GraphView, geometry: Geometry, *, everything: bool) -> set[str]:
    """Write attention out in products and a softmax; return a value a layer, to be kept in fp32.

    ```
    q [B, H, S, D] · scale ─ Reshape [B, Hkv, G · S, D] ─┐
    keys ─ Transpose ─────────────────────────────────── MatMul ─ (cap · tanh(· / cap)) ─┐
    mask [B, 1, S, M] ───────────────────────────────────────── Add [B, H, S, M] ────────┘
                                                                 └─ Softmax ─ MatMul values ─ y
    ```
    Queries of one group are rows of one product, so that keys and values are not repeated.
    All layers where TensorRT is too old for attention; else only those that its attention layer
    refuses: with a soft cap, or with values of another width than keys. The masked scores are what
    is kept: in half precision they would be rounded a second time.
    """
    layers = find_layers(view)
    chosen = [at for at in layers if everything or not _has_kernel(view, at, geometry)]
    masked = {_write_layer(view, layer, geometry) for layer in chosen}
    view.tidy()
    return masked


def _has_kernel(view: GraphView, layer: Layer, geometry: Geometry) -> bool:
    memory = geometry.memories[layer.index]
    is_capped = view.attributes(layer.node).get("softcap", 0.0)
    return not is_capped and memory.key_width == memory.value_width


def _write_layer(view: GraphView, layer: Layer, geometry: Geometry) -> str:
    """Write one layer out; return its masked scores."""
    memory = geometry.memories[layer.index]
    attributes = view.attributes(layer.node)
    scale = attributes.get("scale", memory.key_width**-0.5)
    query, keys, values, mask = layer.node.input[:4]
    # Scaled before the product, which then stays far from the ends of half precision.
    factor = view.add_constant("scale", np.array(scale, np.float32))
    scaled = view.add("Mul", [query, factor])
    rows = _reshape_to(view, scaled, [0, memory.kv_heads, -1, memory.key_width])
    turned = view.add("Transpose", [keys], perm=[0, 1, 3, 2])
    length = _length(view, layer)
    scores = view.add("MatMul", [rows, turned])
    scores = _capped(view, scores, attributes.get("softcap", 0.0))
    masked = view.add("Add", [_reshape_to(view, scores, [0, geometry.heads, -1, length]), mask])
    shares = view.add("Softmax", [masked], axis=-1)
    grouped = _reshape_to(view, shares, [0, memory.kv_heads, -1, length])
    mixed = view.add("MatMul", [grouped, values])
    heads = [0, geometry.heads, -1, memory.value_width]
    _reshape_to(view, mixed, heads, layer.node.output[0])
    return masked


def write_out_plain(view: GraphView) -> set[str]:
    """Write attention out that is to no KV buffers: to a source, or of one to itself.

    ```
    q [B, H, S, D] · scale ─ MatMul keys transposed ─ (Add mask ─) Softmax ─ MatMul values ─ y
    ```
    Returns the scores that the softmax reads, to be kept in fp32.
    """
    scored = set[str]()
    for node in view.nodes("Attention"):
        query, keys, values = node.input[:3]
        scale = view.attributes(node).get("scale")
        if scale is None or view.attributes(node).get("softcap", 0.0):
            raise BuildError(
                "this model's attention to its source is capped or has no scale, which is not "
                "written out. Please report the architecture"
            )
        factor = view.add_constant("scale", np.array(scale, np.float32))
        turned = view.add("Transpose", [keys], perm=[0, 1, 3, 2])
        scores = view.add("MatMul", [view.add("Mul", [query, factor]), turned])
        if len(node.input) > 3:
            scores = view.add("Add", [scores, node.input[3]])
        scored.add(scores)
        shares = view.add("Softmax", [scores], axis=-1)
        view.add("MatMul", [shares, values], outputs=[node.output[0]])
    view.tidy()
    return scored


def _capped(view: GraphView, scores: str, cap: float) -> str:
    if not cap:
        return scores
    most = view.add_constant("cap", np.array(cap, np.float32))
    return view.add("Mul", [view.add("Tanh", [view.add("Div", [scores, most])]), most])


def _length(view: GraphView, layer: Layer) -> int:
    """Return M, which lowering has fixed."""
    cache = next(i for i in view.graph.input if i.name == layer.caches[0])
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


def read_prefix(view: GraphView) -> int:
    """Let attention read the first positions of the KV buffers only; return how many layers.

    ```
    kv_length [E] ─ Shape ─ E ──────────────────┐
    updated keys, values [B, Hkv, M, D] ─────── Slice [B, Hkv, E, D] ─┐
    mask [B, 1, S, M] ───────────────────────── Slice [B, 1, S, E] ── Attention ─ y
    ```
    A pass says with E how far it reaches: up to its own last position at least. What lies beyond is
    masked, so that leaving it out changes no sum.
    Raises: BuildError where every layer was written out.
    """
    layers = find_layers(view)
    if not layers:
        raise BuildError(
            "kv_lengths needs attention layers, and all of this model are written out, because "
            "TensorRT's take no soft cap, nor values of another width than keys; remove it"
        )
    kinds = onnx.TensorProto.INT64
    view.graph.input.append(onnx.helper.make_tensor_value_info(KV_LENGTH, kinds, ["E"]))
    zero = view.add_constant("zero", np.array([0], np.int64))
    end = view.add("Shape", [KV_LENGTH])
    axes = {axis: view.add_constant("axis", np.array([axis], np.int64)) for axis in (2, 3)}
    cut: dict[str, str] = {}
    for layer in layers:
        for index, axis in ((1, 2), (2, 2), (3, 3)):
            name = layer.node.input[index]
            if name not in cut:
                cut[name] = view.add("Slice", [name, zero, end, axes[axis]])
            layer.node.input[index] = cut[name]
    view.tidy()
    return len(layers)


def group_queries(view: GraphView, geometry: Geometry) -> int:
    """Make the queries that share keys rows of one head; return how many layers.

    ```
    q [B, H, S, D] ─ Reshape [B, Hkv, G · S, D] ─┐
    keys, values [B, Hkv, M, D] ──────────────── Attention ─ Reshape [B, H, S, D] ─ y
    mask [B, 1, S, M] ─ Concat, G times ─────────┘
    ```
    Where a kernel wants as many key heads as query heads, keys and values are then not repeated.
    Not with a single key head: one head left alone gets no attention kernel (TensorRT for RTX 1.7).
    """
    found, shapes = 0, Shapes(view)
    masks: dict[tuple[str, int], str] = {}
    for node in view.nodes("Attention"):
        keys, values = (shapes.dims(name) for name in node.input[1:3])
        if is_cross(node.input[1]) or keys is None or values is None:
            continue
        kv_heads, groups = int(keys[1]), geometry.heads // int(keys[1])
        if groups == 1 or kv_heads == 1:
            continue
        mask = node.input[3]
        if (mask, groups) not in masks:
            masks[mask, groups] = view.add("Concat", [mask] * groups, axis=2)
        grouped = _reshape_to(view, node.input[0], [0, kv_heads, -1, int(keys[3])])
        inputs = [grouped, *node.input[1:3], masks[mask, groups]]
        mixed = view.add("Attention", inputs, **view.attributes(node))
        _reshape_to(view, mixed, [0, geometry.heads, -1, int(values[3])], node.output[0])
        found += 1
    view.tidy()
    return found


_ROW_BY_ROW = (
    "Add", "Cast", "Div", "Gelu", "Identity", "LayerNormalization", "Mul", "RMSNormalization",
    "Relu", "Sigmoid", "Sub", "Tanh",
)  # fmt: skip


class PadRows:
    """Repeats the first row of a value after its last, for products that need two rows.

    ```
    x [B, S, K] ─┬────────── Concat ─ padded x [B, S + 1, K]
                 └ first row ─┘
    ```
    The row is added once, to the tokens, and stays from operator to operator where each works row
    by row; only attention takes it away and needs it back.
    """

    def __init__(self, view: GraphView) -> None:
        self._view = view
        shapes = Shapes(view)  # as long as projections say how wide they are
        self._dims = {name: shapes.dims(name) for node in view.nodes() for name in node.output}
        self._padded: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the value with a pad row."""
        stack = [name]
        while stack:
            value = stack[-1]
            needed = [] if value in self._padded else self._rows_of(value)
            missing = [i for i in needed if i not in self._padded]
            stack.extend(missing)
            if not missing:
                if value not in self._padded:
                    self._padded[value] = self._add(value)
                stack.pop()
        return self._padded[name]

    def repeated(self, name: str) -> str:
        """Return the value with a pad row, added at this very place."""
        self._padded[name] = self._repeated(name, self._axis(name))
        return self._padded[name]

    def drop(self, padded: str, name: str) -> None:
        """Make a value another one without its pad row."""
        bounds = [self._constant(n) for n in (0, -1, self._axis(name))]
        self._view.add("Slice", [padded, *bounds], outputs=[name])
        self._padded[name] = padded

    def _rows_of(self, name: str) -> list[str]:
        """Return the inputs whose rows a value is made of, where it is made row by row."""
        node = self._view.maker(name)
        if node is None:
            return []
        if self._is_selection(name) or _cuts_columns(self._view.attributes(node), node.op_type):
            return [node.input[0]]
        dims = self._dims.get(name)
        if node.op_type not in _ROW_BY_ROW or dims is None:
            return []
        data = [i for i in node.input if self._is_data(i)]
        return data if all(self._dims.get(i) == dims for i in data) else []

    def _is_data(self, name: str) -> bool:
        return self._view.stored(name) is None and self._view.constant(name) is None

    def _add(self, name: str) -> str:
        view, node = self._view, self._view.maker(name)
        rows = self._rows_of(name)
        if node is not None and self._is_selection(name):
            more = self._repeated(node.input[1], axis=0)
            return view.add("Gather", [self._padded[node.input[0]], more], axis=1)
        if node is not None and node.op_type == "Split":
            return self._split(node, name)
        if node is not None and rows:
            inputs = [self._padded.get(i, i) if i in rows else i for i in node.input]
            return view.add(node.op_type, inputs, **view.attributes(node))
        if node is not None and node.op_type == "Gather" and node.input[1] == "input_ids":
            more = self._repeated("input_ids", axis=1)
            return view.add("Gather", [node.input[0], more], **view.attributes(node))
        return self._repeated(name, self._axis(name))

    def _split(self, node: onnx.NodeProto, name: str) -> str:
        parts = {output: self._view.fresh("part") for output in node.output}
        inputs = [self._padded[node.input[0]], *node.input[1:]]
        attributes = self._view.attributes(node)
        self._view.add("Split", inputs, outputs=list(parts.values()), **attributes)
        self._padded |= parts
        return parts[name]

    def _is_selection(self, name: str) -> bool:
        """Tell whether a value is some rows of another: those that are asked for."""
        node = self._view.maker(name, "Gather")
        if node is None or self._view.attributes(node).get("axis", 0) != 1:
            return False
        return self._is_data(node.input[0]) and self._view.depends_on(node.input[1], ["rows"])

    def _repeated(self, name: str, axis: int) -> str:
        first = self._view.add("Slice", [name, *(self._constant(n) for n in (0, 1, axis))])
        return self._view.add("Concat", [name, first], axis=axis)

    def _constant(self, number: int) -> str:
        return self._view.add_constant("bound", np.array([number], np.int64))

    def _axis(self, name: str) -> int:
        """Return the axis of the tokens: the last but one."""
        dims = self._dims.get(name)
        return len(dims) - 2 if dims is not None else 1


def _cuts_columns(attributes: dict[str, Any], op_type: str) -> bool:
    return op_type == "Split" and attributes.get("axis", 0) == -1


def emit_products(view: GraphView, *, padded: bool = True) -> tuple[int, int]:
    """Replace projections by products; return how many are quantized, and of how many.

    `padded` is whether passes may have one row: see below.

    ```
    fp32               W [N, K] ──────────────────────────── Transpose ─┐
    int4               codes, scales ─ DequantizeLinear ──── Transpose ─┤
                                                               x ───── MatMul (─ Add bias) ─ y
    int8, fp8          codes, scales ─ DequantizeLinear ──── Transpose ─┐
                       x [.., S, K] ─┬─────────── Concat [.., S + 1, K] MatMul ─ Slice ─ y
                                     └ first row ─┘
    ```
    A weight [N, K] before its transposition is stored once in a plan; a [K, N] one twice, as soon
    as there is a profile of width 1. Weights of 8 bits are dequantized inside the kernel of the
    product where it has two rows or more, and by a kernel of their own, in every pass, where it has
    one: so they get one row more, which nobody reads. (Kernels seen in plans of TensorRT-RTX 1.7.)
    """
    projections = [read_projection(view, node) for node in view.nodes(PROJECTION)]
    pads = PadRows(view)
    coded = [p for p in projections if p.matrix.scales is not None and p.matrix.bits == 8]
    paired = coded if padded else []
    # A single product, such as the head of an int4 model, is not worth a row in all before it.
    pad = pads.of if len(paired) > 1 else pads.repeated
    for projection in projections:
        if projection not in paired:
            _emit(view, projection, projection.x, projection.output)
            continue
        product = _emit(view, projection, pad(projection.x))
        pads.drop(product, projection.output)
    view.tidy()
    quantized = sum(p.matrix.scales is not None for p in projections)
    return quantized, len(projections)


def cut_columns(view: GraphView) -> int:
    """Cut what joined products make along an axis of their own; return how many.

    ```
    x · [gate; up] ─ Split ─ a, b

      =>  x · [gate; up] ─ Reshape [.., N / u, u] ─ Split ─ Reshape ─ a, b
    ```
    TensorRT pulls a plain split of floats into the product, joins it again for some profiles, and
    keeps the weights of both. Not where a norm of heads follows: that would take one kernel more.
    """
    cut = 0
    for node in view.nodes("Split"):
        sizes = view.constant(node.input[1]) if len(node.input) > 1 else None
        if sizes is None or not _is_dense(view, node.input[0]) or _meets_norm(view, node):
            continue
        unit = int(np.gcd.reduce(sizes))
        counts = view.add_constant("counts", sizes // unit)
        apart = _reshape_to(view, node.input[0], [0, 0, int(sizes.sum()) // unit, unit])
        parts = [view.fresh("part") for _ in node.output]
        outputs = list(node.output)
        view.add("Split", [apart, counts], outputs=parts, axis=2)
        for part, output, size in zip(parts, outputs, sizes, strict=True):
            _reshape_to(view, part, [0, 0, size], output)
        cut += 1
    view.tidy()
    return cut


def _is_dense(view: GraphView, name: str) -> bool:
    """Tell whether a value is a product, of three axes, with weights that share no scale."""
    node = view.maker(name)
    if node is not None and node.op_type == "Add":
        node = view.maker(node.input[0])
    if node is None or node.op_type != "MatMul":
        return False
    turned = view.maker(node.input[1], "Transpose")
    return turned is not None and view.stored(turned.input[0]) is not None


def _meets_norm(view: GraphView, node: onnx.NodeProto) -> bool:
    """Tell whether a part is normed head by head."""
    shaped = [r for output in node.output for r in view.readers(output) if r.op_type == "Reshape"]
    after = [reader for one in shaped for reader in view.readers(one.output[0])]
    return any(reader.op_type.endswith("Normalization") for reader in after)


def _reshape_to(view: GraphView, name: str, shape: list[int], output: str | None = None) -> str:
    """Reshape a value, and return what is made; `output` may name it."""
    inputs = [name, view.add_constant("shape", np.array(shape, np.int64))]
    return view.add("Reshape", inputs, outputs=None if output is None else [output])


def emit_tables(view: GraphView) -> None:
    """Give each look-up in a quantized table a dequantization of its own.

    TensorRT then joins the two, and dequantizes what is looked up; one that a product reads as
    well is dequantized whole.
    """
    for node in view.nodes("Gather"):
        dequantize = view.maker(node.input[0], "DequantizeLinear")
        matrix = find_matrix(view, node.input[0]) if dequantize is not None else None
        if matrix is not None:
            inputs = [_weight(view, matrix), node.input[1]]
            view.add("Gather", inputs, outputs=[node.output[0]], **view.attributes(node))
    view.tidy()


def _emit(view: GraphView, projection: Projection, x: str, output: str | None = None) -> str:
    """Multiply, and return what is made; `output` may name it."""
    weight = view.add("Transpose", [_weight(view, projection.matrix)], perm=[1, 0])
    named = [output] if output is not None else None
    if projection.bias is None:
        return view.add("MatMul", [x, weight], outputs=named)
    product = view.add("MatMul", [x, weight])
    return view.add("Add", [product, view.add_stored(projection.bias)], outputs=named)


def _weight(view: GraphView, matrix: WeightMatrix) -> str:
    """Add a weight; one scale for each row is said as such, and not as a block."""
    if matrix.scales is None:
        return matrix.add_to(view)
    apart = nonzero(matrix.scales)
    if matrix.block == matrix.inputs and matrix.bits == 4:
        # One block a row has a kernel of its own, as 8 bits have; two of one scale have not.
        return replace(matrix, scales=doubled(apart), block=matrix.block // 2).add_to(view)
    if matrix.block != matrix.inputs:
        return replace(matrix, scales=apart).add_to(view)
    scales = reshaped(apart, f"{apart.name}/row", (matrix.outputs,))
    inputs = [view.add_stored(matrix.values), view.add_stored(scales)]
    return view.add("DequantizeLinear", inputs, axis=0)
