"""What the graph tells of its logits: the best item, and how sure it is of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from specrt.engine.backends import open_engine
from specrt.engine.protocol import Engine
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.lower.logits import cheapen_argmax
from specrt_export.lower.view import GraphView

MAX_LENGTH = 64
ITEMS = st.one_of(
    st.floats(-4, 4, width=16),
    st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan]),
)


def told() -> onnx.ModelProto:
    """The argmax of logits as the exporter writes it: -1 for a row with a NaN."""
    nodes = [
        helper.make_node("ReduceSum", ["logits", "last"], ["sum"], keepdims=0),
        helper.make_node("IsNaN", ["sum"], ["broken"]),
        helper.make_node("ArgMax", ["logits"], ["best"], axis=-1, keepdims=0),
        helper.make_node("Where", ["broken", "none", "best"], ["argmax"]),
    ]
    shape = ["B", "R", "V"]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("argmax", onnx.TensorProto.INT64, shape[:2])],
        [
            numpy_helper.from_array(np.array([-1]), "last"),
            numpy_helper.from_array(np.array(-1), "none"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def both() -> tuple[ort.InferenceSession, ort.InferenceSession]:
    """The argmax as exported, and as lowered."""
    cheap = GraphView(told())
    cheapen_argmax(cheap)
    assert [n.op_type for n in cheap.nodes("ArgMax", "TopK", "Sub")] == ["TopK", "Sub"]
    return session(told()), session(cheap.model)


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=3, max_dims=3, max_side=9), elements=ITEMS))
def test_a_cheaper_argmax_is_the_same_and_never_an_infinite_item(
    both: tuple[ort.InferenceSession, ort.InferenceSession], logits: NDArray[np.float32]
) -> None:
    plain, cheap = (one.run(None, {"logits": logits})[0] for one in both)
    numbers = np.isfinite(logits.max(-1))  # a NaN anywhere is the maximum
    np.testing.assert_array_equal(cheap[numbers], plain[numbers])
    np.testing.assert_array_equal(cheap[numbers], logits.argmax(-1)[numbers])
    assert (cheap[~numbers] == -1).all()


@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=3, max_dims=3, max_side=9), elements=ITEMS))
def test_another_argmax_of_the_graph_keeps_its_meaning(logits: NDArray[np.float32]) -> None:
    """A model may choose something else by an argmax: an expert, say."""
    model = told()
    model.graph.node.append(helper.make_node("ArgMax", ["logits"], ["other"], axis=-1, keepdims=0))
    other = helper.make_tensor_value_info("other", onnx.TensorProto.INT64, ["B", "R"])
    model.graph.output.append(other)
    view = GraphView(model)
    cheapen_argmax(view)
    assert not view.nodes("ArgMax")
    found = session(view.model).run(["other"], {"logits": logits})[0]
    clear = ~np.isnan(logits).any(-1)
    np.testing.assert_array_equal(found[clear], logits.argmax(-1)[clear])


def test_an_argmax_of_another_kind_is_left_alone() -> None:
    model = told()
    model.graph.node[2].attribute[0].i = 1
    view = GraphView(model)
    cheapen_argmax(view)
    assert len(view.nodes("ArgMax")) == 1


def opened(engines: Path, out: Path, *, confidence: bool) -> Engine:
    """Compile codelet's draft, and open it."""
    folder = engines / "codelet"
    compiled = compile_ort_cpu(
        folder / "portable" / "draft.onnx",
        folder / "checkpoint" / "draft",
        out,
        MAX_LENGTH,
        confidence=confidence,
    )
    return open_engine(
        "ort-cpu",
        out / "engine.onnx",
        compiled.geometry,
        batch=1,
        max_length=MAX_LENGTH,
        max_width=MAX_LENGTH,
        threads=1,
    )


def test_confidence_is_the_probability_of_the_likeliest_token(
    engines: Path, tmp_path: Path
) -> None:
    engine = opened(engines, tmp_path, confidence=True)
    tokens = np.random.default_rng(0).integers(0, engine.geometry.vocab_size, (1, 20))
    for rows in (20, 1):
        made = engine.forward(tokens, 0, rows)
        assert made.confidence is not None
        assert made.confidence.shape == (1, rows)
        logits = made.logits.astype(np.float64)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = 1 / weights.sum(-1)
        np.testing.assert_allclose(made.confidence, expected, rtol=1e-5)
        assert 0 < made.confidence.min() <= made.confidence.max() <= 1
    engine.close()


def head_of(engine: Path) -> ort.InferenceSession:
    """Return what an engine makes of its logits, as a graph of its own."""
    graph = onnx.load(engine, load_external_data=False).graph
    made, nodes = {"logits"}, []
    for node in graph.node:
        if made.intersection(node.input):
            made.update(node.output)
            nodes.append(node)
    read = {name for node in nodes for name in node.input}
    ends = {o.name: o for o in graph.output}
    constants = [t for t in graph.initializer if t.name in read]
    head = helper.make_graph(nodes, "head", [ends["logits"]], [ends["argmax"]], constants)
    opsets = [helper.make_opsetid("", 21)]
    return session(helper.make_model(head, opset_imports=opsets, ir_version=10))


@pytest.fixture(scope="module")
def heads(
    engines: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ort.InferenceSession]:
    """The ends of codelet's engines, by backend."""
    graph = engines / "codelet" / "portable" / "draft.onnx"
    weights = engines / "codelet" / "checkpoint" / "draft"
    found = {}
    for backend, build in (("ort-cpu", compile_ort_cpu), ("ort-cuda", compile_ort_cuda)):
        out = tmp_path_factory.mktemp(backend)
        build(graph, weights, out, MAX_LENGTH)
        found[backend] = head_of(out / "engine.onnx")
    return found


@pytest.mark.parametrize("backend", ["ort-cpu", "ort-cuda"])
def test_an_engine_has_no_best_token_where_scores_are_no_numbers(
    heads: dict[str, ort.InferenceSession], backend: str
) -> None:
    inf, nan = np.inf, np.nan
    rows = np.random.default_rng(0).standard_normal((1, 8, 8192)).astype(np.float32)
    rows[0, 0, 5], rows[0, 1, 6], rows[0, 2, 7] = inf, nan, -inf
    rows[0, 3], rows[0, 4], rows[0, 5, :8000], rows[0, 6, :2] = -inf, 3e38, -inf, (inf, -inf)
    found = heads[backend].run(["argmax"], {"logits": rows})[0][0]
    best = rows[0].argmax(-1)
    assert found.tolist() == [-1, -1, best[2], -1, 0, best[5], -1, best[7]]


def test_an_engine_tells_no_confidence_unless_asked_to(engines: Path, tmp_path: Path) -> None:
    engine = opened(engines, tmp_path, confidence=False)
    assert engine.forward(np.ones((1, 3), np.int64), 0).confidence is None
    engine.close()
