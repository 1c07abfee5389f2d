"""Half precision: what is narrowed, what stays fp32, and how far from the portable graph it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.zoo import Exported, architectures
from lower.comparing import equal_halved
from specrt.engine.ort_cuda import CAPTURED
from specrt.errors import BuildError
from specrt_export.check.equivalence import TOLERANCES
from specrt_export.compile import LoweredModel
from specrt_export.compile import ort_cuda_compiler as ort_cuda
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda, on_cpu
from specrt_export.lower.half import TYPES, narrowed
from specrt_export.lower.lazy_tensor import ENGINE, WEIGHTS, LazyTensor, in_memory
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import facts_of, geometry_of, read_graph, runs_here
from specrt_export.precision import Precision
from specrt_export.quantize import quantize

FLOAT, FP16, BF16 = (TYPES.get(k, onnx.TensorProto.FLOAT) for k in ("fp32", "fp16", "bf16"))
MAX_LENGTH = 128
CAPTURES = 5
WIDTHS = [1, CAPTURES]
ROLES = ["target", "draft"]
needs_reference = pytest.mark.skipif(
    not runs_here(), reason="this ONNX Runtime cannot run portable graphs"
)

READ_ON_HOST = {
    "Expand": (1,),
    "GroupQueryAttention": (6,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
}
"""Inputs that CUDA kernels read in main memory. Source: the InputMemoryType of their registration
in onnxruntime/core/providers/cuda and onnxruntime/contrib_ops/cuda."""
ON_DEVICE = {
    "Add", "Cast", "Div", "FusedMatMul", "Gather", "GatherBlockQuantized", "GatherElements", "Gelu",
    "IsNaN",
    "LayerNormalization", "MatMulNBits", "Mul", "Pow", "Relu", "RotaryEmbedding", "Sigmoid",
    "SimplifiedLayerNormalization", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Softmax", "Sub", "Tanh", "Transpose", "Where",
}  # fmt: skip
"""Operators whose CUDA kernels read and write device memory only."""


def source(engines: Path, role: str) -> tuple[Path, Path]:
    folder = engines / "codelet"
    return folder / "portable" / f"{role}.onnx", folder / "checkpoint" / role


def halved(
    graph: Path, weights: Path, out: Path, compute: str = "fp16"
) -> tuple[LoweredModel, onnx.ModelProto]:
    compiled = compile_ort_cuda(graph, weights, out, MAX_LENGTH, compute=compute, captured=CAPTURES)
    return compiled, onnx.load(out / ENGINE, load_external_data=False)


def error(graph: Path, weights: Path, compiled: LoweredModel) -> float:
    return equal_halved((graph, weights), compiled, MAX_LENGTH, WIDTHS)


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
@pytest.mark.parametrize("role", ROLES)
def test_only_scores_are_fp32(engines: Path, tmp_path: Path, role: str, compute: str) -> None:
    graph, weights = source(engines, role)
    _, model = halved(graph, weights, tmp_path, compute)
    kind = TYPES[compute]
    assert {t.data_type for t in model.graph.initializer} & {FLOAT, FP16, BF16} == {kind}
    for value in [*model.graph.input, *model.graph.output]:
        found = value.type.tensor_type.elem_type
        is_cache = value.name.removeprefix("present_").startswith(("key.", "value."))
        wanted = kind if is_cache else {"logits": FLOAT, "lengths": onnx.TensorProto.INT32}
        assert found == (wanted if isinstance(wanted, int) else wanted.get(value.name, 7))
    casts = [n for n in model.graph.node if n.op_type == "Cast" and n.output[0] == "logits"]
    assert [c.attribute[0].i for c in casts] == [FLOAT]


@pytest.mark.parametrize("role", ROLES)
def test_nothing_leaves_the_device(engines: Path, tmp_path: Path, role: str) -> None:
    graph, weights = source(engines, role)
    compiled, model = halved(graph, weights, tmp_path)
    assert stays_on_device(model)
    names = [i.name for i in model.graph.input]
    assert [n for n in names if "." not in n] == ["input_ids", "rows", "lengths"]
    totals = {t.name: t for t in model.graph.initializer}
    attention = [n for n in model.graph.node if n.op_type == "GroupQueryAttention"]
    assert len(attention) == compiled.geometry.layers
    for node in attention:
        assert node.input[5] == "lengths"
        assert onnx.numpy_helper.to_array(totals[node.input[6]]).tolist() == [MAX_LENGTH]
    assert facts_of(model)[CAPTURED] == str(CAPTURES)


def test_a_width_read_from_a_shape_would_leave_the_device(engines: Path, tmp_path: Path) -> None:
    _, model = halved(*source(engines, "draft"), tmp_path)
    shape = onnx.helper.make_node("Shape", ["input_ids"], ["size"])
    model.graph.node.append(shape)
    assert not stays_on_device(model)
    model.graph.node.remove(shape)
    attention = next(n for n in model.graph.node if n.op_type == "GroupQueryAttention")
    attention.input[6] = "lengths"
    assert not stays_on_device(model)


@needs_reference
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize("role", ROLES)
def test_an_engine_is_close_to_its_graph(
    engines: Path, tmp_path: Path, role: str, compute: str
) -> None:
    graph, weights = source(engines, role)
    compiled, _ = halved(graph, weights, tmp_path, compute)
    assert 0 < error(graph, weights, compiled) < TOLERANCES[compute] / 4
    # Two bytes each: the table that embedding and head share is there once.
    parameters = sum(np.prod(t.dims) for t in external_tensors(read_graph(graph)))
    assert 2 * parameters <= (tmp_path / WEIGHTS).stat().st_size < 2.2 * parameters


@needs_reference
@pytest.mark.parametrize(
    ("op_type", "attribute", "value"),
    [
        ("GroupQueryAttention", "do_rotary", 0),
        ("GroupQueryAttention", "scale", 0.25),
        ("GroupQueryAttention", "local_window_size", 8),
        ("SkipSimplifiedLayerNormalization", "epsilon", 0.1),
    ],
)
def test_a_wrong_lowering_is_beyond_the_tolerance(
    engines: Path, tmp_path: Path, op_type: str, attribute: str, value: float
) -> None:
    graph, weights = source(engines, "draft")
    compiled, model = halved(graph, weights, tmp_path)
    for node in model.graph.node:
        for found in node.attribute:
            if (node.op_type, found.name) == (op_type, attribute):
                found.CopyFrom(onnx.helper.make_attribute(attribute, value))
    (tmp_path / ENGINE).write_bytes(model.SerializeToString())
    with pytest.raises(BuildError, match="differs from the portable graph by"):
        error(graph, weights, compiled)


@needs_reference
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_whole_number_weights_are_multiplied_with_fp16(
    engines: Path, tmp_path: Path, precision: str
) -> None:
    graph, weights = source(engines, "draft")
    made = quantize(graph, weights, tmp_path / "quantized", Precision.of(precision))
    out = tmp_path / "engine"
    compiled, model = halved(made.graph, made.folder, out)
    assert stays_on_device(model)
    assert {n.op_type for n in model.graph.node} >= {"MatMulNBits", "GatherBlockQuantized"}
    assert FLOAT not in {t.data_type for t in model.graph.initializer}
    assert error(made.graph, made.folder, compiled) < TOLERANCES["fp16"] / 4


@needs_reference
@pytest.mark.parametrize(("embedding", "head"), [("", "int8"), ("int4", "")])
def test_ends_of_whole_numbers_are_held_beside_layers_in_bf16(
    engines: Path, tmp_path: Path, embedding: str, head: str
) -> None:
    graph, weights = source(engines, "draft")
    precision = Precision.of("bf16", embedding, head)
    made = quantize(graph, weights, tmp_path / "quantized", precision)
    out = tmp_path / "engine"
    compiled, _ = halved(made.graph, made.folder, out, "bf16")
    assert error(made.graph, made.folder, compiled) < TOLERANCES["bf16"] / 4


@needs_reference
def test_buffers_may_be_as_short_as_the_widest_pass(engines: Path, tmp_path: Path) -> None:
    graph, weights = source(engines, "draft")
    compiled = compile_ort_cuda(graph, weights, tmp_path, CAPTURES, captured=CAPTURES)
    equal_halved((graph, weights), compiled, CAPTURES, [1, CAPTURES])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([ENGINE, WEIGHTS])


@needs_reference
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize("name", architectures())
def test_every_architecture_is_halved(
    exported: Callable[[str], Exported], tmp_path: Path, name: str, compute: str
) -> None:
    found = exported(name)
    graph, weights = found.graph.path, found.checkpoint.folder
    compiled, model = halved(graph, weights, tmp_path, compute)
    assert stays_on_device(model)
    assert error(graph, weights, compiled) < TOLERANCES[compute]


@needs_reference
def test_confidence_is_the_share_of_the_likeliest_token(engines: Path, tmp_path: Path) -> None:
    graph, weights = source(engines, "draft")
    made = compile_ort_cuda(graph, weights, tmp_path, MAX_LENGTH, confidence=True)
    model = onnx.load(tmp_path / ENGINE, load_external_data=False)
    assert stays_on_device(model)
    with on_cpu(tmp_path, made.geometry, MAX_LENGTH, 8) as engine:
        done = engine.forward(np.arange(8)[None], 0)
        scores = np.exp(done.logits - done.logits.max(-1, keepdims=True), dtype=np.float64)
        assert done.confidence is not None
        np.testing.assert_allclose(done.confidence, 1 / scores.sum(-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 2}, r"engine\.batch is 2, and ort-cuda builds batch 1"),
        ({"compute": "fp8"}, "compute type is 'fp8'; expected fp16 or bf16"),
        ({"max_length": 4096}, "max_length 4096 is more than the 2048 positions"),
    ],
)
def test_what_the_kernels_refuse_is_refused_first(
    engines: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    graph, weights = source(engines, "draft")
    options = {"max_length": MAX_LENGTH, **change}
    with pytest.raises(BuildError, match=message):
        compile_ort_cuda(graph, weights, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("head_dim", [12, 264])
def test_heads_that_no_kernel_takes_are_refused(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    graph, weights = source(engines, "draft")
    odd = dataclasses.replace(geometry_of(read_graph(graph)), head_dim=head_dim)
    monkeypatch.setattr(ort_cuda, "geometry_of", lambda portable: odd)
    with pytest.raises(BuildError, match=f"heads of {head_dim}, and ort-cuda needs multiples of 8"):
        compile_ort_cuda(graph, weights, tmp_path, MAX_LENGTH)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_bf16_is_rounded_as_others_round_it(values: list[float]) -> None:
    array = np.array(values, np.float32)
    found = narrowed(in_memory("w", array), BF16).load().view(ml_dtypes.bfloat16)
    wanted = array.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@settings(deadline=None)
@given(st.lists(st.floats(-65000, 65000, width=32), min_size=2, max_size=40), st.integers(1, 9))
def test_weights_are_narrowed_in_any_slices(values: list[float], step: int) -> None:
    array = np.array(values, np.float32)
    half = narrowed(in_memory("w", array), FP16)
    slices = [half.rows(at, min(at + step, len(values))) for at in range(0, len(values), step)]
    assert (half.name, half.onnx_type, half.row_bytes) == ("w/half", FP16, 2)
    np.testing.assert_array_equal(np.concatenate(slices), array.astype(np.float16))


def test_a_weight_beyond_fp16_is_named() -> None:
    large = LazyTensor(
        "layers.0.w", FLOAT, (2,), lambda a, b: np.array([1.0, 7e4], np.float32)[a:b]
    )
    with pytest.raises(BuildError, match=r"layers\.0\.w has weights up to 7e\+04.*precision bf16"):
        narrowed(large, FP16).load()
    assert np.isfinite(narrowed(large, BF16).load().view(ml_dtypes.bfloat16).astype(float)).all()
    endless = in_memory("mask", np.array([-np.inf, 0.0], np.float32))
    assert narrowed(endless, FP16).load().tolist() == [-np.inf, 0.0]
