"""Graphs of one operator of the CPU kernels, over weights and buffers made here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from quantize.graphs import random_codes
from specrt.engine.ort import kernels
from specrt.engine.ort.ort_engine import silent_options
from specrt_export.checkpoint.codes import Codes, pack
from specrt_export.lower.lazy_tensor import LazyTensor, in_memory
from specrt_export.lower.projections import WeightMatrix, of_matrices
from specrt_export.lower.tiles import alternating, tiled_codes, tiled_floats, whole_tiles
from specrt_export.portable.external_data import narrow, widen

Array = NDArray[Any]

_TYPES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16, "fp32": TensorProto.FLOAT}


def instruction_sets() -> list[str]:
    """Return those that this machine has, best first."""
    return kernels.instruction_sets()[1]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let the library be missing, as where specrt was installed without a compiler."""
    with pytest.MonkeyPatch.context() as machine:
        machine.setattr(kernels, "KERNELS", Path("/no such folder/kernels.so"))
        yield


@dataclass(frozen=True)
class Norm:
    """A norm of rows before they are multiplied."""

    kind: str
    weight: Array
    bias: Array | None = None
    epsilon: float = 1e-5
    has_residual: bool = False


@dataclass(frozen=True)
class Stored:
    """Weights [N, K] as they are stored, and what they stand for."""

    format: str
    block: int
    dense: Array
    tiles: LazyTensor

    @property
    def attributes(self) -> dict[str, Any]:
        """Attributes of an operator that reads them."""
        outputs, inputs = self.dense.shape
        return {"N": outputs, "K": inputs, "block_size": self.block, "format": self.format}


def stored(
    format_: str, outputs: int, inputs: int, block: int, *, gates: bool = False, seed: int = 0,
    scale: float = 1,
) -> Stored:  # fmt: skip
    """Make weights; with `gates` the first half of the outputs and the second are in turns.

    `scale` is a factor of codes' scales and minimums.
    """
    rng = np.random.default_rng(seed)
    if block:
        codes = random_codes(format_, outputs, inputs, block, seed)
        minimums = None if codes.minimums is None else codes.minimums * np.float32(scale)
        codes = replace(codes, scales=codes.scales * np.float32(scale), minimums=minimums)
        matrix = matrix_of(codes)
        if gates:
            matrix = of_matrices(
                [matrix], lambda parts, _: alternating(*(_taken(parts[0], half) for half in (0, 1)))
            )
        tiles, name = tiled_codes(matrix)
        return Stored(name, block, codes.floats(), tiles)
    weights = rng.standard_normal((outputs, inputs)).astype(np.float32)
    bits = weights if format_ == "fp32" else narrow(weights, format_)
    floats = LazyTensor("w", _TYPES[format_], weights.shape, lambda b, e: bits[b:e])
    if gates:
        floats = alternating(_taken(floats, 0), _taken(floats, 1))
    return Stored(format_, block, widen(bits, _TYPES[format_]), tiled_floats(floats))


def matrix_of(codes: Codes) -> WeightMatrix:
    """Return codes as lowering has them, packed where they are of 4 bits."""
    inputs = codes.codes.shape[1]
    is_unsigned = codes.codes.dtype == np.uint8
    kinds = {
        "int4": TensorProto.UINT4 if is_unsigned else TensorProto.INT4,
        "int8": TensorProto.UINT8 if is_unsigned else TensorProto.INT8,
        "fp4": TensorProto.UINT4, "fp8": TensorProto.FLOAT8E4M3FN,
    }  # fmt: skip
    stored = pack(codes.codes) if codes.format in ("int4", "fp4") else codes.codes
    values = LazyTensor(
        "codes", kinds[codes.format], codes.codes.shape, lambda begin, end: stored[begin:end]
    )
    scales, zeros, minimums = (
        None if part is None else in_memory(name, part)
        for name, part in (("s", codes.scales), ("z", codes.zeros), ("m", codes.minimums))
    )
    block = inputs // codes.scales.shape[1]
    return WeightMatrix(values, scales, block, zeros, minimums, codes.format == "fp4")


def _taken(tensor: LazyTensor, half: int) -> LazyTensor:
    size = tensor.length // 2
    shape = (size, *tensor.shape[1:])
    return LazyTensor(
        f"{tensor.name}{half}", tensor.onnx_type, shape,
        lambda begin, end: tensor.rows(half * size + begin, half * size + end),
    )  # fmt: skip


def session(
    operator: str, inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, int],
    weights: tuple[LazyTensor, ...] = (), *, threads: int = 2, **attributes: Any,
) -> ort.InferenceSession:  # fmt: skip
    """Open a graph of one operator; inputs and outputs have ONNX types, inputs shapes too.

    Names of blanks stand for inputs that are left out.
    """
    names = [*inputs]
    names[1:1] = [tensor.name for tensor in weights]
    node = helper.make_node(
        operator, [n.strip() for n in names], [*outputs], domain="specrt", **attributes
    )
    graph = helper.make_graph(
        [node], "one",
        [helper.make_tensor_value_info(n, *v) for n, v in inputs.items() if n.strip()],
        [helper.make_tensor_value_info(n, kind, None) for n, kind in outputs.items()],
        [
            helper.make_tensor(t.name, t.onnx_type, t.shape, t.load().tobytes(), raw=True)
            for t in weights
        ],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("specrt", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = silent_options()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def matmul(
    weights: Stored, bias: Array | None = None, *, activation: str = "none", exact: bool = False,
    norm: Norm | None = None, threads: int = 2,
) -> Any:  # fmt: skip
    """Return a function of x [T, K]; with a norm's residual, of x and it, to y and their sum."""
    floats = TensorProto.FLOAT
    rows = [1, "T", weights.dense.shape[1]]
    feeds = {}
    if bias is not None:
        parts = [in_memory("bias", bias)]
        if activation != "none":
            parts = [alternating(_taken(parts[0], 0), _taken(parts[0], 1))]
        feeds["bias"] = whole_tiles(parts[0]).load()
    has_residual = norm is not None and norm.has_residual
    if norm is not None:
        feeds["weight"] = norm.weight
    if norm is not None and norm.bias is not None:
        feeds["norm_bias"] = norm.bias
    inputs: dict[str, tuple[int, list[Any]]] = {"x": (floats, rows)}
    for i, name in enumerate(("bias", "residual", "weight", "norm_bias")):
        shape = rows if name == "residual" and has_residual else None
        shape = [len(feeds[name])] if name in feeds else shape
        inputs[name if shape else " " * (i + 1)] = (floats, shape or [])
    opened = session(
        "MatMul", inputs, {"y": floats, **({"sum": floats} if has_residual else {})},
        (weights.tiles,), threads=threads, activation=activation, exact=int(exact),
        norm="none" if norm is None else norm.kind, epsilon=0.0 if norm is None else norm.epsilon,
        **weights.attributes,
    )  # fmt: skip
    if not has_residual:
        return lambda x: opened.run(None, {"x": x[None], **feeds})[0][0]
    return lambda x, r: [
        made[0] for made in opened.run(None, {"x": x[None], "residual": r[None], **feeds})
    ]
