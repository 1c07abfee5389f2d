"""Engines of the CPU: stored in half the space without a bit lost, checked in fp32, and for the
kernels that are here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from lower.lowering import MAX_LENGTH, Lowering, lowered
from specrt.engine.backends import open_engine
from specrt.engine.ort import OrtEngine
from specrt.engine.ort_contrib import ContribEngine
from specrt.engine.protocol import Engine
from specrt_export.check.quality import EngineScorer, measure
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu, exact_copy
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.precision import Precision
from specrt_export.quantize import quantize
from support.kernels import without_kernels


@pytest.fixture
def source(source: Callable[[str], tuple[Path, Path]]) -> tuple[Path, Path]:
    return source("draft")


@contextmanager
def opened(path: Path, geometry: Any) -> Iterator[Engine]:
    engine = open_engine(
        "ort-cpu", path, geometry, batch=1, max_length=MAX_LENGTH, max_width=MAX_LENGTH, threads=1
    )
    yield engine
    engine.close()


def logits(folder: Path, geometry: Any) -> NDArray[np.float32]:
    tokens = np.random.default_rng(0).integers(0, 8192, (1, 20))
    with opened(folder / ENGINE, geometry) as engine:
        first = engine.forward(tokens[:, :15], 0).logits.copy()
        return np.concatenate([first, engine.forward(tokens[:, 15:], 15).logits], axis=1)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_halves_are_stored_as_such_and_come_back_bit_for_bit(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made = quantize(*source, tmp_path / "q", Precision.of(kind))
    half, sliced, wide = (tmp_path / name for name in ("half", "sliced", "wide"))
    one = compile_ort_cpu(made.graph, made.folder, half, MAX_LENGTH)
    with monkeypatch.context() as small:
        small.setattr("specrt_export.lower.lazy_tensor.SLICE_BYTES", 1000)
        compile_ort_cpu(made.graph, made.folder, sliced, MAX_LENGTH)
    for file in (ENGINE, WEIGHTS):
        assert (half / file).read_bytes() == (sliced / file).read_bytes()
    with monkeypatch.context() as floats:
        floats.setattr("specrt_export.lower.cpu_lowering.smallest_format", lambda weight: "fp32")
        compile_ort_cpu(made.graph, made.folder, wide, MAX_LENGTH)
    assert (logits(half, one.geometry) == logits(wide, one.geometry)).all()
    assert (half / WEIGHTS).stat().st_size < 0.55 * (wide / WEIGHTS).stat().st_size
    assert sorted(p.name for p in half.iterdir()) == [WEIGHTS, ENGINE]


def test_what_is_compiled_is_for_the_kernels_that_are_here(
    source: tuple[Path, Path], tmp_path: Path
) -> None:
    compiler = Lowering("ort-cpu").compiler()
    versions = []
    for name, kind, context in (
        ("own", OrtEngine, nullcontext), ("contrib", ContribEngine, without_kernels),
    ):  # fmt: skip
        with context():
            versions.append(compiler.versions())
            one = compile_ort_cpu(*source, tmp_path / name, MAX_LENGTH)
        with opened(tmp_path / name / ENGINE, one.geometry) as engine:
            assert isinstance(engine, kind)
    assert versions[0]["kernels"] != versions[1]["kernels"], "another makes a bundle stale"
    own, contrib = (logits(tmp_path / name, one.geometry) for name in ("own", "contrib"))
    np.testing.assert_allclose(own, contrib, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("has_kernels", "attribute", "fast_level"),
    [(True, "exact", 0), (False, "accuracy_level", 4)],
    ids=["own", "contrib"],
)
def test_the_check_computes_in_fp32_and_leaves_no_file(
    source: tuple[Path, Path], tmp_path: Path, has_kernels: bool, attribute: str, fast_level: int
) -> None:
    with nullcontext() if has_kernels else without_kernels():
        int8 = lowered(*source, tmp_path, Lowering("ort-cpu", "int8"))
    path = int8.lowered.folder / ENGINE

    def levels(engine: Path) -> set[int]:
        nodes = onnx.load(engine, load_external_data=False).graph.node
        return {a.i for n in nodes for a in n.attribute if a.name == attribute}

    assert levels(path) == {fast_level}
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
