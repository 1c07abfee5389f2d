"""One row more, which nobody reads, in products that are fast from two rows on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from specrt_export.lower.shapes import Shapes
from specrt_export.lower.view import GraphView

_ROW_BY_ROW = (
    "Add", "Cast", "Div", "Gelu", "Identity", "LayerNormalization", "Mul", "RMSNormalization",
    "Relu", "Sigmoid", "Sub", "Tanh",
)  # fmt: skip


class Partners:
    """Values with their first row once more behind the last: what products with partners read.

    ```
    x [B, S, K] ─┬────────── Concat ─ partnered x [B, S + 1, K]
                 └ first row ─┘
    ```
    The row is added once, to the tokens, and stays from operator to operator where each works row
    by row; only attention takes it away and needs it back.
    """

    def __init__(self, view: GraphView) -> None:
        self._view = view
        shapes = Shapes(view)  # as long as projections say how wide they are
        self._dims = {name: shapes.dims(name) for node in view.nodes() for name in node.output}
        self._made: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the value with a partner."""
        stack = [name]
        while stack:
            value = stack[-1]
            needed = [] if value in self._made else self._rows_of(value)
            missing = [i for i in needed if i not in self._made]
            stack.extend(missing)
            if not missing:
                if value not in self._made:
                    self._made[value] = self._add(value)
                stack.pop()
        return self._made[name]

    def repeated(self, name: str) -> str:
        """Return the value with a partner, added at this very place."""
        self._made[name] = self._repeated(name, self._axis(name))
        return self._made[name]

    def drop(self, partnered: str, name: str) -> None:
        """Let a value be another one without its partner."""
        bounds = [self._constant(n) for n in (0, -1, self._axis(name))]
        self._view.add("Slice", [partnered, *bounds], outputs=[name])
        self._made[name] = partnered

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
            return view.add("Gather", [self._made[node.input[0]], more], axis=1)
        if node is not None and node.op_type == "Split":
            return self._split(node, name)
        if node is not None and rows:
            inputs = [self._made.get(i, i) if i in rows else i for i in node.input]
            return view.add(node.op_type, inputs, **view.attributes(node))
        if node is not None and node.op_type == "Gather" and node.input[1] == "input_ids":
            more = self._repeated("input_ids", axis=1)
            return view.add("Gather", [node.input[0], more], **view.attributes(node))
        return self._repeated(name, self._axis(name))

    def _split(self, node: onnx.NodeProto, name: str) -> str:
        parts = {output: self._view.fresh("part") for output in node.output}
        inputs = [self._made[node.input[0]], *node.input[1:]]
        said = self._view.attributes(node)
        self._view.add("Split", inputs, outputs=list(parts.values()), **said)
        self._made |= parts
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


def _cuts_columns(said: dict[str, Any], op_type: str) -> bool:
    return op_type == "Split" and said.get("axis", 0) == -1
