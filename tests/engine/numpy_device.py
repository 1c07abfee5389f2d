"""A GPU in NumPy: bytes in one arena, work that waits, graphs that replay addresses.

What CUDA would forgive or punish in silence fails here with an AssertionError: memory that is not
there or was given back, calls that no capture allows. Work that was put on the stream is done when
somebody waits, and not before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from specrt.engine.tensorrt.device import ALIGNMENT, Bytes, Graph, Recording
from specrt.errors import EngineError

POISON, ALWAYS = 0xA5, 0
Work = Callable[[], None]


class NumpyStaging:
    """Host memory and its other side; the same bytes on an integrated device."""

    def __init__(self, device: NumpyDevice, size: int) -> None:
        self._device = device
        self.address = device.claim(size, "staging")
        self._other = device.at(self.address, size)
        self.host: Bytes = self._other if device.integrated else np.zeros(size, np.uint8)

    def send(self) -> None:
        self._device.enter("send")
        if not self._device.integrated:
            self._device.put(lambda: np.copyto(self._other, self.host))

    def fetch(self) -> None:
        self._device.enter("fetch")
        if not self._device.integrated:
            self._device.put(lambda: np.copyto(self.host, self._other))


class NumpyGraph:
    """Work to be done again, each time with the memory it was recorded with."""

    def __init__(self, device: NumpyDevice) -> None:
        self._device = device
        self.work: list[Work] = []
        self.freed = False
        device.graphs.append(self)

    def launch(self) -> None:
        self._device.enter("launch")
        assert not self.freed, "launched a graph that was given back"
        assert self.work, "launched a graph of nothing"
        for work in self.work:
            self._device.put(work)

    def free(self) -> None:
        assert not self.freed, "a graph was given back twice"
        self.freed = True


class NumpyRecording:
    """A capture in progress; it has no graph before it ends."""

    graph: Graph


class NumpyDevice:
    """One device of `size` bytes whose calls can be told to fail.

    `fails` names calls and which of them fails, counted from 1, or `ALWAYS`. With `loses`
    every call after that one fails too, as with a device that is gone.
    """

    stream = 7

    def __init__(
        self, size: int = 1 << 20, *, integrated: bool = False,
        fails: Mapping[str, int] | None = None, loses: bool = False,
    ) -> None:  # fmt: skip
        self.integrated = integrated
        self.fails = dict(fails or {})
        self.loses = loses
        self.lost = False
        self.calls: Counter[str] = Counter()
        self.graphs: list[NumpyGraph] = []
        self.blocks: dict[int, tuple[int, str]] = {}
        self._arena = np.full(size, POISON, np.uint8)
        self._end = 16 * ALIGNMENT
        self._queue: list[Work] = []
        self._capturing: NumpyGraph | None = None
        self.closed = 0
        self.leaked: list[str] = []
        """What nobody had given back when the device was closed."""

    def enter(self, call: str, *, captured: bool = True) -> None:
        """Count a call, and fail where it is told to."""
        assert not self.closed, f"{call} after the device was closed"
        assert captured or self._capturing is None, f"{call} during a capture"
        self.calls[call] += 1
        if self.fails.get(call) in (ALWAYS, self.calls[call]):
            self.lost = self.loses
            if self.lost:
                self._queue.clear()
            raise EngineError(f"{call} failed: the driver answers that it was told to")
        if self.lost:
            raise EngineError(f"{call} failed: the device is lost")

    def put(self, work: Work) -> None:
        """Put work on the stream, or into what is being captured."""
        (self._queue if self._capturing is None else self._capturing.work).append(work)

    def at(self, address: int, size: int) -> Bytes:
        """Return bytes of the arena, all of one live block."""
        for first, (length, _) in self.blocks.items():
            if first <= address and address + size <= first + length:
                return self._arena[address : address + size]
        raise AssertionError(f"bytes {address} to {address + size} belong to no block")

    def claim(self, size: int, purpose: str) -> int:
        """Take memory from the arena; none is ever given out twice."""
        free = len(self._arena) - sum(length for length, _ in self.blocks.values())
        if size > free or self._end + size > len(self._arena):
            raise EngineError(f"{purpose} needs {size} bytes of the device, which has {free} free")
        address, self._end = self._end, self._end + -(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self.blocks[address] = size, purpose
        self._arena[address : address + size] = 0
        return address

    def allocate(self, size: int, purpose: str) -> int:
        self.enter("allocate", captured=False)
        assert size > 0
        return self.claim(size, purpose)

    def free(self, address: int) -> None:
        assert not self._queue, "memory was given back before the work on it was done"
        size, _ = self.blocks.pop(address)
        self._arena[address : address + size] = POISON

    def stage(self, size: int) -> NumpyStaging:
        self.enter("stage", captured=False)
        return NumpyStaging(self, size)

    def copy(self, to: int, source: int, size: int) -> None:
        self.enter("copy")
        self.put(lambda: np.copyto(self.at(to, size), self.at(source, size)))

    def read(self, source: int, into: NDArray[np.generic]) -> None:
        self.enter("read", captured=False)
        self._run()
        into.view(np.uint8).reshape(-1)[:] = self.at(source, into.nbytes)

    @contextmanager
    def capture(self) -> Iterator[Recording]:
        self.enter("capture", captured=False)
        assert not self._queue, "captured before earlier work was done"
        self._capturing = graph = NumpyGraph(self)
        recording = NumpyRecording()
        try:
            yield recording
        except BaseException:
            graph.free()
            raise
        finally:
            self._capturing = None
        recording.graph = graph

    def wait(self) -> None:
        self.enter("wait", captured=False)
        self._run()

    def _run(self) -> None:
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def close(self) -> None:
        self.closed += 1
        assert not self._queue, "the device was closed before its work was done"
        self.leaked += self.live
        self.blocks.clear()

    @property
    def live(self) -> list[str]:
        """What was taken and not given back; staged memory goes with the device."""
        blocks = [purpose for _, purpose in self.blocks.values() if purpose != "staging"]
        return blocks + ["graph"] * sum(not graph.freed for graph in self.graphs)
