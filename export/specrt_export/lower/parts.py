"""Take a projection whose output is cut into parts apart, so that each part can be matched."""

from __future__ import annotations

import numpy as np
import onnx

from specrt_export.lower.linear import Projection, add_projection, find_projection
from specrt_export.lower.matrix import Matrix, join_matrices
from specrt_export.lower.shapes import Shapes
from specrt_export.lower.stored import Stored, joined, taken
from specrt_export.lower.view import GraphView


def split_projections(view: GraphView) -> None:
    """Make a projection of each part that is cut from one; siblings are joined again later.

    ```
    x ─ Projection ─┬─ Slice ─ a           =>      x ─┬─ Projection (some rows of W) ─ a
                    └─ Slice ─ b, or Split            └─ Projection (other rows) ─ b
    ```
    """
    shapes = Shapes(view)
    for node in view.nodes("Slice", "Split"):
        projection = find_projection(view, node.input[0])
        whole = shapes.dims(node.input[0])
        if projection is None or whole is None or not _is_cut(view, node.input[0]):
            continue
        for output in list(node.output):
            bounds = shapes.part(node, output)
            if bounds is not None and bounds[0] == len(whole) - 1:
                _, begin, end = bounds
                matrix = projection.matrix.taken(begin, end)
                bias = projection.bias and taken(projection.bias, begin, end)
                add_projection(view, projection.x, matrix, bias, output)
    view.tidy()


def _is_cut(view: GraphView, name: str) -> bool:
    return all(reader.op_type in ("Slice", "Split") for reader in view.readers(name))


def split_heads(view: GraphView) -> None:
    """Sort the rows of a projection that holds query, key and value of each head together.

    ```
    x ─ Projection ─ Reshape(B, S, H, 3 · D) ─ Transpose ─ Split ─ q, k, v

      =>  x ─ Projection (rows of all queries) ─ Reshape(B, S, H, D) ─ Transpose ─ q, and so on
    ```
    """
    shapes = Shapes(view)
    for split in view.nodes("Split"):
        transpose = view.maker(split.input[0], "Transpose")
        reshape = transpose and view.maker(transpose.input[0], "Reshape")
        projection = reshape and find_projection(view, reshape.input[0])
        if not transpose or not reshape or not projection or not _is_even(view, split):
            continue
        dims = shapes.dims(reshape.output[0])
        if dims is None or list(transpose.attribute[0].ints) != [0, 2, 1, 3]:
            continue
        heads, width = dims[-2:]
        if isinstance(heads, int) and isinstance(width, int):
            for place, output in enumerate(list(split.output)):
                size = width // len(split.output)
                rows = [h * width + place * size for h in range(heads)]
                _add_heads(view, projection, rows, size, output)
    view.tidy()


def _is_even(view: GraphView, split: onnx.NodeProto) -> bool:
    axis = view.attributes(split).get("axis", 0)
    sizes = view.constant(split.input[1]) if len(split.input) > 1 else None
    even = len(split.input) < 2 or (sizes is not None and len(set(sizes.tolist())) == 1)
    return axis in (3, -1) and even and len(view.readers(split.input[0])) == 1


def _add_heads(
    view: GraphView, projection: Projection, rows: list[int], size: int, output: str
) -> None:
    """Project to the heads that begin at some rows, as `output` [B, H, S, size]."""
    name = f"{projection.matrix.values.name}.heads{rows[0]}"
    parts: list[Matrix] = [projection.matrix.taken(row, row + size) for row in rows]
    bias: Stored | None = None
    if projection.bias is not None:
        pieces = [taken(projection.bias, row, row + size) for row in rows]
        bias = joined(pieces, f"{projection.bias.name}.heads{rows[0]}")
    made = add_projection(view, projection.x, join_matrices(parts, name), bias)
    shape = view.add_constant("heads", np.array([0, 0, len(rows), size], np.int64))
    split = view.add("Reshape", [made, shape])
    view.add("Transpose", [split], outputs=[output], perm=[0, 2, 1, 3])
