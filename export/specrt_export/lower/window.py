"""How many keys ONNX Runtime's attention sees when it is told of a local window."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

_TOLD, _KEYS, _SIZE = 2, 6, 8


def surplus() -> int:
    """Return how many keys more than `local_window_size` the installed kernel sees.

    None in current versions; one in 1.23, where the window was counted beside the query itself.
    Equal queries weigh all the keys they see alike, and each value is a row of its own, so what
    comes out tells which they were.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(_attention(), options, ["CPUExecutionProvider"])
    values = np.eye(_KEYS, _SIZE, dtype=np.float32)[None]
    empty = np.zeros((1, 1, _KEYS, _SIZE), np.float32)
    feed = {"q": 0 * values, "k": 0 * values, "v": values, "key": empty, "value": empty}
    (made,) = session.run(["y"], feed)
    return int((made[0, -1] > 0).sum()) - _TOLD


def _attention() -> bytes:
    """Return a graph of one layer with a local window of `_TOLD`."""
    inputs = [
        *((name, [1, _KEYS, _SIZE]) for name in ("q", "k", "v")),
        *((name, [1, 1, _KEYS, _SIZE]) for name in ("key", "value")),
    ]
    lengths = [
        helper.make_tensor("last", onnx.TensorProto.INT32, [1], [_KEYS - 1]),
        helper.make_tensor("total", onnx.TensorProto.INT32, [1], [_KEYS]),
    ]
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "key", "value", "last", "total"],
        ["y", "new_key", "new_value"],
        domain="com.microsoft",
        num_heads=1,
        kv_num_heads=1,
        local_window_size=_TOLD,
    )
    floats = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "window",
        [helper.make_tensor_value_info(name, floats, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("y", floats, [1, _KEYS, _SIZE])],
        lengths,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())
