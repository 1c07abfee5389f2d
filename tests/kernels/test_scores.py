"""What the CPU kernels read from rows of logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import TensorProto

from support.kernels import session

LOGITS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=3, max_dims=3, max_side=40),
    elements=st.one_of(
        st.floats(-4, 4, width=16), st.sampled_from([0.0, -0.0, 1.0, 3e38, np.inf, -np.inf, np.nan])
    ),
)


@pytest.fixture(scope="module")
def both() -> list[Any]:
    """The operator with a confidence, and without."""
    argmax = {"argmax": TensorProto.INT64}
    logits = {"logits": (TensorProto.FLOAT, ["B", "R", "V"])}
    return [
        session("Scores", logits, outputs)
        for outputs in (argmax | {"confidence": TensorProto.FLOAT}, argmax)
    ]


def hold(both: list[Any], logits: NDArray[np.float32]) -> None:
    """Compare with numpy in float64.

    A sum of V numbers has relative errors of V / 16 roundings in a lane, 4 of the lanes, and of
    some 2^-22 from each power, as has a sum that is made smaller for each part of 1,024.
    """
    argmax, confidence = both[0].run(None, {"logits": logits})
    (alone,) = both[1].run(None, {"logits": logits})
    np.testing.assert_array_equal(alone, argmax)
    numbers = np.isfinite(logits.max(-1))  # a NaN anywhere is the maximum
    np.testing.assert_array_equal(argmax, np.where(numbers, logits.argmax(-1), -1))
    assert np.isnan(confidence[~numbers]).all()
    rows = logits[numbers].astype(np.float64)
    expected = 1 / np.exp(rows - rows.max(-1, keepdims=True)).sum(-1)
    bound = (logits.shape[-1] / 16 + logits.shape[-1] / 1024 + 12) * 2.0**-23
    np.testing.assert_allclose(confidence[numbers], expected, rtol=bound)


@settings(max_examples=30)
@given(LOGITS)
def test_the_best_is_the_first_of_the_largest_and_never_an_infinite_item(
    both: list[Any], logits: NDArray[np.float32]
) -> None:
    hold(both, logits)


@pytest.mark.parametrize("vocabulary", [1024, 8191, 50257, 151936])
def test_long_rows_have_the_same_scores_in_any_company(both: list[Any], vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((1, 9, vocabulary)) * 8).astype(np.float32)
    logits[0, 1] = -1e4
    logits[0, 2, : vocabulary // 2] = -np.inf
    logits[0, 3].sort()
    logits[0, 4, -1] = np.nan
    logits[0, 5, vocabulary // 3 :: 100] = 90.0
    hold(both, logits)
    whole = both[0].run(None, {"logits": logits})
    for row in range(9):
        alone = both[0].run(None, {"logits": logits[:, row : row + 1]})
        for one, all_ in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(one, all_[:, row : row + 1])


@pytest.mark.parametrize("shape", [(1, 0, 64), (1, 50, 0)])
def test_no_rows_have_no_scores_and_rows_of_no_logits_no_best(
    both: list[Any], shape: tuple[int, ...]
) -> None:
    argmax, confidence = both[0].run(None, {"logits": np.zeros(shape, np.float32)})
    assert argmax.shape == confidence.shape == shape[:2]
    assert (argmax == -1).all()
    assert np.isnan(confidence).all()
