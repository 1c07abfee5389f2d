"""Rows of a tensor in a file, read when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError


@dataclass(frozen=True)
class TensorRows:
    """A tensor in a file, of rows of one shape, read with plain reads.

    Not mapped: pages of a mapping count as this process's memory for as long as it holds them.
    """

    name: str
    file: Path
    offset: int
    dtype: np.dtype[Any]
    row: tuple[int, ...]
    """The shape of one row."""

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Return rows `begin` to `end`, [end - begin, *row].

        Raises: CheckpointError for a file that was cut short since.
        """
        items = prod(self.row)
        count, at = (end - begin) * items, self.offset + begin * items * self.dtype.itemsize
        try:
            read = np.fromfile(self.file, self.dtype, count, offset=at)
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error.strerror}") from error
        if len(read) < count:
            raise CheckpointError(
                f"{self.file} ends before {self.name} does; fetch the checkpoint again"
            )
        return read.reshape(end - begin, *self.row)


def widen_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return bf16, which NumPy has as whole numbers, as fp32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
