"""What the runtime needs of a CUDA device: memory, copies on one stream, captured graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specrt.errors import EngineError

ALIGNMENT = 256
"""Of every address that is bound to a tensor of a plan."""

Bytes = NDArray[np.uint8]


class Staging(Protocol):
    """Host memory that the device reads or writes, and where the device finds it.

    On a discrete GPU the host side is pinned and `address` is a device buffer of the same size:
    `send` and `fetch` copy. On an integrated one both are the same memory, and they do nothing.
    """

    host: Bytes
    address: int

    def send(self) -> None:
        """Copy host to device, in stream order."""

    def fetch(self) -> None:
        """Copy device to host, in stream order; read the host side after `Device.wait`."""


class Graph(Protocol):
    """Work that was captured once, to be launched again and again."""

    def launch(self) -> None:
        """Put the captured work on the stream."""

    def free(self) -> None:
        """Give the graph back."""


class Recording(Protocol):
    """A capture in progress; its graph is there once the capture has ended."""

    @property
    def graph(self) -> Graph:
        """What was captured."""


class Device(Protocol):
    """One GPU, with one stream that all work of this process's engines goes through, in order.

    Units: bytes; addresses are those of the device.
    Raises: EngineError from every method, saying what was being done and what the driver answered.
    """

    @property
    def integrated(self) -> bool:
        """Whether host and device share memory, as on a Jetson."""

    @property
    def stream(self) -> int:
        """The handle of the stream, as TensorRT takes it."""

    def allocate(self, size: int, purpose: str) -> int:
        """Return the address of new memory, cleared; `purpose` is for the error message.

        Raises: EngineError with the bytes needed and free where there is not enough.
        """

    def free(self, address: int) -> None:
        """Give memory back; never raises."""

    def stage(self, size: int) -> Staging:
        """Return memory that both sides see, cleared."""

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within the device, in stream order."""

    def read(self, source: int, into: NDArray[np.generic]) -> None:
        """Copy from the device into an array, and wait for it."""

    def capture(self) -> AbstractContextManager[Recording]:
        """Record the work that is put on the stream inside, instead of running it."""

    def wait(self) -> None:
        """Wait for all work on the stream.

        Raises: EngineError where any of it failed; the device may be lost then.
        """

    def close(self) -> None:
        """Give the stream and all memory back; never raises, and may be called twice."""


@dataclass(frozen=True)
class Block:
    """Device memory of another owner."""

    address: int
    size: int


class Memory:
    """Allocates device memory, and counts it by purpose.

    Staged memory is small, and goes back with the device: nothing of the protocol frees it alone.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.bytes: dict[str, int] = {}
        self._taken: list[tuple[int, int, str]] = []
        self._closed = False

    def take(self, size: int, purpose: str) -> int:
        """Return the address of new memory, cleared.

        Raises: EngineError where the device has too little.
        """
        address = self.device.allocate(size, purpose)
        self._taken.append((address, size, purpose))
        self._count(size, purpose)
        return address

    def stage(self, size: int, purpose: str) -> Staging:
        """Return new memory that host and device see, cleared."""
        staging = self.device.stage(size)
        self._count(size, purpose)
        return staging

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give back what was taken inside where not all of it could be had."""
        count = len(self._taken)
        try:
            yield
        except BaseException:
            self._give_back(count)
            raise

    def _give_back(self, count: int) -> None:
        while len(self._taken) > count:
            address, size, purpose = self._taken.pop()
            self.device.free(address)
            self._count(-size, purpose)

    def read(self, source: int, into: NDArray[np.generic]) -> None:
        """Copy from the device, unless the memory was given back."""
        if self._closed:
            raise EngineError("scores were asked of an engine that was closed; open it again")
        self.device.read(source, into)

    def _count(self, size: int, purpose: str) -> None:
        self.bytes[purpose] = self.bytes.get(purpose, 0) + size

    def settle(self) -> None:
        """Wait for work that a failure left on the stream; never raises."""
        with suppress(EngineError):
            self.device.wait()

    def close(self) -> None:
        """Give everything back; a second time is nothing."""
        self._closed = True
        self._give_back(0)
        self.bytes.clear()


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
