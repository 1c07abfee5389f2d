"""Writes weights in their new form, a slice at a time, into one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt_export.quantize.codes import FP8, StoredTensor, decode, encode, narrow, pack, widen
from specrt_export.quantize.precision import SCALED, Choice

ALIGNMENT = 4096
"""Every tensor begins on a page of its own, so that it can be mapped by itself."""


class DataFile:
    """Tensors written one after another, in pieces and from several threads."""

    def __init__(self, path: Path, name: str) -> None:
        """Write to a path; graphs will look for it under a name."""
        self._name = name
        self._file = path.open("wb")
        self._end = 0

    def reserve(self, name: str, onnx_type: int, shape: tuple[int, ...], row_bytes: int) -> Region:
        """Take the bytes of a tensor of `shape[0]` rows; a vector or a number is one row."""
        offset = self._end
        size = row_bytes * (shape[0] if len(shape) > 1 else 1)
        self._end = -(-(offset + size) // ALIGNMENT) * ALIGNMENT
        tensor = onnx.TensorProto(
            name=name, data_type=onnx_type, dims=shape, data_location=onnx.TensorProto.EXTERNAL
        )
        place = (("location", self._name), ("offset", offset), ("length", size))
        for key, value in place:
            tensor.external_data.add(key=key, value=str(value))
        return Region(tensor, self._file.fileno(), offset, row_bytes)

    def close(self) -> None:
        """Close the file; it reaches to the end of the page that the last tensor ends on."""
        os.ftruncate(self._file.fileno(), self._end)
        self._file.close()


class Region:
    """The place of one tensor."""

    def __init__(self, tensor: onnx.TensorProto, file: int, offset: int, row_bytes: int) -> None:
        self.tensor = tensor
        self._file = file
        self._offset = offset
        self._row_bytes = row_bytes

    def write(self, row: int, array: NDArray[Any]) -> None:
        """Write rows from `row` on.

        Raises: OSError when the disk is full.
        """
        flat: Any = np.ascontiguousarray(array).reshape(-1)
        data = memoryview(flat).cast("B")
        place = self._offset + row * self._row_bytes
        while data:
            written = os.pwrite(self._file, data, place)
            data, place = data[written:], place + written


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
