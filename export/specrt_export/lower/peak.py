"""What is read from the logits, in operators that TensorRT joins into one kernel."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from specrt_export.lower.view import GraphView

CANDIDATES = ("candidates.values", "candidates.ids")

_INT64, _FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT


def find_peak(view: GraphView, vocabulary: int) -> None:
    """Say the first index of the largest logit, -1 where one is NaN or the largest infinite.

    ```
    logits ─┬─ ReduceMax ─┬─ Equal ─ Where(0 .. V - 1, else V) ─ ReduceMin ─┐
            │             └─ IsInf ─┐                                       Where(-1) ─ argmax
            └─ ReduceSum ─── IsNaN ─ Or ────────────────────────────────────┘
    ```
    TopK or ArgMax take three kernels where this takes one, and which of equal scores they give is
    theirs to choose.
    """
    axis = view.add_constant("axis", np.array([-1], np.int64))
    peak = view.add("ReduceMax", ["logits", axis], keepdims=1)
    place = view.add_constant("places", np.arange(vocabulary, dtype=np.int32))
    beyond = view.add_constant("beyond", np.array(vocabulary, np.int32))
    at = view.add("Where", [view.add("Equal", ["logits", peak]), place, beyond])
    first = view.add("ReduceMin", [at, axis], keepdims=0)
    total = view.add("ReduceSum", ["logits", axis], keepdims=0)
    endless = view.add("IsInf", [view.add("Squeeze", [peak, axis])])
    broken = view.add("Or", [view.add("IsNaN", [total]), endless])
    nothing = view.add_constant("nothing", np.array(-1, np.int64))
    index = view.add("Cast", [first], to=_INT64)
    view.add("Where", [broken, nothing, index], outputs=["argmax"])
    view.tidy()


def cut_candidates(view: GraphView, count: int) -> None:
    """Add the best scores of each row, falling, and their ids.

    ```
    logits [B, R, V] ─ TopK count ─ candidates.values, candidates.ids [B, R, count]
    ```
    """
    most = view.add_constant("count", np.array([count], np.int64))
    view.add("TopK", ["logits", most], outputs=list(CANDIDATES), axis=-1, sorted=1, largest=1)
    said = next(o for o in view.graph.output if o.name == "argmax")
    dims = [d.dim_value or d.dim_param for d in said.type.tensor_type.shape.dim]
    for name, kind in zip(CANDIDATES, (_FLOAT, _INT64), strict=True):
        view.add_output(helper.make_tensor_value_info(name, kind, [*dims, count]))
