"""Write weights in their new form, a slice at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt_export.quantize.codes import FP8, decode, encode, pack
from specrt_export.quantize.datafile import DataFile, Region
from specrt_export.quantize.precision import SCALED
from specrt_export.quantize.select import Choice
from specrt_export.quantize.source import StoredTensor, narrow, widen

Floats = NDArray[np.float32]

SLICE = 1 << 22
"""Weights that one thread holds at a time, in three or four forms."""

MOST_THREADS = 8

_TYPES = {
    "fp32": onnx.TensorProto.FLOAT,
    "fp16": onnx.TensorProto.FLOAT16,
    "bf16": onnx.TensorProto.BFLOAT16,
    "int8": onnx.TensorProto.INT8,
    "int4": onnx.TensorProto.INT4,
    "fp8": onnx.TensorProto.FLOAT8E4M3FN,
}


@dataclass(frozen=True)
class Stored:
    """A weight that was written, and what it lost."""

    choice: Choice
    tensors: tuple[onnx.TensorProto, ...]
    """The weight; of whole numbers also its scales."""
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
        row_bytes = 4 * source.row_items
        region = self._file.reserve(source.name, _TYPES["fp32"], source.shape, row_bytes)
        self._by_slices(
            lambda begin, end: region.write(begin, source.read(begin, end)),
            source.rows,
            source.row_items,
        )
        return region.tensor

    def write(self, choice: Choice, source: StoredTensor) -> Stored:
        """Write a weight [N, K] as chosen; one that is stored [K, N] is turned first."""
        shape, read = source.shape, source.read
        if choice.turned:
            whole = _turned(source)
            shape, read = whole.shape, lambda begin, end: whole[begin:end]
        regions = _reserve(self._file, choice, shape)

        def work(begin: int, end: int) -> tuple[float, float]:
            weights = read(begin, end)
            arrays, restored = _form(choice, weights)
            for region, array in zip(regions, arrays, strict=True):
                region.write(begin, array)
            restored -= weights
            return _squares(restored), _squares(weights)

        sums = self._by_slices(work, *shape)
        lost, there = sum(part[0] for part in sums), sum(part[1] for part in sums)
        tensors = tuple(region.tensor for region in regions)
        return Stored(choice, tensors, lost / there if there else 0.0)

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
    name, kind = choice.name, _TYPES[choice.precision]
    if choice.precision not in SCALED:
        return [file.reserve(name, kind, shape, 2 * items)]
    row_bytes = items // 2 if choice.precision == "int4" else items
    scales = items // choice.block
    return [
        file.reserve(name, kind, shape, row_bytes),
        file.reserve(f"{name}.scale", _TYPES["fp32"], (rows, scales), 4 * scales),
    ]


def _form(choice: Choice, weights: Floats) -> tuple[Sequence[NDArray[Any]], Floats]:
    """Return what is written of some rows, and the fp32 weights that it stands for."""
    if choice.precision in SCALED:
        codes, scales = encode(weights, choice.precision, choice.block)
        packed = pack(codes) if choice.precision == "int4" else codes
        values = codes.view(FP8) if choice.precision == "fp8" else codes
        return (packed, scales), decode(values, scales)
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
