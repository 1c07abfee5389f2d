"""What lowering makes for TensorRT has nothing that the lint would name."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrt.engine.tensorrt.library import DECOMPOSED, NATIVE
from specrt_export.lint import lint
from specrt_export.lower.lazy_tensor import stored_weights
from specrt_export.lower.tensorrt_lowering import TensorRtTarget, lower_tensorrt, mark_decomposable
from specrt_export.portable.graph import geometry_of, read_graph


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("form", "version"),
    [(NATIVE, (10, 15)), (NATIVE, (11, 0)), (DECOMPOSED, (10, 3)), (DECOMPOSED, (11, 0))],
)
def test_lowered_graphs_are_clean(
    engines: Path, compute: str, form: str, version: tuple[int, int]
) -> None:
    folder = engines / "codelet"
    portable = read_graph(folder / "portable" / "draft.onnx")
    weights = stored_weights(portable, folder / "checkpoint" / "draft")
    target = TensorRtTarget(geometry_of(portable), 64, compute=compute, form=form)
    model = lower_tensorrt(portable, weights, target).model
    kernel = {"attention-kernel"} if form == NATIVE else set()
    assert {f.rule for f in lint(model, version)} == kernel  # two heads, or fp32
    mark_decomposable(model)
    assert lint(model, version) == []
