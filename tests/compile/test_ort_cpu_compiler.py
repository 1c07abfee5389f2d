"""Engines of the CPU: stored in half the space without a bit lost, checked in fp32, the same for a
row alone as for one in company, blind to what was in their KV buffers before, and for the kernels
that are here."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from specrt_export.lower.lazy_tensor import (
    LazyTensor,
    as_float,
    joined,
    smallest_format,
    taken,
    transposed,
)


def test_weights_that_were_widened_are_not_read_to_find_their_format() -> None:
    def rows(begin: int, end: int) -> NDArray[np.uint16]:
        raise AssertionError("they are read")

    stored = LazyTensor("w", onnx.TensorProto.BFLOAT16, (8, 6), rows)
    wide = as_float(stored)
    for one in (wide, transposed(wide), taken(wide, 2, 4), joined([wide, taken(wide, 0, 3)])):
        assert smallest_format(one) == "bf16"
    half = as_float(LazyTensor("v", onnx.TensorProto.FLOAT16, (8, 6), rows))
    assert smallest_format(half) == "fp16"
    with pytest.raises(AssertionError, match="they are read"):
        smallest_format(joined([wide, half]))
