"""What a graph tells of its logits: the best item, how sure it is of it, and the next best."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from specrt_export.lower.logits import add_argmax, cheapen_argmax, cut_candidates
from specrt_export.lower.view import GraphView

LOGITS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=3, max_dims=3, max_side=9),
    elements=st.one_of(
        st.floats(-4, 4, width=16), st.sampled_from([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan])
    ),
)


def exported() -> onnx.ModelProto:
    """The argmax of logits as the exporter writes it, -1 for a row with a NaN; and another."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
        g (float[B, R, V] logits) => (int64[B, R] argmax, int64[B, R] other)
        <int64[1] last = {-1}, int64 none = {-1}> {
            sum = ReduceSum <keepdims = 0> (logits, last)
            broken = IsNaN (sum)
            best = ArgMax <axis = -1, keepdims = 0> (logits)
            argmax = Where (broken, none, best)
            other = ArgMax <axis = -1, keepdims = 0> (logits)
        }"""
    return onnx.parser.parse_model(text)


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def both() -> list[ort.InferenceSession]:
    """The argmax as exported, and as lowered."""
    cheap = GraphView(exported())
    cheapen_argmax(cheap)
    assert not cheap.nodes("ArgMax")
    return [session(exported()), session(cheap.model)]


@given(LOGITS)
def test_a_cheaper_argmax_is_the_same_and_never_an_infinite_item(
    both: list[ort.InferenceSession], logits: NDArray[np.float32]
) -> None:
    """Another argmax of the model, of an expert say, keeps its meaning."""
    (plain, _), (cheap, other) = (one.run(None, {"logits": logits}) for one in both)
    numbers = np.isfinite(logits.max(-1))  # a NaN anywhere is the maximum
    np.testing.assert_array_equal(cheap[numbers], plain[numbers])
    np.testing.assert_array_equal(cheap[numbers], logits.argmax(-1)[numbers])
    assert (cheap[~numbers] == -1).all()
    clear = ~np.isnan(logits).any(-1)
    np.testing.assert_array_equal(other[clear], logits.argmax(-1)[clear])


def added(logits: Any, count: int) -> dict[str, Any]:
    """Return what is read from rows of logits for TensorRT."""
    shape = ", ".join(map(str, logits.shape))
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[{shape}] given) => (float[{shape}] logits, int64[B, R] argmax) {{
            logits = Identity (given)
            argmax = ArgMax <axis = -1, keepdims = 0> (logits)
        }}"""
    view = GraphView(onnx.parser.parse_model(text))
    add_argmax(view, logits.shape[-1])
    cut_candidates(view, count)
    run = session(view.tidy())
    names = [output.name for output in run.get_outputs()]
    return dict(zip(names, run.run(names, {"given": logits}), strict=True))


@given(LOGITS)
def test_tensorrt_finds_the_first_of_the_largest_and_the_best_after_it(
    logits: NDArray[np.float32],
) -> None:
    count = min(3, logits.shape[-1])
    found = added(logits, count)
    numbers = np.isfinite(logits.max(-1))
    np.testing.assert_array_equal(found["argmax"][numbers], logits.argmax(-1)[numbers])
    assert (found["argmax"][~numbers] == -1).all()
    clear = ~np.isnan(logits).any(-1)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(found["candidates.ids"][clear], order[clear])
    best = np.take_along_axis(logits, order, axis=-1)
    np.testing.assert_array_equal(found["candidates.values"][clear], best[clear])
