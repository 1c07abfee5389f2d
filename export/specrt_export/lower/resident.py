"""Keep every value of a pass on the device: nothing is computed from sizes on the host."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from specrt.errors import BuildError
from specrt_export.lower.view import GraphView

LENGTHS, STEPS = "lengths", "steps"
"""Inputs of an engine that stays on its device: `lengths` [B] int32, the index of each row's last
key after the pass, and `steps` [S] int64, 0 to S - 1, only where the graph counts positions."""

_FIRST_LENGTH, _TOTAL_LENGTH = 5, 6
_HOST_OPERATORS = frozenset(("NonZero", "Range", "Shape", "Size"))


def keep_resident(view: GraphView, max_length: int) -> None:
    """Take lengths and positions from inputs instead of from the sizes of other inputs.

    ```
    start, (input_ids ─ Shape) ─ Add ─ Cast ─┬─ Sub 1 ─┐
                                             └──────── GroupQueryAttention
    0, (input_ids ─ Shape ─ Squeeze), 1 ─ Range ─ positions

      =>  lengths, max_length ─ GroupQueryAttention          steps ─ positions
    ```
    `GroupQueryAttention` reads its total length on the host, so that a captured pass would keep
    the one it was captured with. It only sizes buffers and grids with it; what is attended to
    comes from `lengths`, on the device. So the total is `max_length`, in every pass.
    Raises: BuildError when something of the graph would still be computed on the host.
    """
    total = view.add_constant("total", np.array([max_length], np.int32))
    for node in view.nodes("GroupQueryAttention"):
        node.input[_FIRST_LENGTH] = LENGTHS
        node.input[_TOTAL_LENGTH] = total
    _count_from_input(view)
    _pick_confidence(view)
    view.tidy()
    _replace_inputs(view)
    left = sorted({n.op_type for n in view.nodes() if n.op_type in _HOST_OPERATORS})
    if left:
        raise BuildError(
            f"the lowered graph computes {', '.join(left)} on the host, and ort-cuda engines stay "
            "on their device. This is a defect of the lowering: please report the architecture, "
            "and build for ort-cpu"
        )


def _count_from_input(view: GraphView) -> None:
    for node in view.nodes("Range"):
        begin, step = view.scalar(node.input[0]), view.scalar(node.input[2])
        counts = begin == 0 and step == 1 and _is_width(view, node.input[1])
        if counts:
            view.replace(node.output[0], STEPS)


def _pick_confidence(view: GraphView) -> None:
    """Pick the largest share by its place, which is known: the reduction would need cuDNN.

    ```
    logits ─┬─ Softmax ─ ReduceMax ─ y
            └─ TopK 1 ─ place

      =>  logits ─┬─ Softmax ──────── GatherElements ─ Squeeze ─ y
                  └─ TopK 1 ─ place ──┘
    ```
    """
    for node in view.nodes("ReduceMax"):
        shares = view.maker(node.input[0], "Softmax")
        readers = view.readers(shares.input[0]) if shares is not None else []
        top = next((reader for reader in readers if reader.op_type == "TopK"), None)
        if top is None or view.scalar(top.input[1]) != 1:
            continue
        largest = view.add("GatherElements", [node.input[0], top.output[1]], axis=-1)
        view.add("Squeeze", [largest, node.input[1]], outputs=[node.output[0]])


def _is_width(view: GraphView, name: str) -> bool:
    """Tell whether a number is the width of `input_ids`."""
    node = view.maker(name)
    while node is not None and node.op_type in ("Squeeze", "Cast", "Gather", "Reshape"):
        if node.op_type == "Gather" and view.scalar(node.input[1]) != 1:
            return False
        node = view.maker(node.input[0])
    return node is not None and node.op_type == "Shape" and node.input[0] == "input_ids"


def _replace_inputs(view: GraphView) -> None:
    """Declare the new inputs, and drop those that nothing reads any more."""
    read = {name for node in view.nodes() for name in node.input}
    ids = next(i for i in view.graph.input if i.name == "input_ids")
    batch, width = (d.dim_value or d.dim_param for d in ids.type.tensor_type.shape.dim)
    added = [
        helper.make_tensor_value_info(LENGTHS, onnx.TensorProto.INT32, [batch]),
        helper.make_tensor_value_info(STEPS, onnx.TensorProto.INT64, [width]),
    ]
    kept = [i for i in (*view.graph.input, *added) if i.name in read]
    del view.graph.input[:]
    view.graph.input.extend(kept)
