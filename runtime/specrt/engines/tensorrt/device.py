"""What the runtime asks of a CUDA device: memory, copies on one stream, and captured graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
