"""The one file that holds all weights of a quantized graph."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

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
