"""Brings what models write in many ways into one form, before a backend's own rewrites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from specrt.geometry import BASE, Geometry
from specrt_export.lower.attention import fold_query_scale
from specrt_export.lower.lazy_tensor import (
    LazyTensor,
    as_float,
    computed,
    joined,
    taken,
    transposed,
)
from specrt_export.lower.norm import fuse_rms_norm, lift_transposes
from specrt_export.lower.projections import (
    Projection,
    WeightMatrix,
    add_projection,
    find_codes,
    find_matrix,
    find_projection,
    find_projections,
    join_matrices,
)
from specrt_export.lower.shapes import Dims, Shapes
from specrt_export.lower.view import Counts, GraphView

_ROW_BY_ROW = """
    Add Gelu Identity LayerNormalization Mul Projection Relu Sigmoid SimplifiedLayerNormalization
    Sub Tanh
"""


def unfold_rows(view: GraphView) -> None:
    """Move reshapes to [B · S, D] after the row by row operators that read them.

    ```
    x ─ Reshape(-1, D) ─ op ─ y          =>      x ─ op ─ Reshape(-1, D) ─ y
    ```
    Where one meets the reshape back, `drop_reshapes` drops both.
    """
    shapes = Shapes(view)
    for node in view.nodes(*_ROW_BY_ROW.split()):
        sources = _unfolded(view, shapes, node)
        if sources is None:
            continue
        dims = shapes.dims(node.output[0])
        if dims is None or not isinstance(dims[-1], int):
            continue
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        output = view.add(node.op_type, sources, domain=node.domain, **attributes)
        flat = view.add_constant("flat", np.array([-1, dims[-1]], np.int64))
        view.add("Reshape", [output, flat], outputs=[node.output[0]])
    view.tidy()


def drop_reshapes(view: GraphView) -> None:
    """Drop reshapes to the shape that a value had before.

    ```
    x [B, S, D] ─ Reshape ─ (Reshape ─) y [B, S, D]      =>      x ─ y
    ```
    """
    shapes = Shapes(view)
    for node in view.nodes("Reshape"):
        dims = shapes.dims(node.output[0])
        for source in _before(view, node):
            if dims is not None and shapes.dims(source) == dims:
                view.replace(node.output[0], source)
                break
    view.tidy()


def fix_reshapes(view: GraphView) -> None:
    """Write the shapes down that reshapes compute from the sizes of inputs.

    ```
    x, (input_ids ─ Shape ─ ... ─ Concat) ─ Reshape      =>      x, [1, -1, 8, 64] ─ Reshape
    ```
    """
    shapes = Shapes(view)
    for node in view.nodes("Reshape"):
        dims = shapes.dims(node.output[0])
        if dims is None or view.constant(node.input[1]) is not None:
            continue
        free = [d for d in dims if isinstance(d, str)]
        if len(free) <= 1:
            target = np.array([d if isinstance(d, int) else -1 for d in dims], np.int64)
            inputs = [node.input[0], view.add_constant("shape", target)]
            view.add("Reshape", inputs, outputs=[node.output[0]])
    view.tidy()


def _unfolded(view: GraphView, shapes: Shapes, node: onnx.NodeProto) -> list[str] | None:
    """Return the inputs [B, S, D] that stand after the inputs [B · S, D] of a node."""
    sources, leading = [], set()
    for name in node.input:
        if view.stored(name) or view.constant(name) is not None or _is_matrix(view, name):
            sources.append(name)
            continue
        reshape = view.maker(name, "Reshape")
        before = shapes.dims(reshape.input[0]) if reshape is not None else None
        after = shapes.dims(name)
        if reshape is None or before is None or after is None:
            return None
        if (len(before), len(after)) != (3, 2) or before[-1] != after[-1]:
            return None
        sources.append(reshape.input[0])
        leading.add(before[:2])
    return sources if len(leading) == 1 else None


def _is_matrix(view: GraphView, name: str) -> bool:
    return view.maker(name, "DequantizeLinear") is not None


def _before(view: GraphView, node: onnx.NodeProto | None) -> Iterator[str]:
    """Yield what went into a reshape, and into the reshapes before it."""
    while node is not None:
        yield node.input[0]
        node = view.maker(node.input[0], "Reshape")


_TURNED = [0, 2, 1]


def sink_transposes(view: GraphView) -> None:
    """Move a change of channels and positions after what is cut and multiplied, where two meet.

    ```
    x ─ Transpose ─ Split ─┬─ Mul ─ Transpose ─ y      =>      x ─ Split ─┬─ Mul ─ y
                           └──┘                                           └──┘
    ```
    """
    for node in view.nodes("Split", "Mul"):
        before = [_turned(view, name) for name in node.input[: 2 - (node.op_type == "Split")]]
        if not all(before):
            continue
        attributes = view.attributes(node)
        if node.op_type == "Split":
            rank_axis = attributes.get("axis", 0) % 3
            attributes["axis"] = _TURNED[rank_axis]
        made = [view.fresh("part") for _ in node.output]
        view.add(node.op_type, [*map(str, before), *node.input[len(before) :]], outputs=made,
                 **attributes)  # fmt: skip
        for name, output in zip(made, list(node.output), strict=True):
            view.add("Transpose", [name], outputs=[output], perm=_TURNED)
    for node in view.nodes("Transpose"):
        source = _turned(view, node.input[0])
        if source and view.attributes(node).get("perm") == _TURNED:
            view.replace(node.output[0], source)
    view.tidy()


def _turned(view: GraphView, name: str) -> str | None:
    """Return what a value is, with channels and positions changed, if that is how it is made."""
    maker = view.maker(name, "Transpose")
    is_turned = maker is not None and view.attributes(maker).get("perm") == _TURNED
    return maker.input[0] if maker is not None and is_turned else None


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
    parts: list[WeightMatrix] = [projection.matrix.taken(row, row + size) for row in rows]
    bias: LazyTensor | None = None
    if projection.bias is not None:
        pieces = [taken(projection.bias, row, row + size) for row in rows]
        bias = joined(pieces, f"{projection.bias.name}.heads{rows[0]}")
    projected = add_projection(view, projection.x, join_matrices(parts, name), bias)
    shape = view.add_constant("heads", np.array([0, 0, len(rows), size], np.int64))
    split = view.add("Reshape", [projected, shape])
    view.add("Transpose", [split], outputs=[output], perm=[0, 2, 1, 3])


def fuse_row_selection(view: GraphView) -> int:
    """Replace an indexing by `rows` that goes through GatherND; return how many.

    ```
    x ─ Transpose ─ GatherND(rows) ─ Transpose ─ y      =>      x ─ Gather(rows, axis 1) ─ y
    ```
    """
    fused = 0
    for gather in view.nodes("GatherND"):
        before = view.maker(gather.input[0], "Transpose")
        after = view.only_reader(gather.output[0], "Transpose")
        if before is None or after is None or not view.depends_on(gather.input[1], ["rows"]):
            continue
        if all(list(t.attribute[0].ints) == [1, 0, 2] for t in (before, after)):
            view.add("Gather", [before.input[0], "rows"], outputs=[after.output[0]], axis=1)
            fused += 1
    return fused


_ELEMENTWISE: dict[str, Callable[..., NDArray[Any]]] = {
    "Add": np.add,
    "Div": np.divide,
    "Exp": np.exp,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Reciprocal": np.reciprocal,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
}


def fold_values(view: GraphView) -> None:
    """Fold casts of weights to fp32, and arithmetic on them such as Gemma's `1 + w`.

    ```
    w (bf16) ─ Cast ─ y         =>      w/float ─ y
    w ─ Add 1 ─ y               =>      y, computed when it is written
    ```
    """
    shapes = Shapes(view)
    for node in view.nodes("Cast", *_ELEMENTWISE):
        source = view.stored(node.input[0])
        if node.op_type == "Cast":
            if source is not None and view.attributes(node)["to"] == onnx.TensorProto.FLOAT:
                view.replace(node.output[0], view.add_stored(as_float(source)))
        elif any(view.stored(i) for i in node.input) and all(
            _is_known(view, i) for i in node.input
        ):
            _fold(view, node, shapes.dims(node.output[0]), _ELEMENTWISE[node.op_type])
    view.tidy()


def fold_layouts(view: GraphView) -> None:
    """Fold what is left of transposed, reshaped and quantized weights.

    ```
    w ─ Transpose ─ y                           =>      w/transposed ─ y
    codes, scales ─ DequantizeLinear ─ y        =>      codes/float ─ y
    ```
    """
    shapes = Shapes(view)
    for node in view.nodes("Transpose", "Reshape", "DequantizeLinear"):
        source = view.stored(node.input[0])
        if source is None:
            continue
        if node.op_type == "DequantizeLinear":
            _fold_codes(view, node)
        elif node.op_type == "Transpose":
            _fold_transpose(view, node, source)
        elif source.onnx_type == onnx.TensorProto.FLOAT:
            dims = shapes.dims(node.output[0])
            _fold(view, node, dims, lambda array, *_, to=dims: array.reshape(to))
    view.tidy()


def _fold_transpose(view: GraphView, node: onnx.NodeProto, source: LazyTensor) -> None:
    perm = list(view.attributes(node).get("perm", (1, 0)))
    if source.onnx_type != onnx.TensorProto.FLOAT:
        return
    if perm == [1, 0]:
        view.replace(node.output[0], view.add_stored(transposed(source)))
        return
    dims = tuple(source.shape[axis] for axis in perm)
    _fold(view, node, dims, lambda array: array.transpose(perm))


def _fold_codes(view: GraphView, node: onnx.NodeProto) -> None:
    matrix = find_matrix(view, node.output[0])
    if matrix is not None:
        view.replace(node.output[0], view.add_stored(matrix.floats()))


def _is_known(view: GraphView, name: str) -> bool:
    source = view.stored(name)
    if source is not None:
        return source.onnx_type == onnx.TensorProto.FLOAT
    return view.constant(name) is not None


def _fold(
    view: GraphView, node: onnx.NodeProto, dims: Dims | None, compute: Callable[..., NDArray[Any]]
) -> None:
    if dims is None or any(isinstance(d, str) for d in dims):
        return
    loads = [_loader(view, name) for name in node.input]
    shape = tuple(int(d) for d in dims)
    folded = computed(
        f"{node.output[0]}/folded", shape, lambda: compute(*(load() for load in loads))
    )
    view.replace(node.output[0], view.add_stored(folded))


def _loader(view: GraphView, name: str) -> Callable[[], NDArray[Any]]:
    source, constant = view.stored(name), view.constant(name)
    if source is not None:
        return source.load
    assert constant is not None
    return lambda: constant


_BY_ROW = (
    "input_ids", "start", BASE, "hidden", "context", "previous", "logits", "argmax", "feature",
    "state", "confidence", "markov", "markov_confidence", "input_features", "length",
    "source_length", "cross_key", "cross_value",
)  # fmt: skip

CROSS_KEY, CROSS_VALUE = "cross_key", "cross_value"
"""What values with the cross keys and values of a layer are called before its number."""


def is_cross(name: str) -> bool:
    """Tell whether a value is the cross keys or the cross values of a layer."""
    return name.partition(".")[0] in (CROSS_KEY, CROSS_VALUE)


def fix_shapes(
    graph: onnx.GraphProto, geometry: Geometry, batch: int, max_length: int, max_source: int = 0
) -> None:
    """Fix the batch and the length of the KV buffers; the width stays free.

    With `max_source` also the length of cross keys and values.
    """
    shapes = geometry.shapes(batch, max_length)
    for value in [*graph.input, *graph.output]:
        dims = value.type.tensor_type.shape.dim
        sizes = shapes.get(value.name.removeprefix("present_"))
        if sizes is not None:
            for dim, size in zip(dims, sizes, strict=True):
                dim.dim_value = size
        elif value.name.partition(".")[0] in _BY_ROW:
            dims[0].dim_value = batch
            if max_source and is_cross(value.name):
                dims[2].dim_value = max_source


def _count_rows_once(view: GraphView) -> None:
    """Take the number of rows from `start`, whichever input a trace took it from."""
    of_rows = {value.name for value in view.graph.input} - {"rows"}
    if "start" not in of_rows:
        return
    for node in view.nodes("Shape"):
        ends = view.attributes(node)
        if node.input[0] in of_rows and (ends.get("start", 0), ends.get("end")) == (0, 1):
            node.input[0] = "start"
    view.tidy()


def canonicalize(view: GraphView, counts: Counts) -> None:
    """Find projections, norms, heads and scales, whatever they were exported as."""
    find_codes(view)
    fold_values(view)
    _count_rows_once(view)
    counts["linear"] = find_projections(view)
    counts["rms_norm"] = fuse_rms_norm(view)
    fuse_row_selection(view)
    unfold_rows(view)
    drop_reshapes(view)
    sink_transposes(view)
    split_projections(view)
    split_heads(view)
    lift_transposes(view)
    fold_query_scale(view)
