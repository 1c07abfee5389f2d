"""Arrays one after the other in one staged block, each where a tensor of a plan may be bound."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specrt.engines.tensorrt.device import ALIGNMENT, Staging


def aligned(size: int) -> int:
    """Return the bytes that memory of a size takes with what follows it aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Field(NamedTuple):
    """One array of a layout."""

    name: str
    type: DTypeLike
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return np.dtype(self.type).itemsize * prod(self.shape)


class Layout:
    """Where each array lies in a block of `size` bytes."""

    def __init__(self, fields: Iterable[Field]) -> None:
        self._fields: dict[str, Field] = {}
        self._offsets: dict[str, int] = {}
        self.size = 0
        for field in fields:
            self._fields[field.name] = field
            self._offsets[field.name] = self.size
            self.size += aligned(field.size)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def view(self, staging: Staging, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """Return an array on the host side, or as much of it as a smaller shape takes."""
        field = self._fields[name]
        shape = field.shape if shape is None else shape
        at = self._offsets[name]
        size = np.dtype(field.type).itemsize * prod(shape)
        part: NDArray[Any] = staging.host[at : at + size].view(field.type)
        return part.reshape(shape)

    def addresses(self, staging: Staging) -> dict[str, int]:
        """Return where the device finds each array."""
        return {name: staging.address + at for name, at in self._offsets.items()}
