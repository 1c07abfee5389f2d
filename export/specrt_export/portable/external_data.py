"""External data: the files that hold the weights of a graph, read and written a slice at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import BuildError, CheckpointError
from specrt.system.memory import size
from specrt_export.checkpoint.tensor_rows import TensorRows, widen_bf16

STORAGE: dict[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    # NumPy has no bf16; the bits travel together with the ONNX type.
    onnx.TensorProto.BFLOAT16: np.dtype(np.uint16),
    onnx.TensorProto.INT8: np.dtype(np.int8),
    # Two to a byte, the first in the low half.
    onnx.TensorProto.INT4: np.dtype(np.uint8),
    onnx.TensorProto.UINT4: np.dtype(np.uint8),
    onnx.TensorProto.FLOAT8E4M3FN: np.dtype(np.uint8),
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
}
"""How the types of weights lie in memory."""

HALVES = (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
"""Types of which two lie in a byte."""


@dataclass(frozen=True)
class MappedWeight:
    """One tensor of a checkpoint, or of a quantized graph's folder, as its stored bytes."""

    name: str
    onnx_type: int
    array: NDArray[Any]
    """Shapes: the tensor's; of 4 bits [N, K] the bytes, [N, K / 2]."""


def map_weights(model: onnx.ModelProto, folder: Path) -> list[MappedWeight]:
    """Map every external initializer of a portable graph from the files in a folder.

    Raises: CheckpointError naming the shard that is missing or too short.
    """
    shards: dict[str, NDArray[np.uint8]] = {}
    weights = []
    for tensor in external_tensors(model):
        place = {entry.key: entry.value for entry in tensor.external_data}
        shard = place.get("location", "")
        if shard not in shards:
            shards[shard] = _map(folder, shard)
        begin = int(place.get("offset", 0))
        dtype, shape = STORAGE[tensor.data_type], _stored_shape(tensor)
        size = prod(shape) * dtype.itemsize
        if begin + size > len(shards[shard]):
            raise CheckpointError(
                f"{folder / shard} ends before {tensor.name} does (byte {begin + size} of "
                f"{len(shards[shard])}); fetch the checkpoint again, or export the graph again"
            )
        array: NDArray[Any] = shards[shard][begin : begin + size].view(dtype)
        weights.append(MappedWeight(tensor.name, tensor.data_type, array.reshape(shape)))
    return weights


def _stored_shape(tensor: onnx.TensorProto) -> tuple[int, ...]:
    *outer, inner = tensor.dims or (1,)
    if tensor.data_type in HALVES:
        inner //= 2
    return (*outer, inner) if tensor.dims else ()


def external_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Return the initializers whose bytes lie in a checkpoint."""
    external = onnx.TensorProto.EXTERNAL
    return [t for t in model.graph.initializer if t.data_location == external]


def location(tensor: onnx.TensorProto) -> str:
    """Return the name of the file that holds an external tensor."""
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def _map(folder: Path, shard: str) -> NDArray[np.uint8]:
    """Map one shard; links are followed, because hub caches are made of them."""
    if not shard or Path(shard).name != shard:
        raise CheckpointError(
            f"the graph points at weights in {shard!r}; expected a plain file name. "
            "Export it again with `specrt export`"
        )
    try:
        return np.memmap(folder / shard, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / shard} cannot be read: {error}") from error


Floats = NDArray[np.float32]


class StoredTensor:
    """A tensor of a checkpoint, whose rows are read as fp32."""

    def __init__(self, tensor: onnx.TensorProto, folder: Path) -> None:
        self.name = tensor.name
        self.shape = tuple(tensor.dims)
        self._type = tensor.data_type
        self._stored = rows_of(tensor, folder, (self.row_items,))

    @property
    def rows(self) -> int:
        """Length of the first axis; a vector is one row."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def row_items(self) -> int:
        """Numbers in one row."""
        return prod(self.shape[1:] if len(self.shape) > 1 else self.shape)

    def read(self, begin: int, end: int) -> Floats:
        """Return rows `begin` to `end` as fp32 [end - begin, row_items].

        Raises: CheckpointError for a file that ends early, and for numbers that are not finite.
        """
        values = widen(self._stored.read(begin, end), self._type)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._stored.file}: {self.name} holds values that are not finite numbers, in "
                f"rows {begin} to {end - 1}; fetch the checkpoint again, or use one that was "
                "trained to its end"
            )
        return values


def rows_of(tensor: onnx.TensorProto, folder: Path, row: tuple[int, ...]) -> TensorRows:
    """Return an external tensor of a graph as rows of a shape."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    offset, dtype = int(place.get("offset", 0)), STORAGE[tensor.data_type]
    return TensorRows(tensor.name, folder / place["location"], offset, dtype, row)


def widen(stored: NDArray[Any], onnx_type: int) -> Floats:
    """Return stored bits as fp32; bf16 travels as uint16."""
    if onnx_type == onnx.TensorProto.BFLOAT16:
        return widen_bf16(stored)
    return stored.astype(np.float32, copy=False)


_NAN = np.uint32(0x7FC0)
"""In bf16; rounding the bits of one may end at infinity."""


def narrow(values: Floats, precision: str) -> NDArray[Any]:
    """Return fp32 values as the bits of fp16 or bf16, rounded to nearest even."""
    if precision == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    upper = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), _NAN, upper).astype(np.uint16)


ALIGNMENT = 4096
"""Every tensor begins on a page of its own, so that it can be mapped by itself."""


class DataFile:
    """Tensors written one after another, in pieces and from several threads."""

    def __init__(self, path: Path, name: str) -> None:
        """Write to a path; graphs will look for it under a name."""
        self._name = name
        self._file = path.open("wb")
        self._end = 0

    def reserve(
        self, name: str, onnx_type: int, shape: Sequence[int], rows: int, row_bytes: int
    ) -> Region:
        """Take the bytes of a tensor."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + rows * row_bytes
        tensor = onnx.TensorProto(
            name=name, data_type=onnx_type, dims=shape, data_location=onnx.TensorProto.EXTERNAL
        )
        place = (("location", self._name), ("offset", offset), ("length", rows * row_bytes))
        for key, value in place:
            tensor.external_data.add(key=key, value=str(value))
        return Region(tensor, self._file.fileno(), offset, row_bytes)

    def close(self) -> None:
        """Close the file; it ends with the last tensor."""
        with self._file:  # also where the disk is full
            os.ftruncate(self._file.fileno(), self._end)


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


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; at the end it takes the place of `path`.

    Whatever stops the writing, what was at `path` is as it was and the file is gone.
    Raises: BuildError for what the disk refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
    except OSError as error:
        raise BuildError(
            f"{path} cannot be written ({error.strerror or error}); build elsewhere with --out"
        ) from error
    aside = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        aside.chmod(0o644)
        aside.replace(path)
    except OSError as error:
        raise disk_full(path) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def disk_full(path: Path) -> BuildError:
    """Return the error for a file that could not be written, with what is free on its disk."""
    free = size(shutil.disk_usage(path.parent).free)
    return BuildError(
        f"{path} could not be written, with {free} free on its disk; free some, or build "
        "elsewhere with --out"
    )
