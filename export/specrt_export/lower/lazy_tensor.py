"""Weights that are read, and computed with, only when they are written; and the writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt_export.portable.external_data import (
    HALVES,
    STORAGE,
    DataFile,
    disk_full,
    external_tensors,
    map_weights,
    narrow,
    rows_of,
    widen,
)

Rows = Callable[[int, int], NDArray[Any]]


_FLOAT = onnx.TensorProto.FLOAT


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of known shape whose values exist only while they are written.

    Of two with one name, only one is written.
    """

    name: str
    onnx_type: int
    shape: tuple[int, ...]
    rows: Rows
    """Returns the part `[begin:end]` along the first axis; of 4 bits the bytes [n, K / 2]."""
    bytes_of: str = ""
    """Name of the tensor with the same bytes in another shape, where there is one."""
    held_by: str = ""
    """`bf16` or `fp16` where it was widened from that; of others nothing is known."""

    @property
    def length(self) -> int:
        """Rows along the first axis; a number is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def items(self) -> int:
        """Numbers it holds."""
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        size = prod(self.shape[1:]) * STORAGE[self.onnx_type].itemsize
        return size // 2 if self.onnx_type in HALVES else size

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.length * self.row_bytes

    @property
    def identity(self) -> str:
        """What two tensors of the same bytes have in common."""
        return self.bytes_of or self.name

    def slices(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield some rows after others, and the index of the first of each."""
        step = max(1, SLICE_BYTES // max(1, self.row_bytes))
        for begin in range(0, self.length, step):
            yield begin, self.rows(begin, min(begin + step, self.length))

    def load(self) -> NDArray[Any]:
        """Return all of it at once."""
        return self.rows(0, self.length)


def stored_weights(model: onnx.ModelProto, folder: Path) -> dict[str, LazyTensor]:
    """Return the weights that a portable graph points at in a folder.

    Raises: CheckpointError for a shard that is missing or too short.
    """
    mapped = {weight.name: weight.array for weight in map_weights(model, folder)}
    return {t.name: _from_file(t, folder, mapped[t.name]) for t in external_tensors(model)}


def _from_file(tensor: onnx.TensorProto, folder: Path, mapped: NDArray[Any]) -> LazyTensor:
    stored = rows_of(tensor, folder, mapped.shape[1:])

    def rows(begin: int, end: int) -> NDArray[Any]:
        read = stored.read(begin, end)
        return read if mapped.shape else read.reshape(())

    return LazyTensor(tensor.name, tensor.data_type, tuple(tensor.dims), rows)


ENGINE, WEIGHTS = "engine.onnx", "engine.data"


SLICE_BYTES = 16 << 20
"""Bytes of a weight that are in memory at a time."""

INLINE_BYTES = 1024
"""Up to this size a weight lies in the graph itself."""


def write_engine(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], out: Path, part: str = "engine"
) -> None:
    """Write `engine.data` and `engine.onnx`, or a part's, into a folder.

    Each byte of a weight is written once. Raises: BuildError when the disk is full.
    """
    data = out / f"{part}.data"
    try:
        with closing(DataFile(data, data.name)) as file:
            _write_weights(model, weights, file)
        (out / f"{part}.onnx").write_bytes(model.SerializeToString(deterministic=True))
    except OSError as error:
        raise disk_full(data) from error


def weight_bytes(model: onnx.ModelProto, weights: Mapping[str, LazyTensor]) -> int:
    """Return the bytes of a graph's weights; those that several tensors share count once."""
    used = [weights[t.name] for t in model.graph.initializer if t.name in weights]
    return sum({weight.identity: weight.nbytes for weight in used}.values())


def _write_weights(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], file: DataFile
) -> None:
    places: dict[str, onnx.TensorProto] = {}
    for tensor in model.graph.initializer:
        weight = weights.get(tensor.name)
        if weight is None:
            continue
        del tensor.external_data[:]
        if weight.nbytes <= INLINE_BYTES:
            tensor.raw_data = weight.load().tobytes()
            tensor.data_location = onnx.TensorProto.DEFAULT
            continue
        if weight.identity not in places:
            places[weight.identity] = _write(weight, file)
        tensor.external_data.extend(places[weight.identity].external_data)


def _write(weight: LazyTensor, file: DataFile) -> onnx.TensorProto:
    region = file.reserve(
        weight.name, weight.onnx_type, weight.shape, weight.length, weight.row_bytes
    )
    for begin, part in weight.slices():
        region.write(begin, part)
    return region.tensor


def in_memory(name: str, array: NDArray[Any]) -> LazyTensor:
    """Return an array that is in memory already."""
    onnx_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return LazyTensor(name, onnx_type, array.shape, lambda begin, end: array[begin:end])


def as_float(source: LazyTensor) -> LazyTensor:
    """Return a tensor as fp32; bf16 and fp16 hold nothing that fp32 does not."""
    if source.onnx_type == _FLOAT:
        return source

    def rows(begin: int, end: int) -> NDArray[Any]:
        return widen(source.rows(begin, end), source.onnx_type)

    held_by = [name for name, kind in _FORMATS.items() if kind == source.onnx_type]
    return LazyTensor(f"{source.name}/float", _FLOAT, source.shape, rows, held_by="".join(held_by))


def transposed(source: LazyTensor) -> LazyTensor:
    """Return a matrix [K, N] as [N, K]; it is loaded whole, and kept until another one is."""
    rows, columns = source.shape

    def turned(begin: int, end: int) -> NDArray[Any]:
        return _whole(source)[:, begin:end].T

    return replace(
        source, name=f"{source.name}/transposed", shape=(columns, rows), rows=turned, bytes_of=""
    )


@lru_cache(maxsize=1)
def _whole(source: LazyTensor) -> NDArray[Any]:
    """Return all of a tensor, loaded once for all pieces of it that are read in a row."""
    return source.load()


def joined(parts: Sequence[LazyTensor], name: str | None = None) -> LazyTensor:
    """Return tensors one after another along their first axis."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    offsets = [0, *accumulate(part.length for part in parts)]

    def rows(begin: int, end: int) -> NDArray[Any]:
        spans = zip(parts, pairwise(offsets), strict=True)
        pieces = [
            part.rows(max(begin, low) - low, min(end, high) - low)
            for part, (low, high) in spans
            if begin < high and low < end
        ]
        return np.concatenate(pieces)

    name = name or "+".join(part.name for part in parts)
    held_by = first.held_by if all(part.held_by == first.held_by for part in parts) else ""
    shape = (offsets[-1], *first.shape[1:])
    return LazyTensor(name, first.onnx_type, shape, rows, held_by=held_by)


def taken(source: LazyTensor, begin: int, end: int) -> LazyTensor:
    """Return the rows `begin` to `end` of a tensor."""
    if (begin, end) == (0, source.length):
        return source
    shape = (end - begin, *source.shape[1:])
    return replace(
        source,
        name=f"{source.name}[{begin}:{end}]",
        shape=shape,
        rows=lambda low, high: source.rows(begin + low, begin + high),
        bytes_of="",
    )


def reshaped(source: LazyTensor, name: str, shape: tuple[int, ...]) -> LazyTensor:
    """Return the same bytes in another shape with as many rows; they are written once."""
    assert shape[0] == source.length, "rows stay rows"
    return replace(
        source,
        name=name,
        shape=shape,
        rows=lambda begin, end: source.rows(begin, end).reshape(end - begin, *shape[1:]),
        bytes_of=source.identity,
    )


def unsigned(source: LazyTensor) -> LazyTensor:
    """Return codes [N, K] as bytes [N, K · bits / 8], those with a sign raised by half their range.

    That flips the upper bit of two's complement, in each half of a byte for int4: zero becomes
    128, or 8.
    """
    flips: dict[int, int] = {onnx.TensorProto.INT4: 0x88, onnx.TensorProto.INT8: 0x80}
    flip = np.uint8(flips.get(source.onnx_type, 0))

    def rows(begin: int, end: int) -> NDArray[Any]:
        return source.rows(begin, end).view(np.uint8) ^ flip

    shape = (source.shape[0], source.row_bytes)
    return LazyTensor(f"{source.name}/unsigned", onnx.TensorProto.UINT8, shape, rows)


_FORMATS = {"bf16": onnx.TensorProto.BFLOAT16, "fp16": onnx.TensorProto.FLOAT16, "fp32": _FLOAT}


def smallest_format(weights: LazyTensor) -> str:
    """Return one of bf16, fp16 and fp32 that holds fp32 weights bit for bit.

    Those that were widened are not read for it.
    """
    if weights.held_by:
        return weights.held_by
    left = ["bf16", "fp16"]
    for _, part in weights.slices():
        bits = part.view(np.uint32)
        left = [
            name
            for name in left
            if (widen(narrow(part, name), _FORMATS[name]).view(np.uint32) == bits).all()
        ]
        if not left:
            return "fp32"
    return left[0]


def stored_as(weights: LazyTensor, format_: str) -> LazyTensor:
    """Return fp32 weights in a format that holds them bit for bit."""
    if format_ == "fp32":
        return weights
    return LazyTensor(
        f"{weights.name}/{format_}", _FORMATS[format_], weights.shape,
        lambda begin, end: narrow(weights.rows(begin, end), format_),
    )  # fmt: skip


def nonzero(source: LazyTensor) -> LazyTensor:
    """Return fp32 scales none of which is 0 in fp16: TensorRT refuses a scale of 0."""
    least = np.float32(2.0**-24)

    def rows(begin: int, end: int) -> NDArray[Any]:
        part = source.rows(begin, end)
        return np.where(np.abs(part) < least, np.copysign(least, part), part)

    return LazyTensor(f"{source.name}/positive", _FLOAT, source.shape, rows)


def doubled(source: LazyTensor) -> LazyTensor:
    """Return a scale a row [N, 1] as two that are equal, [N, 2]."""
    return LazyTensor(
        f"{source.name}/doubled", source.onnx_type, (source.shape[0], 2),
        lambda begin, end: np.repeat(source.rows(begin, end), 2, axis=1),
    )  # fmt: skip


def computed(name: str, shape: tuple[int, ...], load: Callable[[], NDArray[Any]]) -> LazyTensor:
    """Return an fp32 tensor that some function makes whole."""

    def rows(begin: int, end: int) -> NDArray[Any]:
        whole = np.asarray(load(), np.float32)
        if whole.shape != shape:
            raise BuildError(
                f"{name} was computed with shape {list(whole.shape)}, and the graph says "
                f"{list(shape)}. This is a defect of the lowering: please report the architecture"
            )
        return whole[begin:end] if shape else whole

    return LazyTensor(name, _FLOAT, shape, rows)
