"""Lowers a portable graph to the operators that ONNX Runtime has fast kernels for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from specrt.bundle import Geometry
from specrt.errors import BuildError
from specrt_export.lower.attention import GroupQueryAttention, fuse_attention
from specrt_export.lower.canonical import (
    canonicalize,
    drop_reshapes,
    fix_reshapes,
    fix_shapes,
    fold_layouts,
)
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.logits import add_confidence, cheapen_argmax
from specrt_export.lower.norm import fuse_skip_norm
from specrt_export.lower.projections import (
    MICROSOFT,
    emit_embeddings,
    emit_projections,
    gated,
    join_siblings,
)
from specrt_export.lower.view import Counts, GraphView, Lowered, stamp_oldest_opset

LAYOUT = "rows packed into one sequence"
"""Changes when a packed graph is made otherwise: bundles built before are stale then."""

WIDTHS, SPREAD, KEPT, POSITIONS = "widths", "spread", "kept", "positions"

_ATTENTION, _CACHES, _LENGTHS = "GroupQueryAttention", 3, 5
"""Where the inputs of attention begin: query, key and value; KV buffers; lengths; tables."""


def pack(view: GraphView, batch: int) -> int:
    """Turn a graph lowered for one row into one that packs the tokens of several; return layers.

    Everything but attention works token by token, and does not ask whose they are:
    ```
    q, k, v [1, T, N] ─ Gather(spread [A]) ─ Split(widths [B]) ─┬─ Attention(key.i.0) ─┐
                                                                ├─ Attention(key.i.1) ─┤
                                                                └─ ...                 │
                        y [1, T, N] ─ Gather(kept [T]) ─ Concat [1, A, N] ─────────────┘
    ```
    `spread` says which token each place of attention reads, `kept` which place each token takes.
    They differ from token to token because the kernel takes no row without tokens, and rounds a
    lone one otherwise than one among several: a row may need places that no token takes.
    Raises: BuildError for a graph in which tokens meet outside fused attention.
    """
    caches = {i.name for i in view.graph.input if i.name.partition(".")[0] in ("key", "value")}
    _declare(view, caches, batch)
    packing = _Packing(view, batch)
    layers = view.nodes(_ATTENTION)
    for node in layers:
        packing.split(node)
    _hand_in_positions(view)
    view.tidy()
    _check(view, caches)
    return len(layers)


@dataclass(frozen=True)
class _Row:
    """Where one row's keys lie, and how many there are: the last one's index, and the count."""

    index: int
    last: str
    total: str


class _Packing:
    """Takes attention apart by rows, whose lengths all layers share."""

    def __init__(self, view: GraphView, batch: int) -> None:
        self.view = view
        view.require_domain(MICROSOFT, 1)
        one = view.add_constant("one", np.array([1], np.int32))
        total = view.add("Cast", [view.add("Add", ["start", WIDTHS])], to=TensorProto.INT32)
        last = view.add("Sub", [total, one])
        lasts, totals = (self._apart(name, batch) for name in (last, total))
        self.rows = [_Row(*row) for row in zip(range(batch), lasts, totals, strict=True)]

    def _apart(self, name: str, batch: int) -> list[str]:
        """Split a vector [B] into its numbers [1]."""
        parts = [self.view.fresh("row") for _ in range(batch)]
        ones = self.view.add_constant("ones", np.ones(batch, np.int64))
        self.view.add("Split", [name, ones], outputs=parts, axis=0)
        return parts

    def split(self, node: onnx.NodeProto) -> None:
        """Give each row attention of its own."""
        view = self.view
        inputs = [self._spread(name) for name in node.input[:_CACHES]]
        done = [self._attend(node, row, [rows[row.index] for rows in inputs]) for row in self.rows]
        joined = view.add("Concat", done, axis=1)
        view.add("Gather", [joined, KEPT], outputs=[node.output[0]], axis=1)

    def _spread(self, name: str) -> list[str]:
        """Return what each row's places of attention read of a value [1, T, N]."""
        if not name:
            return [""] * len(self.rows)
        view = self.view
        parts = [view.fresh("places") for _ in self.rows]
        places = view.add("Gather", [name, SPREAD], axis=1)
        view.add("Split", [places, WIDTHS], outputs=parts, axis=1)
        return parts

    def _attend(self, node: onnx.NodeProto, row: _Row, inputs: Sequence[str]) -> str:
        view = self.view
        caches = [_of_row(name, row.index) for name in node.input[_CACHES:_LENGTHS]]
        outputs = [view.fresh("attention"), *(f"present_{name}" for name in caches)]
        tables = node.input[_LENGTHS + 2 :]
        return view.add(
            _ATTENTION,
            [*inputs, *caches, row.last, row.total, *tables],
            outputs=outputs,
            domain=MICROSOFT,
            **view.attributes(node),
        )


def _of_row(name: str, row: int) -> str:
    return f"{name}.{row}"


def _declare(view: GraphView, caches: set[str], batch: int) -> None:
    """Declare inputs and outputs of the packed graph: KV buffers for each row."""
    present = {f"present_{name}" for name in caches}
    inputs = [_by_row(i, batch, i.name in caches) for i in view.graph.input]
    outputs = [_by_row(o, batch, o.name in present) for o in view.graph.output]
    view.declare_outputs([value for values in outputs for value in values])
    sizes: dict[str, list[int | str]] = {WIDTHS: [batch], SPREAD: ["A"], KEPT: ["T"]}
    del view.graph.input[:]
    view.graph.input.extend(value for values in inputs for value in values)
    view.graph.input.extend(_vector(name, shape) for name, shape in sizes.items())
    start = next(i for i in view.graph.input if i.name == "start")
    start.type.tensor_type.shape.dim[0].dim_value = batch


def _by_row(value: onnx.ValueInfoProto, batch: int, is_cache: bool) -> list[onnx.ValueInfoProto]:
    """Return a value as it is, or once for each row."""
    if not is_cache:
        return [value]
    copies = []
    for row in range(batch):
        copy = onnx.ValueInfoProto()
        copy.CopyFrom(value)
        copy.name = _of_row(value.name, row)
        copies.append(copy)
    return copies


def _vector(name: str, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)


def _hand_in_positions(view: GraphView) -> None:
    """Let positions be an input, where anything but attention reads them.

    ```
    start ─ Unsqueeze ─┐
    0, 1, ... ─ Range ─ Add ─ y      =>      positions [1, T] ─ y
    ```
    """
    for node in view.nodes("Add"):
        makers = [view.maker(name) for name in node.input]
        kinds = [one.op_type if one is not None else "" for one in makers]
        if sorted(kinds) != ["Range", "Unsqueeze"]:
            continue
        lifted = makers[kinds.index("Unsqueeze")]
        if lifted is not None and lifted.input[0] == "start":
            view.replace(node.output[0], POSITIONS)
    if not view.readers(POSITIONS):
        return
    view.graph.input.append(_vector(POSITIONS, [1, "T"]))
    column = view.add_constant("column", np.array([-1, 1], np.int64))
    place = view.add("Reshape", [POSITIONS, column])
    for node in view.nodes("RotaryEmbedding"):
        if node.input[1] == POSITIONS:
            _rotate_alone(view, node, place)


def _rotate_alone(view: GraphView, node: onnx.NodeProto, place: str) -> None:
    """Let a rotation take each token as a row of its own.

    ```
    x [1, T, N] ─ Rotary ─ y      =>      x ─ Reshape [T, 1, N] ─ Rotary ─ Reshape [1, T, N] ─ y
    ```
    Its kernel refuses a sequence longer than its tables, as rows side by side can be.
    """
    lone, row = (view.add_constant("shape", np.array(s)) for s in ([-1, 1, 0], [1, -1, 0]))
    x = view.add("Reshape", [node.input[0], lone])
    turned = view.add(
        "RotaryEmbedding", [x, place, *node.input[2:]], domain=MICROSOFT, **view.attributes(node)
    )
    view.add("Reshape", [turned, row], outputs=[node.output[0]])


def _check(view: GraphView, caches: set[str]) -> None:
    """Refuse a graph that still asks where a token lies in its row, or for a row's buffers."""
    wrong = [n for n in view.readers("start") if WIDTHS not in n.input]
    wrong += view.nodes("Attention", "Range", "CumSum")
    wrong += [reader for name in caches for reader in view.readers(name)]
    if wrong:
        kinds = ", ".join(sorted({n.op_type for n in wrong}))
        raise BuildError(
            "engine.batch is more than 1, and this model cannot run several rows in one pass on a "
            f"CPU: its attention or its positions are of a kind that lowering does not know "
            f"({kinds}). Build it with `batch = 1`"
        )


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


def lower(
    portable: onnx.ModelProto, weights: Mapping[str, LazyTensor], target: OrtTarget
) -> Lowered:
    """Rewrite a portable graph; no weight is read."""
    copy = onnx.ModelProto()
    copy.CopyFrom(portable)
    fix_shapes(copy.graph, target.geometry, 1, target.max_length)
    view = GraphView(copy, weights)
    counts = Counts()
    canonicalize(view, counts)
    _fuse(view, target, counts)
    _emit(view, target, counts)
    if target.batch > 1:
        view.tidy()
        layers = pack(view, target.batch)
        counts["packed"] = layers, layers
    model = view.tidy()
    stamp_oldest_opset(model)
    return Lowered(model, view.weights(), counts.ratios)


def _fuse(view: GraphView, target: OrtTarget, counts: Counts) -> None:
    """Replace groups of operators by the one that does it all."""
    _attend(view, target, counts)
    pairs = gated(view)
    join_siblings(view)
    counts["gate_up"] = sum(view.maker(g.gate) is view.maker(g.up) for g in pairs), len(pairs)
    counts["skip_norm"] = fuse_skip_norm(view)
    drop_reshapes(view)
    fix_reshapes(view)
    cheapen_argmax(view)
    if target.confidence:
        add_confidence(view)


def _attend(view: GraphView, target: OrtTarget, counts: Counts) -> None:
    layers = len(view.nodes("Attention"))
    turning = layers if view.nodes("Cos") else 0
    fusion = fuse_attention(
        view, target.geometry, target.max_length, GroupQueryAttention(view, target.geometry)
    )
    counts["attention"], counts["rotary"] = (fusion.layers, layers), (fusion.rotated, turning)
    counts["qkv"] = fusion.joined, layers


def _emit(view: GraphView, target: OrtTarget, counts: Counts) -> None:
    """Say it in ONNX Runtime's operators."""
    projections = emit_projections(view, target.accuracy_level)
    embeddings = emit_embeddings(view)
    emitted, of = (a + b for a, b in zip(projections, embeddings, strict=True))
    counts["quantized"] = emitted, of
    fold_layouts(view)
