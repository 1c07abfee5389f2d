"""Recognise rotary position embedding and tabulate its angles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from specrt_export.lower.opset import stamp_oldest_opset
from specrt_export.lower.view import GraphView


@dataclass(frozen=True)
class Rotary:
    """A rotation found in the graph: of which value, by which cosines and sines.

    Shapes: x [B, H, S, D]; cos and sin broadcast over x with D angles a position.
    """

    x: str
    cos: str
    sin: str


def match_rotary(view: GraphView, name: str) -> Rotary | None:
    """Return the rotation that makes a value, in the half-split form of Llama.

    ```
    x ─┬────────────────────────────────── Mul cos ─┐
       ├─ Slice upper half ─ Neg ─┐                 Add ─ value
       └─ Slice lower half ───── Concat ── Mul sin ─┘
    ```
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    total = view.maker(name, "Add")
    if total is None:
        return None
    for straight, turned in (total.input, reversed(total.input)):
        first, second = view.maker(straight, "Mul"), view.maker(turned, "Mul")
        if first is None or second is None:
            continue
        for half, sin in (second.input, reversed(second.input)):
            x = _half_turned(view, half)
            if x is not None and x in first.input:
                cos = next(i for i in first.input if i != x)
                return Rotary(x, cos, sin)
    return None


def _half_turned(view: GraphView, name: str) -> str | None:
    """Return x if a value is concat(-x[upper half], x[lower half])."""
    joined = view.maker(name, "Concat")
    if joined is None or len(joined.input) != 2 or joined.attribute[0].i not in (-1, 3):
        return None
    negated = view.maker(joined.input[0], "Neg")
    upper = negated and view.maker(negated.input[0], "Slice")
    lower = view.maker(joined.input[1], "Slice")
    if not upper or not lower or upper.input[0] != lower.input[0]:
        return None
    bounds = [[view.scalar(i) for i in node.input[1:5]] for node in (lower, upper)]
    (low, middle, axis, step), (split, high, other_axis, other_step) = bounds
    halves = low == 0 and middle == split and high is not None and split is not None
    if not halves or axis != other_axis or axis not in (-1, 3) or (step, other_step) != (1, 1):
        return None
    full = high is not None and split is not None and (high >= 2**31 - 1 or high == 2 * split)
    return str(lower.input[0]) if full else None


def tabulate(model: onnx.ModelProto, rotary: Rotary, length: int) -> list[NDArray[np.float32]]:
    """Evaluate the cosines and sines of every position below `length`.

    Shapes: returns cos, sin [length, D] f32.
    """
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.output[:]
    for name in (rotary.cos, rotary.sin):
        part.graph.output.append(onnx.ValueInfoProto(name=name))
    part = GraphView(part).finish()
    stamp_oldest_opset(part)
    needed = {i for n in part.graph.node for i in n.input}
    kept = [i for i in part.graph.input if i.name in needed]
    del part.graph.input[:]
    part.graph.input.extend(kept)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(part.SerializeToString(), options, ["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.zeros((1, length), np.int64),
        "start": np.zeros(1, np.int64),
    }
    names = {i.name for i in session.get_inputs()}
    tables = session.run(None, {k: v for k, v in feeds.items() if k in names})
    return [t.reshape(length, t.shape[-1]).astype(np.float32) for t in tables]
