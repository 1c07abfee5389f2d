"""A CUDA device over `cuda.bindings.runtime`, with every answer of the driver checked."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.cuda import Survey, survey
from specrt.engines.tensorrt.bindings import Checked, cuda_bindings
from specrt.engines.tensorrt.device import Bytes, Graph
from specrt.errors import EngineError


class CudaGraph:
    """Work that was captured once."""

    def __init__(self, device: CudaDevice, handle: Any) -> None:
        self._device, self._handle = device, handle

    def launch(self) -> None:
        """Put the captured work on the stream."""
        self._device.launch(self._handle)

    def free(self) -> None:
        """Give the graph back; never raises."""
        self._device.forget(self._handle)
        self._handle = None


class CudaRecording:
    """A capture in progress."""

    graph: Graph


class CudaStaging:
    """Host memory and a device buffer of the same size, or one memory where they share it."""

    def __init__(self, device: CudaDevice, host: Bytes, address: int) -> None:
        self.host, self.address, self._device = host, address, device

    def send(self) -> None:
        """Copy host to device, in stream order."""
        if not self._device.integrated:
            self._device.transfer(self.address, self.host.ctypes.data, self.host.size, sends=True)

    def fetch(self) -> None:
        """Copy device to host, in stream order."""
        if not self._device.integrated:
            self._device.transfer(self.host.ctypes.data, self.address, self.host.size, sends=False)


class CudaDevice:
    """One GPU with one stream; see `device.Device` for what the verbs promise.

    The device is made current in every thread that uses it. One thread at a time may.
    """

    def __init__(
        self, device_id: int = 0, *, runtime: Any = None, found: Survey | None = None
    ) -> None:
        found = survey() if found is None else found
        if lacks := found.lacks(device_id):
            raise EngineError(f"TensorRT runs on an NVIDIA GPU only: {lacks}")
        self._cuda = cuda_bindings() if runtime is None else runtime
        self._checked, self.id = Checked(self._cuda, found.cuda), device_id
        self._current = threading.local()
        self._memory: set[int] = set()
        self._pinned: set[int] = set()
        self._graphs: dict[int, Any] = {}
        self._closed = False
        self._kinds = self._cuda.cudaMemcpyKind
        self.make_current()
        attributes = self._cuda.cudaDeviceAttr
        self.integrated = bool(
            self._attribute(attributes.cudaDevAttrIntegrated)
            and self._attribute(attributes.cudaDevAttrCanMapHostMemory)
        )
        (self._stream,) = self._checked.ask(
            "create a stream",
            self._cuda.cudaStreamCreateWithFlags,
            self._cuda.cudaStreamNonBlocking,
        )
        self.stream = int(self._stream)

    def make_current(self) -> None:
        """Let CUDA calls of this thread, TensorRT's too, go to this device."""
        if getattr(self._current, "done", False):
            return
        self._checked.ask(f"use device {self.id}", self._cuda.cudaSetDevice, self.id)
        self._current.done = True

    def available(self) -> tuple[int, int]:
        """Return the bytes of device memory that are free, and those there are."""
        self.make_current()
        free, total = self._checked.ask("ask for free memory", self._cuda.cudaMemGetInfo)
        return free, total

    def allocate(self, size: int, purpose: str) -> int:
        """Return the address of new memory, cleared."""
        self.make_current()
        size = max(size, 1)
        address = self._checked.reserve(purpose, size, self._cuda.cudaMalloc, size)
        self._memory.add(address)
        self._checked.ask(
            f"clear {purpose}", self._cuda.cudaMemsetAsync, address, 0, size, self._stream
        )
        return address

    def free(self, address: int) -> None:
        """Give memory back; never raises."""
        if address in self._memory:
            self._memory.discard(address)
            self._checked.attempt(self._cuda.cudaFree, address)

    def stage(self, size: int) -> CudaStaging:
        """Return memory that both sides see, cleared."""
        self.make_current()
        size, cuda = max(size, 1), self._cuda
        flags = cuda.cudaHostAllocMapped if self.integrated else cuda.cudaHostAllocDefault
        purpose = "pinned host memory"
        pointer = self._checked.reserve(purpose, size, cuda.cudaHostAlloc, size, flags)
        self._pinned.add(pointer)
        host: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
        host.fill(0)
        if not self.integrated:
            return CudaStaging(self, host, self.allocate(size, "a buffer for the host"))
        (mapped,) = self._checked.ask("map host memory", cuda.cudaHostGetDevicePointer, pointer, 0)
        return CudaStaging(self, host, int(mapped))

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy within the device, in stream order."""
        self._copy("copy on the device", to, source, size, self._kinds.cudaMemcpyDefault)

    def transfer(self, to: int, source: int, size: int, *, sends: bool) -> None:
        """Copy between pinned host memory and the device, in stream order."""
        if sends:
            kind = self._kinds.cudaMemcpyHostToDevice
            self._copy("copy to the device", to, source, size, kind)
        else:
            kind = self._kinds.cudaMemcpyDeviceToHost
            self._copy("copy from the device", to, source, size, kind)

    def read(self, source: int, into: NDArray[np.generic]) -> None:
        """Copy from the device into an array, and wait for it."""
        assert into.flags.c_contiguous
        assert into.flags.writeable
        if into.nbytes:
            kind = self._kinds.cudaMemcpyDefault
            self._copy("read from the device", into.ctypes.data, source, into.nbytes, kind)
        self.wait()

    @contextmanager
    def capture(self) -> Iterator[CudaRecording]:
        """Record the work that is put on the stream inside, instead of running it."""
        self.make_current()
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._checked.ask("begin a capture", self._cuda.cudaStreamBeginCapture, self._stream, mode)
        recording = CudaRecording()
        try:
            yield recording
        except BaseException:
            self._abandon()
            raise
        (template,) = self._checked.ask(
            "end a capture", self._cuda.cudaStreamEndCapture, self._stream
        )
        try:
            (handle,) = self._checked.ask(
                "make a graph of what was captured", self._cuda.cudaGraphInstantiate, template, 0
            )
        finally:
            self._checked.attempt(self._cuda.cudaGraphDestroy, template)
        self._graphs[id(handle)] = handle
        recording.graph = CudaGraph(self, handle)

    def launch(self, handle: Any) -> None:
        """Put a captured graph on the stream."""
        self.make_current()
        self._checked.ask("launch a graph", self._cuda.cudaGraphLaunch, handle, self._stream)

    def forget(self, handle: Any) -> None:
        """Give a captured graph back; never raises."""
        if self._graphs.pop(id(handle), None) is not None:
            self._checked.attempt(self._cuda.cudaGraphExecDestroy, handle)

    def wait(self) -> None:
        """Wait for all work on the stream."""
        self._checked.ask("wait for the device", self._cuda.cudaStreamSynchronize, self._stream)

    def close(self) -> None:
        """Give the stream and all memory back; never raises, and may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._checked.attempt(self._cuda.cudaSetDevice, self.id)
        self._checked.attempt(self._cuda.cudaStreamSynchronize, self._stream)
        for handle in list(self._graphs.values()):
            self.forget(handle)
        for address in list(self._memory):
            self.free(address)
        while self._pinned:
            self._checked.attempt(self._cuda.cudaFreeHost, self._pinned.pop())
        self._checked.attempt(self._cuda.cudaStreamDestroy, self._stream)

    def _copy(self, doing: str, to: int, source: int, size: int, kind: Any) -> None:
        self.make_current()
        self._checked.ask(doing, self._cuda.cudaMemcpyAsync, to, source, size, kind, self._stream)

    def _attribute(self, which: Any) -> int:
        (value,) = self._checked.ask(
            f"ask what device {self.id} is", self._cuda.cudaDeviceGetAttribute, which, self.id
        )
        return int(value)

    def _abandon(self) -> None:
        """End a capture whose body failed, so that the stream can be used again."""
        for template in self._checked.attempt(self._cuda.cudaStreamEndCapture, self._stream):
            self._checked.attempt(self._cuda.cudaGraphDestroy, template)
        self._checked.attempt(self._cuda.cudaGetLastError)
