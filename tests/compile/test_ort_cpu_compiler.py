"""Engines of the CPU: stored in half the space without a bit lost, and blind to what was in their
KV buffers before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from lower.lowering import MAX_LENGTH, Lowering, lowered
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.protocol import Feed
from specrt.errors import BuildError
from specrt.geometry import RECURRENT, Geometry, LayerMemory
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


@pytest.fixture
def source(source: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return source("draft")


@contextmanager
def opened(folder: Path, geometry: Any, batch: int = 1) -> Iterator[Any]:
    """Open an engine as a device does."""
    spec = EngineSpec("ort-cpu", folder / ENGINE, geometry, batch, MAX_LENGTH, MAX_LENGTH)
    engine = open_engine(spec)
    yield engine
    engine.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_halves_are_stored_as_such_and_come_back_bit_for_bit(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    made = quantize(*source, tmp_path / "q", Precision.of(precision))
    half, whole, scores = tmp_path / "half", tmp_path / "whole", []
    for folder in (half, whole):
        compiled = compile_ort_cpu(made.graph, made.folder, folder, MAX_LENGTH)
        with opened(folder, compiled.geometry) as engine:
            scores.append(engine.forward(np.arange(20)[None], 0).logits.copy())
        monkeypatch.setattr("specrt_export.lower.tiles.smallest_format", lambda _: "fp32")
    assert np.array_equal(*scores)
    assert (half / WEIGHTS).stat().st_size < 0.55 * (whole / WEIGHTS).stat().st_size


POISON = 5
"""A token whose embedding is not a number, and so are its keys and values."""


def test_what_was_in_the_buffers_before_never_shows(
    source: tuple[Path, Path], tmp_path: Path
) -> None:
    made = quantize(*source, tmp_path / "q", Precision.of("int8", embedding="bf16"))
    case = lowered(made.graph, made.folder, tmp_path, Lowering("ort-cpu", batch=3))
    folder = case.lowered.folder
    (name,) = (n.input[1] for n in case.model.graph.node if n.op_type == "Embedding")
    (table,) = (t for t in case.model.graph.initializer if t.name == name)
    place = {entry.key: int(entry.value) for entry in table.external_data if entry.key == "offset"}
    shape = (2 * table.dims[1],)
    values = np.memmap(folder / WEIGHTS, np.uint16, "r+", place["offset"], shape)
    values[POISON::64] = 0x7FC0  # a bf16 of the first strip: 4 tiles of 16
    values.flush()
    text, wrong = list(range(10, 60)), [POISON] * MAX_LENGTH
    parts = [Feed(1, text[:20], 0, 20), Feed(1, text[20:33], 20, 13), Feed(1, text[33:], 33, 17)]
    with opened(folder, case.lowered.geometry, 3) as engine:
        clean = [engine.forward_rows([part])[0].logits.copy() for part in parts]
        spoiled = engine.forward_rows([Feed(row, wrong, 0, 1) for row in range(3)])
        assert all(np.isnan(output.logits).all() for output in spoiled)
        for part, expected in zip(parts, clean, strict=True):
            _, output = engine.forward_rows([Feed(2, wrong[:3], part.start, 3), part])
            assert np.array_equal(output.logits, expected)
        engine.copy_row(1, 0, 33)
        (output,) = engine.forward_rows([Feed(0, text[33:], 33, 17)])
        assert np.array_equal(output.logits, clean[2])


@pytest.mark.parametrize(("role", "most"), [("target", 31), ("draft", 18)])
def test_more_tokens_than_states_take_back_are_not_drafted(role: str, most: int) -> None:
    recurs = Geometry(0, 160, 512, 1, (LayerMemory(RECURRENT, 4, 8, 8, key_heads=2),))
    fine, more = (Lowering("ort-cpu").recipe(gammas=(n,)).models[role] for n in (most, most + 1))
    fine.check_layers(recurs, mixes=False)
    more.check_layers(Geometry.uniform(1, 1, 1, 1, 160, 512), mixes=False)
    with pytest.raises(BuildError, match=f"reaches {most + 1}, .* up to {most} .*lower it"):
        more.check_layers(recurs, mixes=False)
    if role == "target":
        with pytest.raises(BuildError, match=r"engine\.batch is 2, and tensorrt runs .* one row"):
            Lowering("tensorrt", batch=2).recipe().models[role].check_layers(recurs, mixes=False)
        with pytest.raises(BuildError, match="which ort-cuda does not run; build for ort-cpu"):
            Lowering("ort-cuda").recipe().models[role].check_layers(recurs, mixes=False)
