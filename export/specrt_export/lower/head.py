"""What is read from the logits in the graph, where they were just made."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from specrt_export.lower.view import GraphView

CONFIDENCE = "confidence"


def cheapen_argmax(view: GraphView) -> None:
    """Let TopK find the largest item: its kernel takes about half the time of ArgMax's.

    ```
    x ─ ArgMax ─ y          =>          x ─ TopK 1 ─ Squeeze ─ y
    ```
    Both give the first of equal items.
    """
    for node in view.nodes("ArgMax"):
        said = view.attributes(node)
        last = said.get("axis", 0) == -1
        if last and not said.get("keepdims", 1) and not said.get("select_last_index", 0):
            one = view.add_constant("one", np.array([1], np.int64))
            axis = view.add_constant("axis", np.array([-1], np.int64))
            outputs = [view.fresh("largest"), view.fresh("place")]
            view.add("TopK", [node.input[0], one], outputs=outputs, axis=-1, sorted=0)
            view.add("Squeeze", [outputs[1], axis], outputs=[node.output[0]])
    view.tidy()


def add_confidence(view: GraphView) -> None:
    """Add an output with the probability of each row's likeliest token.

    ```
    logits [B, R, V] ─ Softmax ─ ReduceMax ─ confidence [B, R]
    ```
    """
    axis = view.add_constant("axis", np.array([-1], np.int64))
    shares = view.add("Softmax", ["logits"], axis=-1)
    view.add("ReduceMax", [shares, axis], outputs=[CONFIDENCE], keepdims=0)
    dims = [d.dim_value or d.dim_param for d in _dims(view.graph, "argmax")]
    view.add_output(helper.make_tensor_value_info(CONFIDENCE, onnx.TensorProto.FLOAT, dims))


def _dims(graph: onnx.GraphProto, name: str) -> list[onnx.TensorShapeProto.Dimension]:
    value = next(o for o in graph.output if o.name == name)
    return list(value.type.tensor_type.shape.dim)
