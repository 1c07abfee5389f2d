"""Read the rows of a stored tensor as fp32, a slice at a time."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.mapped import STORAGE

Floats = NDArray[np.float32]

_NAN = np.uint32(0x7FC0)
"""In bf16; rounding the bits of one may end at infinity."""


class StoredTensor:
    """A tensor of a checkpoint, read with plain reads.

    Not mapped: pages of a mapping count as this process's memory for as long as it holds them.
    """

    def __init__(self, tensor: onnx.TensorProto, folder: Path) -> None:
        place = {entry.key: entry.value for entry in tensor.external_data}
        self.name = tensor.name
        self.shape = tuple(tensor.dims)
        self._path = folder / place["location"]
        self._offset = int(place.get("offset", 0))
        self._type = tensor.data_type
        self._dtype: np.dtype[Any] = STORAGE[tensor.data_type]

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

        Raises: CheckpointError for a file that ends early, and for what are no finite numbers.
        """
        count = (end - begin) * self.row_items
        offset = self._offset + begin * self.row_items * self._dtype.itemsize
        try:
            stored = np.fromfile(self._path, self._dtype, count, offset=offset)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be read: {error.strerror}") from error
        if len(stored) < count:
            raise CheckpointError(
                f"{self._path} ends before {self.name} does; fetch the checkpoint again"
            )
        values = widen(stored, self._type)
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{self._path}: {self.name} holds values that are no finite numbers, in rows "
                f"{begin} to {end - 1}; fetch the checkpoint again, or use one that was trained "
                "to its end"
            )
        return values.reshape(end - begin, -1)


def widen(stored: NDArray[Any], onnx_type: int) -> Floats:
    """Return stored bits as fp32; bf16 travels as uint16."""
    if onnx_type == onnx.TensorProto.BFLOAT16:
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return stored.astype(np.float32, copy=False)


def narrow(values: Floats, precision: str) -> NDArray[Any]:
    """Return fp32 values as the bits of fp16 or bf16, rounded to nearest even."""
    if precision == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    upper = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), _NAN, upper).astype(np.uint16)
