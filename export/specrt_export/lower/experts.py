"""Mixtures of experts: found, and lowered to the operator of the CPU kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.lower.projections import (
    SPECRT,
    WeightMatrix,
    find_matrix,
    join_matrices,
    of_matrices,
)
from specrt_export.lower.tiles import STRIP, TILE, add_tiles, alternating
from specrt_export.lower.view import GraphView
from specrt_export.portable.experts_function import EXPERTS


def lower_experts(view: GraphView) -> int:
    """Replace the functions of portable graphs by the kernels' operator; return how many.

    ```
    x, named, shares, gate_up, down ─ SiluExperts ─ y
    =>  x, named, shares, tiles of gate_up, tiles of down ─ Experts ─ y
    ```
    Each expert begins with a strip. Raises: BuildError for experts stored in several ways.
    """
    activations = {name: activation for activation, name in EXPERTS.items()}
    nodes = view.nodes(*activations)
    for node in nodes:
        experts = view.attributes(node)["experts"]
        gate_up, down = (_matrix(view, node, index) for index in (3, 4))
        inner, width = down.inputs, down.outputs // experts
        tiles, stated = add_tiles(view, _in_turns(gate_up, inner))
        down_tiles, down_stated = add_tiles(view, _in_strips(down, width))
        view.add(
            "Experts", [*node.input[:3], tiles, down_tiles], outputs=list(node.output),
            domain=SPECRT, activation=activations[node.op_type], exact=0, experts=experts,
            H=width, I=inner, block_size=stated["block_size"], format=stated["format"],
            down_block_size=down_stated["block_size"], down_format=down_stated["format"],
        )  # fmt: skip
    if nodes:
        del view.model.functions[:]
        view.require_domain(SPECRT, 1)
        view.tidy()
    return len(nodes)


def _matrix(view: GraphView, node: onnx.NodeProto, index: int) -> WeightMatrix:
    """Return the rows of all experts, as one matrix of the strips that a checkpoint has."""
    name = node.input[index]
    concat = view.maker(name, "Concat")
    strips = [name] if concat is None else list(concat.input)
    parts = [part for part in (find_matrix(view, strip) for strip in strips) if part is not None]
    if len(parts) < len(strips) or not all(parts[0].fits(part) for part in parts):
        raise BuildError(
            f"the experts of {node.name} are stored in several ways, which the kernels do not read "
            "as one; expected one precision and block for all of a layer: take another checkpoint"
        )
    return join_matrices(parts, f"{node.name}.{index}")


def _in_turns(gate_up: WeightMatrix, inner: int) -> WeightMatrix:
    """Return gates and ups of experts in turns of a tile."""
    return of_matrices([gate_up], lambda parts, _: alternating(
        *(_rows(parts[0], 2 * inner, first, inner, STRIP * TILE // 2) for first in (0, inner))
    ))  # fmt: skip


def _in_strips(down: WeightMatrix, width: int) -> WeightMatrix:
    return of_matrices([down], lambda parts, _: _rows(parts[0], width, 0, width, STRIP * TILE))


def _rows(source: LazyTensor, of: int, first: int, count: int, whole: int) -> LazyTensor:
    """Return `count` rows from `first` on of every `of`, and zeros up to a multiple of `whole`.

    Shapes: source [experts * of, ..].
    """
    padded = -(-count // whole) * whole

    def rows(begin: int, end: int) -> NDArray[Any]:
        pieces = []
        while begin < end:
            expert, place = divmod(begin, padded)
            low, last = expert * of + first + min(place, count), min(end - expert * padded, padded)
            there = source.rows(low, expert * of + first + min(last, count))
            missing = last - place - len(there)
            pieces.append(np.pad(there, [(0, missing)] + [(0, 0)] * (there.ndim - 1)))
            begin += last - place
        return np.concatenate(pieces) if pieces else source.rows(0, 0)

    shape = (source.length // of * padded, *source.shape[1:])
    name = f"{source.name}[{first}::{of}]"
    return replace(source, name=name, shape=shape, rows=rows, bytes_of="")
