"""Let row by row operators read [B, S, D] as it is, where a model folds batch and width."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper

from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView

_ROW_BY_ROW = """
    Add Gelu Identity LayerNormalization Mul Projection Relu Sigmoid SimplifiedLayerNormalization
    Sub Tanh
"""


def unfold_rows(view: GraphView) -> None:
    """Move reshapes to [B · S, D] behind the row by row operators that read them.

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
        made = view.add(node.op_type, sources, domain=node.domain, **attributes)
        flat = view.add_constant("flat", np.array([-1, dims[-1]], np.int64))
        view.add("Reshape", [made, flat], outputs=[node.output[0]])
    view.tidy()


def drop_reshapes(view: GraphView) -> None:
    """Drop reshapes to the shape that a value had before.

    ```
    x [B, S, D] ─ Reshape ─ (Reshape ─) y [B, S, D]      =>      x ─ y
    ```
    """
    shapes = Shapes(view)
    for node in view.nodes("Reshape"):
        wanted = shapes.dims(node.output[0])
        for source in _before(view, node):
            if wanted is not None and shapes.dims(source) == wanted:
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
    """Return the inputs [B, S, D] that stand behind the inputs [B · S, D] of a node."""
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
