"""Fuse cache update, rotation and attention into GroupQueryAttention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from specrt.geometry import Geometry
from specrt_export.lower.rotary import Rotary, match_rotary, tabulate
from specrt_export.lower.view import GraphView

MICROSOFT = "com.microsoft"


@dataclass
class _Attention:
    """One attention layer of the portable graph, taken apart."""

    node: onnx.NodeProto
    key_update: onnx.NodeProto
    value_update: onnx.NodeProto
    layer: int


def fuse_attention(view: GraphView, geometry: Geometry, max_length: int) -> tuple[int, int]:
    """Replace attention over scattered caches by GroupQueryAttention.

    Returns how many layers were fused, and how many of them with their rotation inside.

    ```
    k ─ rotate ─ TensorScatter(key.i) ───┐
    v ────────── TensorScatter(value.i) ─┼─ Attention(mask) ─ y
    q ─ rotate ──────────────────────────┘
      =>  GroupQueryAttention(q, k, v, key.i, value.i, lengths, cos, sin) ─ y, caches
    ```
    Holds at batch 1 only: the CPU kernel refuses a wider batch of several tokens with a past.
    """
    found = [a for node in view.nodes("Attention") if (a := _take_apart(view, node))]
    if not found:
        return 0, 0
    view.require_domain(MICROSOFT, 1)
    lengths = _lengths(view)
    tables: dict[tuple[str, str], tuple[str, str] | None] = {}
    rotations = _Rotations(view, tables, max_length)
    rotated = [_fuse(view, attention, geometry, lengths, rotations) for attention in found]
    return len(found), sum(rotated)


def _take_apart(view: GraphView, node: onnx.NodeProto) -> _Attention | None:
    key, value = (view.maker(name, "TensorScatter") for name in node.input[1:3])
    if key is None or value is None or len(node.input) < 4:
        return None
    slot, _, index = key.input[0].partition(".")
    if slot != "key" or value.input[0] != f"value.{index}":
        return None
    return _Attention(node, key, value, int(index))


def _lengths(view: GraphView) -> list[str]:
    """Add the two lengths GroupQueryAttention reads: last filled index, and filled count."""
    one = view.add_constant("one", np.array([1], np.int64))
    width = view.add("Shape", ["input_ids"], start=1, end=2)
    total = view.add("Add", ["start", width])
    last = view.add("Sub", [total, one])
    seqlens = view.add("Cast", [last], to=onnx.TensorProto.INT32)
    scalar = view.add("Squeeze", [total])
    count = view.add("Cast", [scalar], to=onnx.TensorProto.INT32)
    return [seqlens, count]


@dataclass
class _Rotations:
    """Rotation tables, made once for every layer that shares them."""

    view: GraphView
    tables: dict[tuple[str, str], tuple[str, str] | None]
    max_length: int

    def table(self, rotary: Rotary) -> tuple[str, str] | None:
        """Return the names of the [max_length, D/2] tables, or None where halves differ."""
        key = (rotary.cos, rotary.sin)
        if key not in self.tables:
            halves = [_half(t) for t in tabulate(self.view.model, rotary, self.max_length)]
            cos, sin = halves
            self.tables[key] = (
                (self.view.add_constant("cos", cos), self.view.add_constant("sin", sin))
                if cos is not None and sin is not None
                else None
            )
        return self.tables[key]


def _half(table: NDArray[np.float32]) -> NDArray[np.float32] | None:
    first, second = np.split(table, 2, axis=-1)
    return first if np.array_equal(first, second) else None


def _fuse(
    view: GraphView,
    attention: _Attention,
    geometry: Geometry,
    lengths: list[str],
    rotations: _Rotations,
) -> bool:
    query, key = attention.node.input[0], attention.key_update.input[1]
    value = attention.value_update.input[1]
    tables = None
    turned_query, turned_key = match_rotary(view, query), match_rotary(view, key)
    # The kernel refuses to rotate heads of any other size; their rotation stays outside.
    fits = geometry.head_dim % 16 == 0
    if fits and turned_query and turned_key and turned_query.cos == turned_key.cos:
        tables = rotations.table(turned_query)
        if tables:
            query, key = turned_query.x, turned_key.x
    packed = [_packed(view, name) for name in (query, key, value)]
    caches = [attention.key_update.input[0], attention.value_update.input[0]]
    updated = [attention.key_update.output[0], attention.value_update.output[0]]
    joined = view.fresh("attention")
    attributes = {a.name: helper.get_attribute_value(a) for a in attention.node.attribute}
    window = geometry.windows[attention.layer]
    view.add(
        "GroupQueryAttention",
        [*packed, *caches, *lengths, *(tables or ())],
        outputs=[joined, *updated],
        domain=MICROSOFT,
        num_heads=geometry.heads,
        kv_num_heads=geometry.kv_heads,
        do_rotary=int(tables is not None),
        scale=attributes.get("scale", geometry.head_dim**-0.5),
        softcap=attributes.get("softcap", 0.0),
        local_window_size=window or -1,
    )
    _hand_over(view, attention.node.output[0], joined, geometry)
    return tables is not None


def _packed(view: GraphView, name: str) -> str:
    """Return a value [B, S, H·D] for one [B, H, S, D], undoing a reshape where there is one."""
    transpose = view.maker(name, "Transpose")
    shape = view.add_constant("shape", np.array([0, 0, -1], np.int64))
    if transpose is not None and list(transpose.attribute[0].ints) == [0, 2, 1, 3]:
        reshape = view.maker(transpose.input[0], "Reshape")
        made_by = reshape and view.maker(reshape.input[0])
        if reshape and made_by and made_by.op_type in ("MatMul", "Add"):
            return str(reshape.input[0])
        return view.add("Reshape", [transpose.input[0], shape])
    turned = view.add("Transpose", [name], perm=[0, 2, 1, 3])
    return view.add("Reshape", [turned, shape])


def _hand_over(view: GraphView, old: str, joined: str, geometry: Geometry) -> None:
    """Give the readers of an attention output [B, H, S, D] the joined heads [B, S, H·D]."""
    transpose = view.only_reader(old, "Transpose")
    reshape = view.only_reader(transpose.output[0], "Reshape") if transpose is not None else None
    if transpose is not None and reshape is not None:
        # Joined heads are what the reshape makes, unless it also folds batch and width together.
        op = "Identity" if _rank(view, reshape.input[1]) == 3 else "Reshape"
        inputs = [joined] if op == "Identity" else [joined, reshape.input[1]]
        view.add(op, inputs, outputs=[reshape.output[0]])
        return
    heads = view.add_constant("heads", np.array([0, 0, geometry.heads, -1], np.int64))
    split = view.add("Reshape", [joined, heads])
    view.add("Transpose", [split], outputs=[old], perm=[0, 2, 1, 3])


def _rank(view: GraphView, shape: str) -> int | None:
    """Return how many sizes a shape holds, where the graph says so."""
    constant, joined = view.constant(shape), view.maker(shape, "Concat")
    if constant is not None:
        return len(constant)
    return len(joined.input) if joined is not None else None
