"""Half precision for a GPU: what is narrowed, what stays fp32, and that all stays on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lower.lowering import MAX_LENGTH, Case, Lowering, lowered
from specrt.engine.ort.cuda_engine import CAPTURED
from specrt.errors import BuildError
from specrt_export.check.equivalence import TOLERANCES
from specrt_export.compile import ort_cuda_compiler
from specrt_export.compile.compiler import GraphSource
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.lower.half import TYPES, narrowed
from specrt_export.lower.lazy_tensor import LazyTensor, in_memory
from specrt_export.portable.graph import facts_of, geometry_of, read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

FLOAT, FP16, BF16 = (TYPES.get(k, onnx.TensorProto.FLOAT) for k in ("fp32", "fp16", "bf16"))

READ_ON_HOST = {
    "Expand": (1,), "GroupQueryAttention": (6,), "ReduceSum": (1,), "Reshape": (1,),
    "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "TopK": (1,), "Unsqueeze": (1,),
}  # fmt: skip
"""Inputs that CUDA kernels read in main memory. Source: the InputMemoryType of their registration
in onnxruntime/core/providers/cuda and onnxruntime/contrib_ops/cuda."""
ON_DEVICE = {
    "Add", "Cast", "Div", "FusedMatMul", "Gather", "GatherBlockQuantized", "GatherElements", "Gelu",
    "IsNaN", "LayerNormalization", "MatMulNBits", "Mul", "Pow", "Relu", "RotaryEmbedding",
    "Sigmoid", "SimplifiedLayerNormalization", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Softmax", "Sub", "Tanh", "Transpose", "Where",
}  # fmt: skip
"""Operators whose CUDA kernels read and write device memory only."""


def stays_on_device(model: onnx.ModelProto) -> bool:
    """Tell whether no value has to cross between main memory and the device."""
    constants = {t.name for t in model.graph.initializer}
    read = [
        (node.op_type, node.input[place])
        for node in model.graph.node
        for place in READ_ON_HOST.get(node.op_type, ())
        if place < len(node.input) and node.input[place]
    ]
    known = ON_DEVICE | READ_ON_HOST.keys()
    return {n.op_type for n in model.graph.node} <= known and all(v in constants for _, v in read)


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_only_scores_are_fp32_and_nothing_leaves_the_device(
    draft: tuple[Path, Path], tmp_path: Path, compute: str
) -> None:
    case = lowered(*draft, tmp_path, Lowering("ort-cuda", compute))
    model, kind = case.model, TYPES[compute]
    assert {t.data_type for t in model.graph.initializer} & {FLOAT, FP16, BF16} == {kind}
    scores = {"logits": FLOAT, "confidence": FLOAT, "lengths": onnx.TensorProto.INT32}
    for value in [*model.graph.input, *model.graph.output]:
        found = value.type.tensor_type.elem_type
        cache = value.name.removeprefix("present_").startswith(("key.", "value."))
        assert found == (kind if cache else scores.get(value.name, onnx.TensorProto.INT64))
    assert stays_on_device(model)
    totals = {t.name: t for t in model.graph.initializer}
    attention = [n for n in model.graph.node if n.op_type == "GroupQueryAttention"]
    for node in attention:
        assert node.input[5] == "lengths"
        assert onnx.numpy_helper.to_array(totals[node.input[6]]).tolist() == [MAX_LENGTH]
    assert facts_of(model)[CAPTURED] == "5"


@pytest.mark.skipif(not runs_here(), reason="this ONNX Runtime cannot run portable graphs")
def test_whole_numbers_are_multiplied_with_halves(draft: tuple[Path, Path], tmp_path: Path) -> None:
    precision, compute = Precision.of("bf16", head="int8", embedding="int4"), "bf16"
    made = quantize(*draft, tmp_path / "quantized", precision)
    compiler = Lowering("ort-cuda", compute).compiler()
    graph = GraphSource(made.graph, made.folder)
    case = Case(graph, compiler.lower(graph, tmp_path / "engine"), compiler)
    assert stays_on_device(case.model)
    assert FLOAT not in {t.data_type for t in case.model.graph.initializer}
    assert case.error() < TOLERANCES[compute] / 4


def test_what_the_kernels_do_not_take_is_refused_first(
    draft: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match=r"engine\.batch is 2, and ort-cuda builds batch 1"):
        compile_ort_cuda(*draft, tmp_path / "out", max_length=MAX_LENGTH, batch=2)
    odd = replace(geometry_of(read_graph(draft[0])), head_dim=264)
    monkeypatch.setattr(ort_cuda_compiler, "geometry_of", lambda portable: odd)
    with pytest.raises(BuildError, match="heads of 264, and ort-cuda needs multiples of 8"):
        compile_ort_cuda(*draft, tmp_path / "out", max_length=MAX_LENGTH)
    assert not (tmp_path / "out").exists()


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_bf16_is_rounded_as_others_round_it(values: list[float]) -> None:
    array = np.array(values, np.float32)
    found = narrowed(in_memory("w", array), BF16).load().view(ml_dtypes.bfloat16)
    wanted = array.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_a_weight_beyond_fp16_is_named() -> None:
    array = np.array([1.0, 7e4], np.float32)
    large = LazyTensor("layers.0.w", FLOAT, (2,), lambda a, b: array[a:b])
    with pytest.raises(BuildError, match=r"layers\.0\.w has weights up to 7e\+04.*precision bf16"):
        narrowed(large, FP16).load()
    assert np.isfinite(narrowed(large, BF16).load().view(ml_dtypes.bfloat16).astype(float)).all()
    endless = in_memory("mask", np.array([-np.inf, 0.0], np.float32))
    assert narrowed(endless, FP16).load().tolist() == [-np.inf, 0.0]
