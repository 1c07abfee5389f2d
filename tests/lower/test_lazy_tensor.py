"""Weights that are computed when they are written: every slice is that of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt_export.lower import lazy_tensor as engine_file
from specrt_export.lower.lazy_tensor import (
    WEIGHTS,
    LazyTensor,
    as_float,
    computed,
    dequantized,
    in_memory,
    joined,
    reshaped,
    taken,
    transposed,
    write_engine,
)
from specrt_export.portable.external_data import ALIGNMENT
from specrt_export.quantize.codes import pack

BFLOAT16, INT4, INT8 = (
    onnx.TensorProto.BFLOAT16,
    onnx.TensorProto.INT4,
    onnx.TensorProto.INT8,
)
RNG = np.random.default_rng(0)
CODES = RNG.integers(-8, 8, (6, 32)).astype(np.int8)
BYTES = RNG.integers(-128, 128, (6, 32)).astype(np.int8)
SCALES = RNG.random((6, 2)).astype(np.float32)
FLOATS = RNG.standard_normal((6, 32)).astype(np.float32)


def stored(
    name: str, onnx_type: int, shape: tuple[int, ...], array: NDArray[np.generic]
) -> LazyTensor:
    return LazyTensor(name, onnx_type, shape, lambda begin, end: array[begin:end])


FOUR = stored("four", INT4, (6, 32), pack(CODES))
EIGHT = stored("eight", INT8, (6, 32), BYTES)
SCALE, FLOAT = in_memory("scale", SCALES), in_memory("float", FLOATS)
HALF = stored("half", BFLOAT16, (6, 32), (FLOATS.view(np.uint32) >> 16).astype(np.uint16))
SPREAD = np.repeat(SCALES, 16, axis=1)

MADE: dict[str, tuple[LazyTensor, NDArray[np.generic]]] = {
    "bf16": (as_float(HALF), (FLOATS.view(np.uint32) >> 16 << 16).view(np.float32)),
    "fp16": (
        as_float(in_memory("fp16", FLOATS.astype(np.float16))),
        FLOATS.astype(np.float16).astype(np.float32),
    ),
    "transposed": (transposed(FLOAT), FLOATS.T),
    "taken": (taken(FLOAT, 1, 5), FLOATS[1:5]),
    "joined": (
        joined([FLOAT, taken(FLOAT, 2, 3), FLOAT]),
        np.concatenate([FLOATS, FLOATS[2:3], FLOATS]),
    ),
    "reshaped": (reshaped(FLOAT, "r", (6, 4, 8)), FLOATS.reshape(6, 4, 8)),
    "int4": (dequantized(FOUR, SCALE, 16), CODES * SPREAD),
    "int8": (dequantized(EIGHT, SCALE, 16), BYTES * SPREAD),
    "computed": (computed("c", (6, 32), lambda: FLOATS + 1), FLOATS + 1),
}


@pytest.mark.parametrize("name", MADE)
@given(st.data())
def test_every_slice_is_that_of_the_whole(name: str, data: st.DataObject) -> None:
    made, expected = MADE[name]
    assert made.shape == expected.shape
    begin = data.draw(st.integers(0, made.length))
    end = data.draw(st.integers(begin, made.length)) if begin < made.length else begin
    if begin < end:
        np.testing.assert_array_equal(made.rows(begin, end), expected[begin:end])
    np.testing.assert_array_equal(made.load(), expected)
    assert made.row_bytes * made.length == expected.astype(np.float32).nbytes


@pytest.mark.parametrize("slice_bytes", [1, 300, 1 << 20])
def test_weights_are_written_in_slices_each_from_a_page_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    monkeypatch.setattr(engine_file, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(engine_file, "INLINE_BYTES", 100)
    graph = onnx.GraphProto(name="g")
    for name, (one, _) in MADE.items():
        graph.initializer.add(
            name=name, data_type=one.onnx_type, dims=one.shape,
            data_location=onnx.TensorProto.EXTERNAL,
        )  # fmt: skip
    weights = {name: one for name, (one, _) in MADE.items()}
    write_engine(onnx.ModelProto(graph=graph), weights, tmp_path)
    model = onnx.load(tmp_path / "engine.onnx", load_external_data=False)
    data = (tmp_path / WEIGHTS).read_bytes()
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, expected = int(place["offset"]), MADE[tensor.name][1]
        assert offset % ALIGNMENT == 0
        length = int(place["length"])
        assert data[offset : offset + length] == expected.astype(np.float32).tobytes()


def test_a_computed_weight_of_another_shape_is_told() -> None:
    with pytest.raises(BuildError, match=r"shape \[32, 6\], and the graph says \[6, 32\]"):
        computed("c", (6, 32), lambda: FLOATS.T).load()
