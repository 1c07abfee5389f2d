"""The weight of a projection: fp32, or whole numbers with a scale for each block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx

from specrt_export.lower.stored import Stored, joined, reshaped, taken, transposed, unsigned
from specrt_export.lower.view import GraphView
from specrt_export.quantize.precision import SMALLEST_BLOCK

_BITS: dict[int, int] = {
    onnx.TensorProto.INT8: 8,
    onnx.TensorProto.INT4: 4,
    onnx.TensorProto.FLOAT8E4M3FN: 8,
}


@dataclass(frozen=True)
class Matrix:
    """A weight [N, K] of stored tensors; scales [N, K / block] where it is quantized."""

    values: Stored
    scales: Stored | None = None
    block: int = 0

    @property
    def outputs(self) -> int:
        """N, the width of what it projects to."""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """K, the width of what it reads."""
        return self.values.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a quantized weight; 32 for fp32."""
        return _BITS.get(self.values.onnx_type, 32)

    @property
    def is_in_blocks(self) -> bool:
        """Tell whether the kernels take its codes: blocks of a power of two, from 16 on."""
        block = self.block
        return self.scales is not None and block >= SMALLEST_BLOCK and block & (block - 1) == 0

    def fits(self, other: Matrix) -> bool:
        """Tell whether rows of both can form one matrix."""
        kinds = self.values.onnx_type == other.values.onnx_type
        return kinds and (self.block, self.inputs) == (other.block, other.inputs)

    def taken(self, begin: int, end: int) -> Matrix:
        """Return some of its rows: a part of what it projects to."""
        scales = self.scales and taken(self.scales, begin, end)
        return Matrix(taken(self.values, begin, end), scales, self.block)

    def add_to(self, view: GraphView) -> str:
        """Make it a value of a graph, and return the value's name."""
        values = view.add_stored(self.values)
        if self.scales is None:
            return values
        inputs = [values, view.add_stored(self.scales)]
        return view.add("DequantizeLinear", inputs, axis=1, block_size=self.block)


def join_matrices(parts: Sequence[Matrix], name: str | None = None) -> Matrix:
    """Return matrices that fit each other, one below the other."""
    scales = [part.scales for part in parts if part.scales is not None]
    values = joined([part.values for part in parts], name)
    of_scales = name and f"{name}.scale"
    return Matrix(values, joined(scales, of_scales) if scales else None, parts[0].block)


def find_matrix(view: GraphView, name: str) -> Matrix | None:
    """Return the matrix that a value is.

    ```
    w [N, K]                                                          fp32
    codes [N, K], scales [N, K / block] ─ DequantizeLinear            int8, int4
    either ─ Transpose                                                [K, N] the other way round
    ```
    """
    stored = view.stored(name)
    if stored is not None:
        dense = stored.onnx_type == onnx.TensorProto.FLOAT and len(stored.shape) == 2
        return Matrix(stored) if dense else None
    node = view.maker(name, "DequantizeLinear")
    if node is None or len(node.input) != 2:
        return None
    codes, scales = view.stored(node.input[0]), view.stored(node.input[1])
    said = view.attributes(node)
    block = said.get("block_size", 0)
    if codes is None or scales is None or said.get("axis", 1) not in (1, -1) or not block:
        return None
    if codes.onnx_type not in _BITS or len(codes.shape) != 2:
        return None
    whole = scales.shape == (codes.shape[0], codes.shape[1] // block)
    return Matrix(codes, scales, block) if whole and codes.shape[1] % block == 0 else None


def find_factor(view: GraphView, name: str) -> Matrix | None:
    """Return the matrix [N, K] whose transpose [K, N] a value is."""
    transpose = view.maker(name, "Transpose")
    if transpose is not None and view.attributes(transpose).get("perm", [1, 0]) == [1, 0]:
        return find_matrix(view, transpose.input[0])
    stored = view.stored(name)
    if stored is None or stored.onnx_type != onnx.TensorProto.FLOAT or len(stored.shape) != 2:
        return None
    return Matrix(transposed(stored))


def blocks(matrix: Matrix) -> Stored:
    """Return the codes as MatMulNBits reads them: bytes [N, K / block, block · bits / 8]."""
    bytes_ = unsigned(matrix.values)
    shape = (matrix.outputs, matrix.inputs // matrix.block, matrix.block * matrix.bits // 8)
    return reshaped(bytes_, f"{matrix.values.name}/blocks", shape)
