"""Recognise rotary position embedding and tabulate its angles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from specrt_export.lower.lazy_tensor import held
from specrt_export.lower.view import GraphView, stamp_oldest_opset


@dataclass(frozen=True)
class Rotary:
    """A rotation found in the graph: of which value, by which cosines and sines.

    Shapes: x [B, H, S, D]; cos and sin broadcast over x with R <= D angles a position.
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
    Of a part of each head only, in the form of GPT-NeoX:
    ```
    x ─┬─ Slice first R ─ the above ─┐
       └─ Slice the rest ─────────── Concat ─ value
    ```
    Source: Su et al. 2021, arXiv:2104.09864.
    """
    joined = view.maker(name, "Concat")
    if joined is None:
        return _match_whole(view, name)
    if len(joined.input) != 2 or joined.attribute[0].i not in (-1, 3):
        return None
    turned = _match_whole(view, joined.input[0])
    first = turned and view.maker(turned.x, "Slice")
    rest = view.maker(joined.input[1], "Slice")
    if not turned or not first or not rest or first.input[0] != rest.input[0]:
        return None
    return Rotary(first.input[0], turned.cos, turned.sin) if _halves(view, first, rest) else None


def _match_whole(view: GraphView, name: str) -> Rotary | None:
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
    split = _halves(view, lower, upper)
    high = view.scalar(upper.input[2])
    whole = split and high is not None and (high >= 2**31 - 1 or high == 2 * split)
    return str(lower.input[0]) if whole else None


def _halves(view: GraphView, lower: onnx.NodeProto, upper: onnx.NodeProto) -> int | None:
    """Return where two slices of the last of four axes meet, if the first begins at 0."""
    bounds = [[view.scalar(i) for i in node.input[1:5]] for node in (lower, upper)]
    if any(len(said) < 3 or said[2] not in (-1, 3) or said[3:] not in ([], [1]) for said in bounds):
        return None
    (low, middle, *_), (split, high, *_) = bounds
    meets = low == 0 and split is not None and middle == split
    return int(split) if meets and split is not None and high is not None else None


@dataclass
class Rotations:
    """Tables of cosines and sines, made once for every layer that shares them."""

    view: GraphView
    max_length: int

    def __post_init__(self) -> None:
        self._made: dict[tuple[str, str], tuple[str, str, int] | None] = {}

    def tables(self, rotary: Rotary) -> tuple[str, str, int] | None:
        """Return the names of the [max_length, R / 2] tables and R; None where halves differ."""
        key = (rotary.cos, rotary.sin)
        if key not in self._made:
            self._made[key] = self._make(rotary)
        return self._made[key]

    def _make(self, rotary: Rotary) -> tuple[str, str, int] | None:
        whole = tabulate(self.view.model, rotary, self.max_length)
        cos, sin = (_half(table) for table in whole)
        if cos is None or sin is None:
            return None
        names = [
            self.view.add_stored(held(f"{self.view.fresh(kind)}.table", table))
            for kind, table in (("cos", cos), ("sin", sin))
        ]
        return names[0], names[1], whole[0].shape[1]


def _half(table: NDArray[np.float32]) -> NDArray[np.float32] | None:
    first, second = np.split(table, 2, axis=-1)
    return first if np.array_equal(first, second) else None


def tabulate(model: onnx.ModelProto, rotary: Rotary, length: int) -> list[NDArray[np.float32]]:
    """Evaluate the cosines and sines of every position below `length`.

    Shapes: returns cos, sin [length, R] f32.
    """
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.graph.output[:]
    for name in (rotary.cos, rotary.sin):
        part.graph.output.append(onnx.ValueInfoProto(name=name))
    part = GraphView(part).tidy()
    stamp_oldest_opset(part)
    needed = {i for n in part.graph.node for i in n.input}
    kept = [i for i in part.graph.input if i.name in needed]
    del part.graph.input[:]
    part.graph.input.extend(kept)
    for value in part.graph.input:
        _free_shape(value)
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


def _free_shape(value: onnx.ValueInfoProto) -> None:
    """Take a fixed batch away: one row is enough for a table."""
    for axis, dim in enumerate(value.type.tensor_type.shape.dim):
        dim.Clear()
        dim.dim_param = f"{value.name}_{axis}"
