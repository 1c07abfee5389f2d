"""Layers with a recurrent state, written out: a state that is folded late, and a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from kernels.test_recurrence import CASES, TOKENS, Case, Pass, Text, rounds
from lower.test_lowerings import decay_of_another, one_less, one_more
from specrt.engine.state_bases import StateBases
from specrt.geometry import BASE, NEXT_BASE, RECURRENT, TAKEN_BACK, Geometry, LayerMemory
from specrt_export.lower.canonical import fix_shapes
from specrt_export.lower.recurrence import write_out_recurrences
from specrt_export.lower.view import Counts, GraphView
from specrt_export.lower.window import Windows
from specrt_export.portable.state_function import DOMAIN, RECURRENCE, define, function

Change = Callable[[onnx.GraphProto], None]
WIDEST, IN_ORDER = 40, 0
"""Tokens of the widest pass of the form that computes them together, and the form that does not."""
ONE_ROW = [replace(case, rows=1) for case in CASES]


def key_of_another(graph: onnx.GraphProto) -> None:
    """Let a window be read one position later than where it lies."""
    at = next(
        n for n in graph.node if n.op_type == "Slice" and n.input[0].startswith("specrt.window")
    )
    one = onnx.numpy_helper.from_array(np.array([1]), "one.on")
    graph.initializer.append(one)
    at.input[1] = one.name
    graph.node.insert(0, helper.make_node("Add", [at.input[2], one.name], ["one.later"]))
    at.input[2] = "one.later"


class Written:
    """One layer in standard operators, and its memory, of any content before it is written."""

    def __init__(self, case: Case, form: int = WIDEST, change: Change = lambda graph: None) -> None:
        memory = LayerMemory(
            RECURRENT, case.heads, case.key_size, case.value_size, key_heads=case.key_heads
        )
        geometry = Geometry(0, 8, 128, 1, (memory,))
        self.shapes = {
            "q": (1, -1, case.key_heads, case.key_size), "v": (1, -1, case.heads, case.value_size),
            "g": (1, -1, case.heads),
        }  # fmt: skip
        self.shapes |= {"k": self.shapes["q"], "beta": self.shapes["g"]}
        view = GraphView(self._portable(case, geometry))
        fix_shapes(view.graph, geometry, 1, 128)
        write_out_recurrences(view, Counts(), geometry, Windows(view), form)
        change(view.graph)
        self._session = ort.InferenceSession(view.model.SerializeToString())
        self.memory = {n: np.full(s, np.nan, "f4") for n, s in geometry.shapes(1, 128).items()}
        self._bases = StateBases(1, TAKEN_BACK if form else case.lag)

    @property
    def base(self) -> NDArray[np.int64]:
        """Up to where the state holds the text."""
        return self._bases.next

    def _portable(self, case: Case, geometry: Geometry) -> onnx.ModelProto:
        buffers = [*geometry.inputs]
        fed = [*TOKENS, *buffers, "start", BASE]
        outputs = ["y", *(f"present_{name}" for name in buffers)]
        kinds = {"start": TensorProto.INT64, BASE: TensorProto.INT64}
        node = helper.make_node(
            RECURRENCE, fed, outputs, domain=DOMAIN, delta=case.delta, epsilon=case.epsilon,
            scale=case.key_size**-0.5,
        )  # fmt: skip
        ranks = {"start": 1, BASE: 1, "g": 3, "beta": 3}
        values = [
            helper.make_tensor_value_info(n, kinds.get(n, TensorProto.FLOAT), [None] * rank)
            for n, rank in [*((n, ranks.get(n, 4)) for n in fed), *((n, 4) for n in outputs)]
        ]
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"])
        graph = helper.make_graph([node], "g", [ids, *values[: len(fed)]], values[len(fed) :])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        define(model, function())
        return model

    def run(self, fed: Pass) -> NDArray[Any]:
        """Run a pass; return y [T, heads * value_size]."""
        start, width = int(fed.positions[0]), len(fed.positions)
        self._bases.advance(0, start, width)
        feeds = {n: getattr(fed, n).reshape(shape) for n, shape in self.shapes.items()}
        feeds |= self.memory | {"input_ids": np.zeros((1, width), np.int64)}
        feeds |= {"start": np.array([start]), BASE: self._bases.base, NEXT_BASE: self._bases.next}
        y, *written = self._session.run(None, feeds)
        self.memory = dict(zip(self.memory, written, strict=True))
        found: NDArray[Any] = y.reshape(width, -1)
        return found


def errors(text: Text, layer: Written, form: int, seed: int) -> list[float]:
    """Return how far passes are from the formula, and what the state holds in the end."""
    found = [
        float(np.abs(layer.run(fed) - text.expected(fed)).max())
        for fed in rounds(text, layer, seed, form or TAKEN_BACK)
    ]
    state = layer.memory["state.0"][0]
    return [*found, float(np.abs(state - text.states[0][layer.base[0]]).max())]


@pytest.mark.parametrize("form", [WIDEST, IN_ORDER])
@pytest.mark.parametrize("case", ONE_ROW)
def test_outputs_are_of_the_formula_in_all_rounds(case: Case, form: int) -> None:
    text = Text(case)
    for seed in range(3):
        assert max(errors(text, Written(case, form), form, seed)) < 1e-5


@pytest.mark.parametrize(
    ("form", "change"),
    [
        (WIDEST, one_more), (WIDEST, one_less), (WIDEST, decay_of_another),
        (IN_ORDER, one_more), (IN_ORDER, one_less), (IN_ORDER, key_of_another),
    ],
)  # fmt: skip
def test_a_state_that_is_folded_wrongly_is_seen(form: int, change: Change) -> None:
    case = ONE_ROW[0]
    assert max(errors(Text(case), Written(case, form, change), form, 0)) > 1e-2


def test_what_is_not_a_number_can_be_taken_back() -> None:
    text, layer, clean = Text(ONE_ROW[0]), Written(ONE_ROW[0]), Written(ONE_ROW[0])
    wrong, after = text.fed((0, 20, 9)), text.fed((0, 20, 40))
    for values in (wrong.q, wrong.k, wrong.v, wrong.g, wrong.beta):
        values[4:] = np.nan
    for one in (layer, clean):
        one.run(text.fed((0, 0, 20)))
    layer.run(wrong)
    assert np.array_equal(layer.run(after), clean.run(after))
