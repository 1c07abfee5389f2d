"""Half precision for a GPU: what is narrowed, what stays fp32, and that all stays on the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest

from lower.lowering import MAX_LENGTH, Case, Lowering
from specrt.errors import BuildError
from specrt.geometry import ATTENTION, Geometry, LayerMemory
from specrt_export.check.equivalence import TOLERANCES
from specrt_export.compile import ort_cuda_compiler
from specrt_export.compile.compiler import GraphSource
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.lower.half import TYPES, narrowed
from specrt_export.lower.lazy_tensor import LazyTensor, in_memory
from specrt_export.portable.graph import runs_here
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize

FLOAT, FP16, BF16 = (TYPES.get(k, onnx.TensorProto.FLOAT) for k in ("fp32", "fp16", "bf16"))

READ_ON_HOST = {
    "Expand": (1,), "GroupQueryAttention": (6,), "Pad": (1,), "ReduceSum": (1,),
    "Reshape": (1,), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "TopK": (1,),
    "Unsqueeze": (1,),
}  # fmt: skip
"""Inputs that CUDA kernels read in main memory. Source: the InputMemoryType of their registration
in onnxruntime/core/providers/cuda and onnxruntime/contrib_ops/cuda."""
ON_DEVICE = {
    "Add", "Cast", "Concat", "Cos", "Div", "FusedMatMul", "Gather", "GatherBlockQuantized",
    "GatherElements", "Gelu", "GreaterOrEqual", "IsNaN", "LayerNormalization", "MatMulNBits", "Max",
    "Mul", "Neg", "Pow", "Relu", "RotaryEmbedding", "Sigmoid", "SimplifiedLayerNormalization",
    "Sin", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softmax", "Sub", "Tanh",
    "TensorScatter", "Transpose", "Where",
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
    odd = Geometry.uniform(1, 1, 1, 520, 96, 512)
    monkeypatch.setattr(ort_cuda_compiler, "geometry_of", lambda portable: odd)
    with pytest.raises(BuildError, match="heads of 520, and ort-cuda needs multiples of 8"):
        compile_ort_cuda(*draft, tmp_path / "out", max_length=MAX_LENGTH)
    wide = replace(odd, memories=(LayerMemory(ATTENTION, 1, 8, 16),))
    monkeypatch.setattr(ort_cuda_compiler, "geometry_of", lambda portable: wide)
    with pytest.raises(BuildError, match="values that are wider than its keys"):
        compile_ort_cuda(*draft, tmp_path / "out", max_length=MAX_LENGTH)
    assert not (tmp_path / "out").exists()


def test_a_weight_beyond_fp16_is_named() -> None:
    array = np.array([1.0, 7e4], np.float32)
    large = LazyTensor("layers.0.w", FLOAT, (2,), lambda a, b: array[a:b])
    with pytest.raises(BuildError, match=r"layers\.0\.w has weights up to 7e\+04.*precision bf16"):
        narrowed(large, FP16).load()
    assert np.isfinite(narrowed(large, BF16).load().view(ml_dtypes.bfloat16).astype(float)).all()
    endless = in_memory("mask", np.array([-np.inf, 0.0], np.float32))
    assert narrowed(endless, FP16).load().tolist() == [-np.inf, 0.0]
