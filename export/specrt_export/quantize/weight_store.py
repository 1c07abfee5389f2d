"""Quantized weights on their way to a data file: codes, scales and zeros, written by slices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from specrt.errors import BuildError
from specrt_export.checkpoint.codes import CodedWeight, Codes, encode_codes, pack, unpack
from specrt_export.portable.external_data import (
    DataFile,
    Floats,
    Region,
    StoredTensor,
    narrow,
    widen,
)
from specrt_export.precision import SCALED
from specrt_export.quantize.calibration import PackedCodes
from specrt_export.quantize.weight_choice import Choice

SLICE = 1 << 22
"""Weights that one thread holds at a time, in three or four forms."""


MOST_THREADS = 8


_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    # As the numbers of its table: ONNX Runtime reads no FLOAT4E2M1 on a CPU.
    "fp4": TensorProto.UINT4,
    "fp8": TensorProto.FLOAT8E4M3FN,
}

_UNSIGNED = {"int8": TensorProto.UINT8, "int4": TensorProto.UINT4}


@dataclass(frozen=True)
class Stored:
    """A weight that was written, and what it lost."""

    choice: Choice
    tensors: tuple[onnx.TensorProto, ...]
    """The weight; in codes also its scales, and then its zeros or minimums if it has any."""
    error: float
    """Squared error over squared weights."""


class Store:
    """Writes weights into a data file, with a thread for each core."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))

    def close(self) -> None:
        """End the threads; nothing that was not begun is written any more."""
        self._pool.shutdown(cancel_futures=True)

    def keep(self, source: StoredTensor) -> onnx.TensorProto:
        """Copy a tensor as fp32, whatever its shape."""
        region = self._file.reserve(
            source.name, _TYPES["fp32"], source.shape, source.rows, 4 * source.row_items
        )
        self._by_slices(
            lambda begin, end: region.write(begin, source.read(begin, end)),
            source.rows,
            source.row_items,
        )
        return region.tensor

    def write(
        self, choice: Choice, source: StoredTensor, found: PackedCodes | None = None
    ) -> Stored:
        """Write a weight [N, K] as chosen; one that is stored [K, N] is turned first.

        `found` are its packed codes, scales and zeros where they are known.
        """
        shape, read = source.shape, source.read
        if choice.turned:
            whole = _turned(source)
            shape, read = whole.shape, lambda begin, end: whole[begin:end]
        regions = _reserve(self._file, choice, shape)

        def work(begin: int, end: int) -> tuple[float, float]:
            weights = read(begin, end)
            if found is None:
                arrays, restored = _form(choice, weights)
            else:
                arrays = [np.ascontiguousarray(array[begin:end]) for array in found]
                restored = Codes("int4", unpack(arrays[0]), *arrays[1:]).floats()
            for region, array in zip(regions, arrays, strict=True):
                region.write(begin, array)
            restored -= weights
            return _squares(restored), _squares(weights)

        sums = self._by_slices(work, *shape)
        lost, there = sum(part[0] for part in sums), sum(part[1] for part in sums)
        tensors = tuple(region.tensor for region in regions)
        return Stored(choice, tensors, lost / there if there else 0.0)

    def write_codes(self, choice: Choice, weight: CodedWeight) -> Stored:
        """Copy the codes, scales, zeros and minimums of a weight [N, K] as they are."""
        regions = _reserve_codes(self._file, choice, weight.shape, weight.codes(0, 1))

        def work(begin: int, end: int) -> None:
            for region, array in zip(regions, _arrays(weight.codes(begin, end)), strict=True):
                region.write(begin, array)

        self._by_slices(work, *weight.shape)
        return Stored(choice, tuple(region.tensor for region in regions), 0.0)

    def _by_slices(self, work: Callable[[int, int], Any], rows: int, items: int) -> list[Any]:
        """Do some work for all rows; as many slices are in memory as there are threads."""
        step = max(1, SLICE // max(items, 1))
        begins = range(0, rows, step)
        return list(self._pool.map(lambda b: work(b, min(b + step, rows)), begins))


def _turned(source: StoredTensor) -> Floats:
    """Return a tensor [K, N] as [N, K]."""
    rows, items = source.shape
    whole = np.empty((items, rows), np.float32)
    step = max(1, SLICE // items)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        whole[:, begin:end] = source.read(begin, end).T
    return whole


def _reserve(file: DataFile, choice: Choice, shape: tuple[int, ...]) -> list[Region]:
    """Take the places of a weight [N, K], and of its scales [N, K / block] if it has any."""
    rows, items = shape
    if choice.precision not in SCALED:
        return [file.reserve(choice.name, _TYPES[choice.precision], shape, rows, 2 * items)]
    zeros = np.empty(0, np.int8) if choice.zeros else None
    sample = Codes(choice.precision, np.empty(0, np.int8), np.empty(0, np.float32), zeros)
    return _reserve_codes(file, choice, shape, sample)


def _reserve_codes(
    file: DataFile, choice: Choice, shape: tuple[int, ...], sample: Codes
) -> list[Region]:
    """Take the places of a weight [N, K] in codes, and of what belongs to them."""
    rows, items = shape
    name, blocks = choice.name, items // choice.block
    is_unsigned = sample.codes.dtype == np.uint8
    types = _TYPES | _UNSIGNED if is_unsigned else _TYPES
    halved = choice.precision in ("int4", "fp4")

    def beside(suffix: str, kind: int, size: int, *inner: int) -> Region:
        return file.reserve(f"{name}.{suffix}", kind, (rows, blocks, *inner), rows, blocks * size)

    regions = [
        file.reserve(name, types[choice.precision], shape, rows, items // 2 if halved else items),
        # A factor of blocks [N, K / block, block] for fp4; see `_decoded`.
        beside("scale", TensorProto.FLOAT, 4, *([1] if choice.precision == "fp4" else [])),
    ]
    if sample.zeros is not None:
        regions.append(beside("zero", TensorProto.UINT8 if is_unsigned else TensorProto.INT8, 1))
    if sample.minimums is not None:
        regions.append(beside("minimum", TensorProto.FLOAT, 4, 1))
    return regions


def _arrays(rows: Codes) -> list[NDArray[Any]]:
    """Return what is written of some rows of codes, in the order of their places."""
    halved = rows.format in ("int4", "fp4")
    beside = (rows.scales, rows.zeros, rows.minimums)
    return [
        pack(rows.codes) if halved else rows.codes,
        *(array for array in beside if array is not None),
    ]


def _form(choice: Choice, weights: Floats) -> tuple[Sequence[NDArray[Any]], Floats]:
    """Return what is written of some rows, and the fp32 weights that it stands for."""
    if choice.precision in SCALED:
        rows = encode_codes(
            weights, choice.precision, choice.block, positive=choice.positive, zeros=choice.zeros
        )
        return _arrays(rows), rows.floats()
    bits = narrow(weights, choice.precision)
    restored = widen(bits, _TYPES[choice.precision])
    if not np.isfinite(restored).all():
        raise BuildError(
            f"{choice.weight} holds {np.abs(weights).max():.3g}, too large for "
            f"{choice.precision}; store it as bf16, int8 or fp32"
        )
    return (bits,), restored


def _squares(values: Floats) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))
