"""An engine whose weights are stored as fp16 or bf16 is the fp32 engine, in half the space."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from specrt.bundle import Bundle
from specrt_export.builder import build
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS
from specrt_export.precision import Precision
from specrt_export.quantize import Quantized, quantize
from specrt_export.recipe import read_recipe

MAX_LENGTH = 64


@pytest.fixture
def draft(engines: Path) -> tuple[Path, Path]:
    folder = engines / "codelet"
    return folder / "portable" / "draft.onnx", folder / "checkpoint" / "draft"


def types(folder: Path) -> list[str]:
    """The types of an engine's weights that lie beside it."""
    model = onnx.load(folder / ENGINE, load_external_data=False)
    return [
        onnx.TensorProto.DataType.Name(t.data_type)
        for t in model.graph.initializer
        if t.data_location == onnx.TensorProto.EXTERNAL
    ]


def logits(folder: Path) -> NDArray[np.float32]:
    """Run two passes with casts folded, as a device opens such an engine."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    session = ort.InferenceSession(str(folder / ENGINE), options, ["CPUExecutionProvider"])
    caches = {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs()[3:]}
    tokens = np.random.default_rng(0).integers(0, 8192, (1, 20))
    found = []
    for begin, end in ((0, 15), (15, 20)):
        names = ["logits", *(f"present_{name}" for name in caches)]
        rows = np.arange(end - begin)
        feed = {"input_ids": tokens[:, begin:end], "start": np.array([begin]), "rows": rows}
        made, *written = session.run(names, {**feed, **caches})
        caches = dict(zip(caches, written, strict=True))
        found.append(made)
    return np.concatenate(found, axis=1)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_weights_take_half_and_come_back_bit_for_bit(
    draft: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    precision = Precision.of(kind)
    whole, half = both(quantize(*draft, tmp_path / "q", precision), tmp_path, precision)
    assert (half / WEIGHTS).stat().st_size < 0.55 * (whole / WEIGHTS).stat().st_size
    assert (logits(half) == logits(whole)).all()
    found = types(half)
    assert found.count("BFLOAT16" if kind == "bf16" else "FLOAT16") > 5
    # Sines and cosines are no weights of the checkpoint, and need all of their digits.
    assert "FLOAT" in found
    assert sorted(p.name for p in half.iterdir()) == [WEIGHTS, ENGINE]


def both(made: Quantized, folder: Path, precision: Precision) -> tuple[Path, Path]:
    """Compile a graph twice: stored as fp32, and as a precision says."""
    for name, stored in (("whole", None), ("half", precision)):
        compile_ort_cpu(made.graph, made.folder, folder / name, MAX_LENGTH, precision=stored)
    return folder / "whole", folder / "half"


def test_slices_do_not_show(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, items in (("whole", 1 << 22), ("sliced", 1000)):
        monkeypatch.setattr("specrt_export.lower.lazy_tensor.SLICE_BYTES", items)
        compile_ort_cpu(*draft, tmp_path / name, MAX_LENGTH, precision=Precision.of("bf16"))
    for file in (ENGINE, WEIGHTS):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "sliced" / file).read_bytes()


def test_whole_numbers_stay_beside_a_table_in_bf16(
    draft: tuple[Path, Path], tmp_path: Path
) -> None:
    precision = Precision.of("int4", embedding="bf16")
    whole, half = both(quantize(*draft, tmp_path / "q", precision), tmp_path, precision)
    assert (logits(half) == logits(whole)).all()
    assert {"BFLOAT16", "UINT8", "FLOAT"} <= set(types(half))


@pytest.mark.parametrize("precision", [Precision.of("fp32"), Precision.of("int8")])
def test_other_precisions_are_left_alone(
    draft: tuple[Path, Path], tmp_path: Path, precision: Precision
) -> None:
    for name, stored in (("plain", None), ("stored", precision)):
        compile_ort_cpu(*draft, tmp_path / name, MAX_LENGTH, precision=stored)
    for name in (ENGINE, WEIGHTS):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "stored" / name).read_bytes()


def test_a_bundle_stored_as_bf16_takes_half(small: Path, out: Path) -> None:
    build(read_recipe(small), out)
    whole = Bundle.open(out).manifest
    written = small.read_text(encoding="utf-8")
    small.write_text(written.replace("[engine]", '[engine]\nprecision = "bf16"'), encoding="utf-8")
    build(read_recipe(small), out)
    half = Bundle.open(out).manifest
    for role in ("target", "draft"):
        name = f"{role}/{WEIGHTS}"
        assert half.files[name].bytes < 0.6 * whole.files[name].bytes
    # What opening it takes is fp32 all the same.
    assert half.target.weight_bytes >= whole.target.weight_bytes
