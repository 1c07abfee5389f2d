"""Engines of the CPU: stored in half the space without a bit lost, checked in fp32, the same for a
row alone as for one in company, blind to what was in their KV buffers before, and for the kernels
that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from lower.lowering import MAX_LENGTH, Case, Lowering, lowered
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Feed
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower.lazy_tensor import (
    ENGINE,
    WEIGHTS,
    LazyTensor,
    as_float,
    joined,
    smallest_format,
    taken,
    transposed,
)
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize


@pytest.fixture
def source(source: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return source("draft")


@contextmanager
def opened(path: Path, geometry: Any, batch: int = 1) -> Iterator[Any]:
    """Open an engine as a device does."""
    engine = open_engine(EngineSpec("ort-cpu", path, geometry, batch, MAX_LENGTH, MAX_LENGTH))
    yield engine
    engine.close()


def logits(folder: Path, geometry: Any) -> NDArray[np.float32]:
    tokens = np.random.default_rng(0).integers(0, 8192, (1, 20))
    with opened(folder / ENGINE, geometry) as engine:
        first = engine.forward(tokens[:, :15], 0).logits.copy()
        return np.concatenate([first, engine.forward(tokens[:, 15:], 15).logits], axis=1)


@pytest.mark.parametrize(
    ("precision", "share"),
    [
        (Precision.of("bf16"), 0.55),
        (Precision.of("fp16"), 0.55),
        (Precision.of("int4", embedding="bf16"), 1),
    ],
    ids=["bf16", "fp16", "int4"],
)
def test_halves_are_stored_as_such_and_come_back_bit_for_bit(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    precision: Precision, share: float,
) -> None:  # fmt: skip
    made = quantize(*source, tmp_path / "q", precision)
    source = made.graph, made.folder
    whole, half, sliced = (tmp_path / name for name in ("whole", "half", "sliced"))
    one = compile_ort_cpu(*source, half, MAX_LENGTH)
    with monkeypatch.context() as patch:
        patch.setattr("specrt_export.lower.lazy_tensor.SLICE_BYTES", 1000)
        patch.setattr("specrt_export.lower.tiles.PIECE_BYTES", 100)
        compile_ort_cpu(*source, sliced, MAX_LENGTH)
        patch.setattr("specrt_export.lower.cpu_lowering.smallest_format", lambda weights: "fp32")
        compile_ort_cpu(*source, whole, MAX_LENGTH)
    for file in (ENGINE, WEIGHTS):
        assert (half / file).read_bytes() == (sliced / file).read_bytes()
    assert (logits(half, one.geometry) == logits(whole, one.geometry)).all()
    assert (half / WEIGHTS).stat().st_size < share * (whole / WEIGHTS).stat().st_size
    assert sorted(p.name for p in half.iterdir()) == [WEIGHTS, ENGINE]


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


POISON = 5
"""A token whose embedding is not a number, and so are its keys and values."""


def poison(case: Case) -> None:
    """Let a token be looked up as what is not a number; the last projection stays as it is."""
    nodes = [n for n in case.model.graph.node if n.op_type == "Embedding"]
    (table,) = (t for t in case.model.graph.initializer if t.name == nodes[0].input[1])
    place = {entry.key: entry.value for entry in table.external_data}
    values = np.memmap(
        case.lowered.folder / WEIGHTS, np.uint16, "r+", int(place["offset"]), (2 * table.dims[1],)
    )
    values[POISON::64] = 0x7FC0  # a bf16 of the first strip: 4 tiles of 16
    values.flush()


def test_what_was_in_the_buffers_before_never_shows(
    source: tuple[Path, Path], tmp_path: Path
) -> None:
    how = Lowering("ort-cpu", batch=3)
    made = quantize(*source, tmp_path / "q", Precision.of("int8", embedding="bf16"))
    case = lowered(made.graph, made.folder, tmp_path, how)
    poison(case)
    path, geometry = case.lowered.folder / ENGINE, case.lowered.geometry
    text = np.random.default_rng(0).integers(10, 8192, 50).tolist()
    wrong = [POISON] * MAX_LENGTH
    parts = [Feed(1, text[:20], 0, 20), Feed(1, text[20:33], 20, 13), Feed(1, text[33:], 33, 17)]
    with opened(path, geometry, 3) as engine:
        clean = [engine.forward_rows([part])[0].logits.copy() for part in parts]
        spoiled = engine.forward_rows([Feed(row, wrong, 0, 1) for row in range(3)])
        assert all(np.isnan(output.logits).all() for output in spoiled)
        for part, expected in zip(parts, clean, strict=True):
            beside = Feed(2, wrong[:3], part.start, 3)
            found = engine.forward_rows([beside, part])[1].logits
            assert np.array_equal(found, expected)
        engine.copy_row(1, 0, 33)
        (found,) = engine.forward_rows([Feed(0, text[33:], 33, 17)])
        assert np.array_equal(found.logits, clean[2])
