"""Engines of ONNX Runtime on a GPU, in every precision: their numbers and captured graphs.

Skipped where no GPU answers; `make gpu-check` runs them, and speculation on bundles.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from gpucheck.correctness import check_logits, check_replays
from gpucheck.evidence import Evidence

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.cuda_engine import OrtCudaEngine, missing, unloadable
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.portable.graph import GraphRun
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

_LACKS = missing() or unloadable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_LACKS), reason=_LACKS or "runs here")]

MAX_LENGTH, MAX_WIDTH, CAPTURES = 512, 64, 9
TOLERANCES = {"fp16": 4e-3, "bf16": 3e-2, "int8": 4e-3, "int4": 4e-3}
"""Parts of the spread of the logits. On the CPU provider fp16 comes to 7e-4 on codelet; bf16 keeps
three bits less, so eight times that. int8 and int4 are multiplied with fp16 activations and
compared with the same whole numbers in fp32."""


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("role", ["draft", "target"])
def test_logits_are_those_of_the_portable_graph_replayed_or_launched(
    engines: Path, tmp_path: Path, role: str, precision: str
) -> None:
    pair = engines / "codelet"
    graph, weights = pair / "portable" / f"{role}.onnx", pair / "checkpoint" / role
    if precision in ("int8", "int4"):
        made = quantize(graph, weights, tmp_path / "graph", Precision.of(precision))
        graph, weights = made.graph, made.folder
    compute = "bf16" if precision == "bf16" else "fp16"
    model = compile_ort_cuda(
        graph, weights, tmp_path, MAX_LENGTH, compute=compute, captured=CAPTURES
    )

    def opened(capture: bool) -> OrtCudaEngine:
        path = tmp_path / "engine.onnx"
        spec = EngineSpec("ort-cuda", path, model.geometry, 1, MAX_LENGTH, MAX_WIDTH)
        return OrtCudaEngine(spec, capture=capture)

    with closing(opened(True)) as engine:
        assert [engine.captures(width, 1) for width in (CAPTURES, CAPTURES + 1)] == [True, False]
        check_logits(engine, GraphRun(graph, weights), TOLERANCES[precision], Evidence())
    check_replays(opened, Evidence())
