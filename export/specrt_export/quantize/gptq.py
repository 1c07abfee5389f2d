"""Rounding with error feedback: what a weight loses by rounding, the others of its row make good.

Source: Frantar et al. 2022, arXiv:2210.17323, in the form of Chen et al. 2025, arXiv:2507.18553:
with H = Uᵀ·U the error of a row is |U·d|², d being what its weights lost. Going from the last
weight to the first, each is rounded to what makes its own term least. No inverse is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from specrt.engine.ort.ort_engine import silent_options
from specrt_export.checkpoint.codes import INT4_LEAST, INT4_MOST, BlockGrid, Integers
from specrt_export.portable.external_data import Floats

DAMPINGS = (0.01, 0.1, 1.0)
"""Of the mean second moment, added to each: keeps the factor from following few texts too far.

The larger ones are for moments that fp32 cannot factor with the first.
"""

_SMALL = 64
"""Columns whose factor LAPACK finds; the rest of the work is products of matrices."""

_WIDE = 1024
"""Rows of second moments that are summed at once."""

FindGrid = Callable[[Floats], BlockGrid]
"""Scales [N], and zeros, of a block of weights [block, N]."""


class Products:
    """Products of matrices with ONNX Runtime's kernels.

    NumPy's OpenBLAS knows few processors (of a Zen 5 it uses half). A product that is worth it is
    shared by all threads; no other is, because threads that wait for one another often are slow
    on a machine that has other work.
    """

    def __init__(self, *, shared: bool) -> None:
        self._alone = (_open_product(1, "MatMul"), _open_product(1, "Gemm", transA=1))
        self._shared = self._alone
        if shared:
            self._shared = (_open_product(0, "MatMul"), _open_product(0, "Gemm", transA=1))

    def __call__(self, first: Floats, second: Floats) -> Floats:
        """Return A·B for A [M, K] and B [K, N]."""
        work = first.size * second.shape[1]
        if work <= _ONE_THREAD:
            return first @ second
        product: Floats = self._session(work, 0).run(None, {"a": first, "b": second})[0]
        return product

    def turned(self, first: Floats, second: Floats) -> Floats:
        """Return Aᵀ·B for A [K, M] and B [K, N]; fast where M is not much more than N."""
        work = first.size * second.shape[1]
        if work <= _ONE_THREAD:
            return first.T @ second
        product: Floats = self._session(work, 1).run(None, {"a": first, "b": second})[0]
        return product

    def _session(self, work: int, kind: int) -> ort.InferenceSession:
        return (self._shared if work > _MANY_THREADS else self._alone)[kind]


_ONE_THREAD = 1 << 18
"""Multiplications up to which OpenBLAS starts no thread."""

_MANY_THREADS = 1 << 28
"""Multiplications, some milliseconds' worth, from which on threads share a product."""


def _open_product(threads: int, op_type: str, **attributes: Any) -> ort.InferenceSession:
    """Open a graph of one product; 0 threads are one for each core."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, None]) for n in "abc"]
    node = helper.make_node(op_type, ["a", "b"], ["c"], **attributes)
    graph = helper.make_graph([node], "product", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = silent_options()
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = threads
    data = model.SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def second_moments(inputs: Floats, multiply: Products) -> Floats:
    """Return the upper half of Xᵀ·X for inputs X [T, K]; the lower half means nothing."""
    size = inputs.shape[1]
    moments = np.zeros((size, size), np.float32)  # below, what is finite: it is subtracted from
    for at in range(0, size, _WIDE):
        end = min(at + _WIDE, size)
        moments[at:end, at:] = multiply.turned(inputs[:, at:end], inputs[:, at:])
    return moments


def factor(moments: Floats, multiply: Products, damping: float = DAMPINGS[0]) -> Floats:
    """Return the upper factor of second moments [K, K] with a diagonal of ones, in their place.

    Cholesky's, with each row divided by its diagonal. Inputs that are always 0 count as others.
    Sums in fp32 are as exact as the moments, which are such sums; what they round is far
    below the damping.
    """
    diagonal = np.einsum("ii->i", moments)
    mean = float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = mean
    diagonal += damping * mean
    _cholesky(moments, multiply)
    moments /= diagonal[:, None].copy()
    return moments


def _cholesky(matrix: Floats, multiply: Products) -> None:
    """Put the upper factor in the place of a matrix whose lower half is neither read nor kept."""
    size = len(matrix)
    if size <= _SMALL:
        upper = np.triu(matrix).astype(np.float64)
        matrix[:] = np.linalg.cholesky(upper + np.triu(upper, 1).T).T
        return
    half = _half(size)
    right, rest = matrix[:half, half:], matrix[half:, half:]
    _cholesky(matrix[:half, :half], multiply)
    _divide(right, matrix[:half, :half], multiply)
    for at in range(0, len(rest), _WIDE):
        end = min(at + _WIDE, len(rest))
        rest[at:end, at:] -= multiply.turned(right[:, at:end], right[:, at:])
    _cholesky(rest, multiply)


def _half(size: int) -> int:
    """Return about half a size, a multiple of what is small."""
    return -(-size // 2 // _SMALL) * _SMALL


def _divide(matrix: Floats, upper: Floats, multiply: Products) -> None:
    """Put X in the place of a matrix that is Uᵀ·X."""
    size = len(upper)
    if size <= _SMALL:
        inverse = np.linalg.inv(np.triu(upper).astype(np.float64)).astype(np.float32)
        matrix[:] = multiply.turned(inverse, matrix)
        return
    half = _half(size)
    _divide(matrix[:half], upper[:half, :half], multiply)
    matrix[half:] -= multiply.turned(upper[:half, half:], matrix[:half])
    _divide(matrix[half:], upper[half:, half:], multiply)


def feed_back(
    weights: Floats, upper: Floats, block: int, find_grid: FindGrid, multiply: Products
) -> tuple[Integers, Floats, Integers | None, Floats]:
    """Return codes [K, N], scales and zeros [K / block, N], and the weights [K, N] of them.

    `weights` [K, N] are a weight [N, K] turned; `upper` is the factor of what they are multiplied
    with. The grid of a block is found when it is begun, for its weights as they are by then.
    """
    rounding = _Rounding(weights, upper, block, find_grid, multiply)
    rounding.visit(0, len(weights))
    return rounding.codes, rounding.scales, rounding.zeros, rounding.adjusted


class _Rounding:
    """The state of `feed_back`; a closure would keep its arrays until they are collected."""

    def __init__(
        self, weights: Floats, upper: Floats, block: int, find_grid: FindGrid,
        multiply: Products,
    ) -> None:  # fmt: skip
        size, columns = weights.shape
        self._upper, self._block = upper, block
        self._find_grid, self._multiply = find_grid, multiply
        self.adjusted = np.array(weights, np.float32, order="C")
        self._lost = self.adjusted.copy()  # of weights not yet rounded: the weights themselves
        self.codes = np.empty((size, columns), np.int8)
        self.scales = np.empty((size // block, columns), np.float32)
        self._inverse = np.empty_like(self.scales)
        self.zeros: Integers | None = None
        self._zero: Floats | float = 0.0

    def visit(self, begin: int, end: int) -> None:
        """Round weights from `end` down to `begin`, by halves, which are blocks at first."""
        block, adjusted, lost = self._block, self.adjusted, self._lost
        if end - begin == block:
            grid = self._find_grid(adjusted[begin:end])
            self.scales[begin // block] = grid.scales
            if grid.zeros is not None:
                if self.zeros is None:
                    self.zeros = np.empty(self.scales.shape, np.int8)
                self.zeros[begin // block] = grid.zeros
                self._zero = grid.zeros.astype(np.float32)
            np.divide(1, self.scales[begin // block], out=self._inverse[begin // block])
        if end - begin == 1:
            rounded = adjusted[begin]
            np.multiply(rounded, self._inverse[begin // block], out=rounded)
            np.rint(rounded, out=rounded)
            np.maximum(rounded, INT4_LEAST - self._zero, out=rounded)
            np.minimum(rounded, INT4_MOST - self._zero, out=rounded)
            self.codes[begin] = rounded + self._zero
            np.multiply(rounded, self.scales[begin // block], out=rounded)
            lost[begin] -= rounded
            return
        blocks = (end - begin) // block
        middle = begin + (blocks // 2 * block if blocks > 1 else (end - begin) // 2)
        self.visit(middle, end)
        upper = self._upper[begin:middle, middle:end]
        adjusted[begin:middle] += self._multiply(upper, lost[middle:end])
        self.visit(begin, middle)
