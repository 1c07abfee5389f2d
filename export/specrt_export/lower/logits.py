"""What is read from the logits in the graph, where they were just made."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from specrt_export.lower.projections import SPECRT
from specrt_export.lower.view import GraphView

CONFIDENCE = "confidence"


def cheapen_argmax(view: GraphView) -> None:
    """Let TopK find the largest item: its kernel takes about half the time of ArgMax's.

    ```
    x ─ ArgMax ─ y          =>          x ─ TopK 1 ─ Squeeze ─ y
    ```
    Both give the first of equal items. Where the graph refuses rows with a NaN, it now refuses
    those whose largest item is infinite too.
    """
    for node in view.nodes("ArgMax"):
        attributes = view.attributes(node)
        last = attributes.get("axis", 0) == -1
        if (
            last
            and not attributes.get("keepdims", 1)
            and not attributes.get("select_last_index", 0)
        ):
            one = view.add_constant("one", np.array([1], np.int64))
            axis = view.add_constant("axis", np.array([-1], np.int64))
            value, place = view.fresh("largest"), view.fresh("place")
            view.add("TopK", [node.input[0], one], outputs=[value, place], axis=-1, sorted=0)
            _refuse_infinite(view, node, view.add("Squeeze", [value, axis]))
            view.add("Squeeze", [place, axis], outputs=[node.output[0]])
    view.tidy()


def _refuse_infinite(view: GraphView, argmax: onnx.NodeProto, largest: str) -> None:
    """Let the test for a NaN in a row find an infinite largest item as well, with one node more.

    ```
    x ─ ReduceSum ─ IsNaN ─ Where(-1, argmax)
      =>  x ─ ReduceSum ─ Sub largest ─ IsNaN ─ Where(-1, argmax)
    ```
    Infinity less itself is a NaN. Any other sum, one that overflows or has masked items in it,
    stays what it is: the largest item is finite.
    """
    for reader in view.readers(argmax.output[0]):
        broken = view.maker(reader.input[0], "IsNaN") if reader.op_type == "Where" else None
        total = view.maker(broken.input[0], "ReduceSum") if broken is not None else None
        if broken is not None and total is not None and total.input[0] == argmax.input[0]:
            rest = view.add("Sub", [total.output[0], largest])
            view.replace(broken.output[0], view.add("IsNaN", [rest]))


def add_confidence(view: GraphView) -> None:
    """Add an output with the probability of each row's likeliest token.

    ```
    logits [B, R, V] ─ Softmax ─ ReduceMax ─ confidence [B, R]
    ```
    """
    axis = view.add_constant("axis", np.array([-1], np.int64))
    shares = view.add("Softmax", ["logits"], axis=-1)
    view.add("ReduceMax", [shares, axis], outputs=[CONFIDENCE], keepdims=0)
    _declare_confidence(view)


def _declare_confidence(view: GraphView) -> None:
    dims = [d.dim_value or d.dim_param for d in _dims(view.graph, "argmax")]
    view.add_output(helper.make_tensor_value_info(CONFIDENCE, onnx.TensorProto.FLOAT, dims))


def add_scores(view: GraphView, confidence: bool) -> None:
    """Let the CPU kernels tell all that is read from the logits.

    ```
    logits [1, R, V] ─ Scores ─ argmax, confidence [1, R]
    ```
    A draft of some entries goes on to look their ids up: Scores ─ Gather(ids) ─ argmax.
    """
    mapped = view.maker("argmax", "Gather")
    best = "argmax" if mapped is None else mapped.input[1]
    outputs = [best, CONFIDENCE] if confidence else [best]
    view.add("Scores", ["logits"], outputs=outputs, domain=SPECRT)
    if confidence:
        _declare_confidence(view)
    view.tidy()


def _dims(graph: onnx.GraphProto, name: str) -> list[onnx.TensorShapeProto.Dimension]:
    value = next(o for o in graph.output if o.name == name)
    return list(value.type.tensor_type.shape.dim)


CANDIDATES = ("candidates.values", "candidates.ids")

_INT64, _FLOAT = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT


def add_argmax(view: GraphView, scored: int) -> None:
    """Say the first index of the largest logit, -1 where one is NaN or the largest infinite.

    ```
    logits ─┬─ ReduceMax ─┬─ Equal ─ Where(0 .. V - 1, else V) ─ ReduceMin ─┐
            │             └─ IsInf ─┐                                       Where(-1) ─ argmax
            └─ ReduceSum ─── IsNaN ─ Or ────────────────────────────────────┘
    ```
    Of a draft that has `scored` entries of the vocabulary, Where(scored) ─ Gather(ids) ─ argmax:
    after the ids there is one for no number, and no place is below 0.
    TopK or ArgMax take three kernels where this takes one, and which of equal scores they give is
    theirs to choose.
    """
    axis = view.add_constant("axis", np.array([-1], np.int64))
    largest = view.add("ReduceMax", ["logits", axis], keepdims=1)
    place = view.add_constant("places", np.arange(scored, dtype=np.int32))
    beyond = view.add_constant("beyond", np.array(scored, np.int32))
    at = view.add("Where", [view.add("Equal", ["logits", largest]), place, beyond])
    first = view.add("ReduceMin", [at, axis], keepdims=0)
    total = view.add("ReduceSum", ["logits", axis], keepdims=0)
    endless = view.add("IsInf", [view.add("Squeeze", [largest, axis])])
    broken = view.add("Or", [view.add("IsNaN", [total]), endless])
    mapped = view.maker("argmax", "Gather")
    nothing = view.add_constant("nothing", np.array(-1 if mapped is None else scored, np.int64))
    index = view.add("Cast", [first], to=_INT64)
    best = "argmax" if mapped is None else mapped.input[1]
    view.add("Where", [broken, nothing, index], outputs=[best])
    view.tidy()


def cut_candidates(view: GraphView, count: int) -> None:
    """Add the best scores of each row, falling, and their ids.

    ```
    logits [B, R, V] ─ TopK count ─ candidates.values, candidates.ids [B, R, count]
    ```
    """
    most = view.add_constant("count", np.array([count], np.int64))
    view.add("TopK", ["logits", most], outputs=list(CANDIDATES), axis=-1, sorted=1, largest=1)
    argmax = next(o for o in view.graph.output if o.name == "argmax")
    dims = [d.dim_value or d.dim_param for d in argmax.type.tensor_type.shape.dim]
    for name, kind in zip(CANDIDATES, (_FLOAT, _INT64), strict=True):
        view.add_output(helper.make_tensor_value_info(name, kind, [*dims, count]))
