"""What TensorRT needs of a graph beyond its meaning: scales, masks, rows, and nothing to lint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from lower.lowering import NEW, OLD, Lowering, lowered
from shared import nightly_but
from specrt_export.compile.compiler import GraphSource
from specrt_export.lint import lint
from specrt_export.lower.tensorrt_lowering import mark_decomposable
from specrt_export.portable.graph import read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)


@needs_reference
@pytest.mark.parametrize(
    ("precision", "version", "least", "most"),
    [
        ("fp32", OLD, 0, 1e-5),
        ("fp16", NEW, 1e-5, 2e-3),
        # Widened on a CPU: only what was stored narrower than the checkpoint's bf16 shows.
        ("bf16", OLD, 0, 2e-2),
        ("int8", NEW, 1e-5, 2e-3),
        ("int4", OLD, 1e-5, 2e-3),
        ("fp8", NEW, 1e-5, 2e-3),
    ],
)
def test_reduced_precision_stays_near_in_a_graph_that_is_clean(
    draft: tuple[Path, Path], tmp_path: Path, precision: str, version: str, least: float,
    most: float,
) -> None:  # fmt: skip
    case = lowered(*draft, tmp_path, Lowering("tensorrt", precision, version=version))
    assert least < case.error() < most
    whole = precision in ("int8", "int4", "fp8")
    assert case.lowered.fused["quantized"] == ("9/9" if whole else "0/9")
    model, folder = case.model, case.lowered.folder
    # Two heads, or fp32, have no kernel of their own.
    kernel = {"attention-kernel"} if version == NEW else set()
    assert {finding.rule for finding in lint(model, (11, 0), folder)} == kernel
    mark_decomposable(model)
    for one in [(10, 15) if version == NEW else (10, 3), (11, 0)]:
        assert lint(model, one, folder) == []


@needs_reference
@pytest.mark.parametrize("precision", nightly_but(["fp32"], ["fp32", "fp16", "int4"]))
@pytest.mark.parametrize(
    ("how", "rewritten"),
    [
        ({"grouped_queries": True}, {"grouped"}),
        ({"kv_lengths": (32, 96)}, {"prefix"}),
        ({"grouped_queries": True, "kv_lengths": (32, 96)}, {"grouped", "prefix"}),
    ],
    ids=["grouped", "prefix", "both"],
)
def test_attention_may_be_rewritten_for_wide_passes(
    target: tuple[Path, Path], tmp_path: Path, precision: str, how: dict[str, Any],
    rewritten: set[str],
) -> None:  # fmt: skip
    """Three queries share keys here; passes end below, at and beyond the lengths."""
    case = lowered(*target, tmp_path, Lowering("tensorrt", precision, **how), "target")
    assert case.error((1, 5, 7, 8, 9)) < {"fp32": 1e-5}.get(precision, 4e-3)
    counts = case.lowered.fused
    assert {name for name in ("grouped", "prefix") if counts.get(name) == "8/8"} == rewritten
    model = case.model
    mark_decomposable(model)
    assert lint(model, (11, 0), case.lowered.folder) == []
    names = [value.name for value in model.graph.input]
    assert ("kv_length" in names) is ("prefix" in rewritten)


def test_no_scale_is_zero_in_fp16(draft: tuple[Path, Path], tmp_path: Path) -> None:
    """Rows of tiny weights have scales that fp16 rounds to 0, and TensorRT refuses those."""
    stored = quantize(*draft, tmp_path / "stored", Precision.of("int8", per_row=True))
    for tensor in read_graph(stored.graph).graph.initializer:
        if tensor.name.endswith(".scale"):
            place = {entry.key: entry.value for entry in tensor.external_data}
            path, offset = stored.folder / place["location"], int(place["offset"])
            values = np.memmap(path, np.float32, "r+", offset, int(np.prod(tensor.dims)))
            values *= 1e-12
            values.flush()
    source = GraphSource(stored.graph, stored.folder)
    made = Lowering("tensorrt", "int8").compiler().lower(source, tmp_path / "made")
    model = onnx.load(made.folder / "engine.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    scales = [arrays[n.input[1]] for n in model.graph.node if n.op_type == "DequantizeLinear"]
    assert scales
    assert all(scale.dtype == np.float16 and (scale != 0).all() for scale in scales)


def test_what_is_no_token_is_looked_up_as_the_first(
    draft: tuple[Path, Path], tmp_path: Path
) -> None:
    case = lowered(*draft, tmp_path, Lowering("tensorrt"))
    last = case.lowered.geometry.vocab_size - 1
    with case.compiler.score(case.lowered, 8, exact=True) as engine:
        none, zero, end = (engine.forward([[5, t, 7]], 0).logits.copy() for t in (-1, 0, last))
    np.testing.assert_array_equal(none, zero)
    assert not np.array_equal(none, end)
