"""Layers with a recurrent state: found, and lowered to the operator of the CPU kernels."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from specrt.engine.ort.kernels import missing_kernels
from specrt.errors import BuildError
from specrt.geometry import BASE, RECURRENT, STATE, Geometry
from specrt_export.lower.projections import SPECRT
from specrt_export.lower.view import GraphView
from specrt_export.portable.state_function import RECURRENCE


def lower_recurrences(
    view: GraphView, geometry: Geometry, rows: str, positions: str, lag: int
) -> int:
    """Replace the function of portable graphs by the kernels' operator; return how many.

    ```
    q, k, v, g, beta, state.i, factors.i, start, base ─ StateRecurrence ─ y
    =>  q, k, v, g, beta, state.i, factors.i, base.i, rows, positions ─ Recurrence ─ y
    ```
    The operator itself keeps how far each layer's state holds a row. States lag `lag` positions.
    """
    nodes = view.nodes(RECURRENCE)
    for node in nodes:
        *fed, state, factors, _, _ = node.input
        index = int(state.removeprefix(f"{STATE}."))
        memory = geometry.memories[index]
        assert memory.kind == RECURRENT, "a state is of a recurrent layer"
        base = f"{BASE}.{index}"
        view.add(
            "Recurrence", [*fed, state, factors, base, rows, positions],
            outputs=[*node.output, f"present_{base}"], domain=SPECRT, lag=lag,
            num_heads=memory.kv_heads, key_heads=memory.key_heads, key_size=memory.key_width,
            value_size=memory.value_width, **view.attributes(node),
        )  # fmt: skip
        view.graph.input.append(helper.make_tensor_value_info(base, TensorProto.INT64, ["B"]))
        view.add_output(helper.make_tensor_value_info(f"present_{base}", TensorProto.INT64, ["B"]))
    if nodes:
        del view.model.functions[:]
        view.require_domain(SPECRT, 1)
        view.tidy()
    return len(nodes)


def refuse_recurrences(portable: onnx.ModelProto) -> None:
    """Refuse a graph with recurrent states, where no kernel of specrt runs them.

    Raises: BuildError.
    """
    if any(node.op_type == RECURRENCE for node in portable.graph.node):
        lacks = missing_kernels()
        why = f"; they are missing here: {lacks}" if lacks else ""
        raise BuildError(
            f"layers with a recurrent state run on specrt's CPU kernels alone (backend "
            f'"ort-cpu"){why}'
        )
