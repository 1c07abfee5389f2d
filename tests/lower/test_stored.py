"""Weights that are computed when they are written: every slice is that of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lower.quantized import pack
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
    stored_weights,
    taken,
    transposed,
    unsigned,
    write_engine,
)
from specrt_export.lower.projections import WeightMatrix, blocks, join_matrices
from specrt_export.portable.external_data import ALIGNMENT
from specrt_export.portable.graph import read_graph

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


@pytest.mark.parametrize(("codes", "whole", "bits"), [(FOUR, CODES, 4), (EIGHT, BYTES, 8)])
def test_codes_are_raised_by_half_their_range(
    codes: LazyTensor, whole: NDArray[np.int8], bits: int
) -> None:
    packed = unsigned(codes).load()
    assert packed.shape == (6, 32 * bits // 8)
    raised = np.stack([packed & 15, packed >> 4], axis=-1) if bits == 4 else packed
    found = raised.reshape(6, 32).astype(int) - 2 ** (bits - 1)
    np.testing.assert_array_equal(found, whole)


def test_blocks_and_tables_of_codes_are_written_once(tmp_path: Path) -> None:
    matrix = WeightMatrix(FOUR, SCALE, 16)
    both = {"blocks": blocks(matrix), "table": unsigned(FOUR)}
    assert both["blocks"].shape == (6, 2, 8)
    assert both["table"].shape == (6, 16)
    model = written(both, tmp_path)
    assert place(model, "blocks") == place(model, "table")


def test_a_joined_matrix_has_the_scales_of_its_parts() -> None:
    whole = WeightMatrix(FOUR, SCALE, 16)
    made = join_matrices([whole.taken(3, 6), whole.taken(0, 3)])
    assert made.scales is not None
    found = dequantized(made.values, made.scales, 16).load()
    expected = (CODES * SPREAD)[[3, 4, 5, 0, 1, 2]]
    np.testing.assert_array_equal(found, expected)


def written(weights: dict[str, LazyTensor], folder: Path) -> onnx.ModelProto:
    """Write weights with a graph that only holds them, and read the graph back."""
    graph = onnx.GraphProto(name="g")
    for name, one in weights.items():
        external = onnx.TensorProto.EXTERNAL
        graph.initializer.add(
            name=name, data_type=one.onnx_type, dims=one.shape, data_location=external
        )
    write_engine(onnx.ModelProto(graph=graph), weights, folder)
    return onnx.load(folder / "engine.onnx", load_external_data=False)


def place(model: onnx.ModelProto, name: str) -> tuple[int, int] | None:
    """Return where a weight lies; None if it is in the graph."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    entries = {e.key: e.value for e in tensor.external_data}
    return (int(entries["offset"]), int(entries["length"])) if entries else None


@pytest.mark.parametrize("slice_bytes", [1, 300, 1 << 20])
def test_weights_are_written_in_slices_each_from_a_page_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    monkeypatch.setattr(engine_file, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(engine_file, "INLINE_BYTES", 100)
    weights = {name: one for name, (one, _) in MADE.items()}
    model = written(weights, tmp_path)
    data = (tmp_path / WEIGHTS).read_bytes()
    for name, (_, expected) in MADE.items():
        found = place(model, name)
        assert found is not None
        offset, length = found
        assert offset % ALIGNMENT == 0
        assert data[offset : offset + length] == expected.astype(np.float32).tobytes()


def test_small_weights_lie_in_the_graph(tmp_path: Path) -> None:
    model = written({"scale": SCALE}, tmp_path)
    assert place(model, "scale") is None
    assert model.graph.initializer[0].raw_data == SCALES.tobytes()
    assert (tmp_path / WEIGHTS).stat().st_size == 0


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_checkpoints_weights_are_found_where_they_are(engines: Path, role: str) -> None:
    from specrt_export.portable.external_data import map_weights

    folder = engines / "codelet" / "checkpoint" / role
    portable = read_graph(engines / "codelet" / "portable" / f"{role}.onnx")
    found = stored_weights(portable, folder)
    mapped = map_weights(portable, folder)
    assert [w.name for w in mapped] == list(found)
    for weight in mapped:
        np.testing.assert_array_equal(found[weight.name].load(), weight.array)


def test_a_computed_weight_of_another_shape_is_told() -> None:
    from specrt.errors import BuildError

    load: Callable[[], NDArray[np.float32]] = lambda: FLOATS.T  # noqa: E731
    with pytest.raises(BuildError, match=r"shape \[32, 6\], and the graph says \[6, 32\]"):
        computed("c", (6, 32), load).load()
