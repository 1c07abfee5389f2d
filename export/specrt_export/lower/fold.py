"""Compute what depends on weights alone while an engine is written, not in every pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt_export.lower.shapes import Dims, Shapes
from specrt_export.lower.stored import Stored, as_float, computed, dequantized, transposed
from specrt_export.lower.view import GraphView

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
            _fold_codes(view, node, source)
        elif node.op_type == "Transpose":
            _fold_transpose(view, node, source)
        elif source.onnx_type == onnx.TensorProto.FLOAT:
            dims = shapes.dims(node.output[0])
            _fold(view, node, dims, lambda array, *_, to=dims: array.reshape(to))
    view.tidy()


def _fold_transpose(view: GraphView, node: onnx.NodeProto, source: Stored) -> None:
    perm = list(view.attributes(node).get("perm", (1, 0)))
    if source.onnx_type != onnx.TensorProto.FLOAT:
        return
    if perm == [1, 0]:
        view.replace(node.output[0], view.add_stored(transposed(source)))
        return
    dims = tuple(source.shape[axis] for axis in perm)
    _fold(view, node, dims, lambda array: array.transpose(perm))


def _fold_codes(view: GraphView, node: onnx.NodeProto, codes: Stored) -> None:
    scales = view.stored(node.input[1])
    block = view.attributes(node).get("block_size", 0)
    if scales is not None and len(node.input) == 2 and block:
        view.replace(node.output[0], view.add_stored(dequantized(codes, scales, block)))


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
    made = computed(f"{node.output[0]}/folded", shape, lambda: compute(*(load() for load in loads)))
    view.replace(node.output[0], view.add_stored(made))


def _loader(view: GraphView, name: str) -> Callable[[], NDArray[Any]]:
    source, constant = view.stored(name), view.constant(name)
    if source is not None:
        return source.load
    assert constant is not None
    return lambda: constant
