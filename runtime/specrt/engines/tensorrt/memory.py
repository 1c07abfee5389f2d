"""What one owner holds of a device, so that all of it is given back, and only once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrt.engines.tensorrt.device import Device, Staging
from specrt.errors import EngineError


@dataclass(frozen=True)
class Block:
    """Device memory that somebody else owns."""

    address: int
    size: int


class Memory:
    """A ledger of device memory by purpose.

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
        kept = len(self._taken)
        try:
            yield
        except BaseException:
            self._give_back(kept)
            raise

    def _give_back(self, kept: int) -> None:
        while len(self._taken) > kept:
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
