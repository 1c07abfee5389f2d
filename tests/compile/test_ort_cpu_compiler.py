"""Engines of the CPU: stored in half the space without a bit lost, checked in fp32, and the same
for a row alone as for one in company."""

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
from specrt.engine.ort import OrtEngine
from specrt.engine.ort_packed import settle_padding
from specrt_export.check.quality import EngineScorer, measure
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu, exact_copy
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.precision import Precision
from specrt_export.quantize import quantize


@pytest.fixture
def source(source: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return source("draft")


@contextmanager
def opened(path: Path, geometry: Any, precision: str = "fp32") -> Iterator[OrtEngine]:
    """Open an engine as a device opens a target of a precision."""
    whole = precision in ("int8", "int4")
    engine = open_engine(
        "ort-cpu", path, geometry, batch=1, max_length=MAX_LENGTH, max_width=MAX_LENGTH, threads=1,
        pad_single_token=whole, pad_to_even=whole, upcast_weights=precision in ("fp16", "bf16"),
    )  # fmt: skip
    assert isinstance(engine, OrtEngine)
    yield engine
    engine.close()


def logits(folder: Path, geometry: Any) -> NDArray[np.float32]:
    tokens = np.random.default_rng(0).integers(0, 8192, (1, 20))
    with opened(folder / ENGINE, geometry, "bf16") as engine:
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
    if precision.rewrites:
        made = quantize(*source, tmp_path / "q", precision)
        source = made.graph, made.folder
    whole, half, sliced = (tmp_path / name for name in ("whole", "half", "sliced"))
    one = compile_ort_cpu(*source, whole, MAX_LENGTH)
    compile_ort_cpu(*source, half, MAX_LENGTH, precision=precision)
    monkeypatch.setattr("specrt_export.lower.lazy_tensor.SLICE_BYTES", 1000)
    compile_ort_cpu(*source, sliced, MAX_LENGTH, precision=precision)
    for file in (ENGINE, WEIGHTS):
        assert (half / file).read_bytes() == (sliced / file).read_bytes()
    assert (logits(half, one.geometry) == logits(whole, one.geometry)).all()
    assert (half / WEIGHTS).stat().st_size < share * (whole / WEIGHTS).stat().st_size
    assert sorted(p.name for p in half.iterdir()) == [WEIGHTS, ENGINE]


@pytest.mark.parametrize(("precision", "block"), [("int8", 32), ("int4", 128)])
def test_a_row_has_the_same_bits_in_company_up_to_the_last_position(
    source: tuple[Path, Path], tmp_path: Path, precision: str, block: int
) -> None:
    made = quantize(*source, tmp_path / "q", Precision.of(precision, block=block))
    one = compile_ort_cpu(made.graph, made.folder, tmp_path / "engine", MAX_LENGTH)
    with opened(tmp_path / "engine" / ENGINE, one.geometry, precision) as engine:
        length = engine.max_length
        assert length == MAX_LENGTH - 1, "one position is kept for a partner"
        tokens = np.random.default_rng(0).integers(0, 8192, (1, length))
        for settle in (lambda engine: True, settle_padding):
            settle(engine)
            for begin in range(0, length, 2):  # as decoding fills it
                engine.forward(tokens[:, begin : begin + 2], begin, 1)
            for end in (length, 100):  # a partner is written behind the end
                alone = engine.forward(tokens[:, end - 1 : end], end - 1).logits[0, -1].copy()
                for width in (2, 3, 4, 5):
                    company = engine.forward(tokens[:, end - width : end], end - width)
                    assert (company.logits[0, -1] == alone).all(), (end, width)


@pytest.fixture
def int8(source: tuple[Path, Path], tmp_path: Path) -> Case:
    return lowered(*source, tmp_path, Lowering("ort-cpu", "int8"))


def test_kernels_that_round_a_lone_row_otherwise_are_found_out(
    int8: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = OrtEngine.forward

    def forward(engine: OrtEngine, tokens: Any, start: Any, rows: int | None = None) -> Any:
        output = real(engine, tokens, start, rows)
        if np.shape(tokens)[1] % 2 and not engine.pad_to_even:
            output.logits[0, -1, 5] += 1e-6
        return output

    with opened(int8.lowered.folder / ENGINE, int8.lowered.geometry, "int8") as engine:
        monkeypatch.setattr(OrtEngine, "forward", forward)
        assert settle_padding(engine)
        assert engine.pad_to_even


def test_the_check_computes_in_fp32_and_leaves_no_file(int8: Case) -> None:
    path = int8.lowered.folder / ENGINE

    def levels(engine: Path) -> set[int]:
        nodes = onnx.load(engine, load_external_data=False).graph.node
        return {a.i for n in nodes for a in n.attribute if a.name == "accuracy_level"}

    assert levels(path) == {4}
    tokens = np.random.default_rng(0).integers(0, 8192, 64)
    with (
        exact_copy(path) as copy,
        opened(path, int8.lowered.geometry) as fast,
        opened(copy, int8.lowered.geometry) as exact,
    ):
        assert levels(copy) == {1}
        # Activations as int8: near, and not the same.
        assert 1e-7 < measure(EngineScorer(exact), EngineScorer(fast), [tokens]).kl < 1e-2
    assert not copy.exists()
    with pytest.raises(KeyboardInterrupt), exact_copy(path) as copy:
        raise KeyboardInterrupt
    assert not copy.exists()
