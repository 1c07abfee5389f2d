"""Rewrites of lowered graphs that are tried, and are in no bundle: a GPU says whether they pay."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from specrt.bundle import Geometry

EXTENT = "extent"
"""The input that only its shape is read of: how many positions of the buffers are."""


def filled(model: onnx.ModelProto, geometry: Geometry) -> None:
    """Let attention read the first positions of the buffers only, as many as an input is long.

    ```
    present_key.i, present_value.i [B, Hkv, M, D] ─ Slice [:, :, :E] ─┐
    mask [B, 1, S, M] ───────────────────────────── Slice [..., :E] ─ Attention
    extent [E] ─ Shape ─────────────────────────────┘
    ```
    Updates write into the whole buffers as before.
    """
    graph = model.graph
    graph.input.append(helper.make_tensor_value_info(EXTENT, TensorProto.INT64, ["E"]))
    for name, number in (("zero", 0), ("positions", 2), ("columns", 3)):
        graph.initializer.append(_constant(f"filled.{name}", [number]))
    first = [helper.make_node("Shape", [EXTENT], ["filled.size"])]
    cut: dict[tuple[str, int], str] = {}

    def sliced(name: str, axis: int) -> str:
        if (name, axis) not in cut:
            cut[name, axis] = f"filled.{len(cut)}"
            where = "filled.positions" if axis == 2 else "filled.columns"
            inputs = [name, "filled.zero", "filled.size", where]
            nodes.append(helper.make_node("Slice", inputs, [cut[name, axis]]))
        return cut[name, axis]

    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Attention":
            node.input[1], node.input[2] = sliced(node.input[1], 2), sliced(node.input[2], 2)
            node.input[3] = sliced(node.input[3], 3)
        nodes.append(node)
    _replace(graph, [*first, *nodes])


def grouped(model: onnx.ModelProto, geometry: Geometry) -> None:
    """Let the queries that share keys be rows of one head, so that keys are not repeated.

    ```
    q [B, H, S, D] ─ Reshape [B, Hkv, G · S, D] ─┐
    mask [B, 1, S, M] ─ G times [B, 1, G · S, M] ─ Attention ─ Reshape [B, H, S, D]
    ```
    """
    group = geometry.heads // geometry.kv_heads
    if group == 1:
        return
    graph = model.graph
    for name, heads in (("folded", geometry.kv_heads), ("apart", geometry.heads)):
        graph.initializer.append(_constant(f"grouped.{name}", [0, heads, -1, geometry.head_dim]))
    nodes: list[onnx.NodeProto] = []
    tiled: dict[str, str] = {}
    for number, node in enumerate(graph.node):
        if node.op_type != "Attention":
            nodes.append(node)
            continue
        mask = node.input[3]
        if mask not in tiled:
            tiled[mask] = f"grouped.mask.{len(tiled)}"
            nodes.append(helper.make_node("Concat", [mask] * group, [tiled[mask]], axis=2))
        query, found = f"grouped.query.{number}", f"grouped.found.{number}"
        nodes.append(helper.make_node("Reshape", [node.input[0], "grouped.folded"], [query]))
        made = node.output[0]
        node.input[0], node.input[3], node.output[0] = query, tiled[mask], found
        nodes.append(node)
        nodes.append(helper.make_node("Reshape", [found, "grouped.apart"], [made]))
    _replace(graph, nodes)


def _replace(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _constant(name: str, numbers: list[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)
