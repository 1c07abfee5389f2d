"""A CUDA device over `cuda.bindings.runtime`, and memory of it: allocated, staged, laid out."""

from __future__ import annotations

import ctypes
import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specrt.errors import EngineError, first_line
from specrt.system.gpu import Survey, survey

ALIGNMENT = 256
"""Of every address that is bound to a tensor of a plan."""

Bytes = NDArray[np.uint8]

BINDINGS = "cuda.bindings.runtime"

LOST = frozenset({
    "cudaErrorECCUncorrectable", "cudaErrorNvlinkUncorrectable", "cudaErrorContained",
    "cudaErrorIllegalAddress", "cudaErrorLaunchTimeout", "cudaErrorContextIsDestroyed",
    "cudaErrorAssert", "cudaErrorHardwareStackError", "cudaErrorIllegalInstruction",
    "cudaErrorMisalignedAddress", "cudaErrorInvalidAddressSpace", "cudaErrorInvalidPc",
    "cudaErrorLaunchFailure", "cudaErrorTensorMemoryLeak", "cudaErrorMpsClientTerminated",
    "cudaErrorExternalDevice", "cudaErrorUnknown",
})  # fmt: skip
"""Errors after which every call of the process fails, as the CUDA runtime documents them."""

_SIGNS = (
    "illegal memory access", "unspecified launch failure", "uncorrectable ecc", "hardware stack",
    "misaligned address", "illegal instruction", "launch timed out", "device-side assert",
    "invalid program counter", "cudaerror 700", "cudaerror 719", "cudaerror 214",
)  # fmt: skip
"""How CUDA words those errors that kernels can cause, and how TensorRT numbers them."""

_REMEDY = "the device is lost to this process: start it again"

_OLD = ("cudaErrorInsufficientDriver", "cudaErrorCallRequiresNewerDriver")

_GIB = 1 << 30


def lost(text: str) -> str:
    """Return what to add to a message of TensorRT: that the device is lost, or nothing."""
    low = text.lower()
    return f"; {_REMEDY}" if any(sign in low for sign in _SIGNS) else ""


def size(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / _GIB:.2f} GiB" if count >= _GIB // 100 else f"{count / (1 << 20):.2f} MiB"


def install(newest: tuple[int, int]) -> str:
    """Return the command to install the bindings that suit the newest CUDA a driver knows."""
    wanted = f"=={newest[0]}.*" if newest[0] else ""
    return f"`pip install 'cuda-bindings{wanted}'`"


def cuda_bindings() -> Any:
    """Import the CUDA runtime.

    Raises: EngineError naming the remedy where it is missing or broken.
    """
    try:
        return importlib.import_module(BINDINGS)
    except Exception as error:  # broken installations raise anything
        raise EngineError(
            f"{BINDINGS} cannot be imported ({first_line(error)}); {install(survey().cuda)}"
        ) from error


class Checked:
    """Calls of the CUDA runtime; what they answer begins with a code."""

    def __init__(self, runtime: Any, newest: tuple[int, int]) -> None:
        self._runtime, self._newest = runtime, newest

    def ask(self, doing: str, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what a call answers.

        Raises: EngineError saying what failed and what the runtime reports.
        """
        values: list[Any]
        code, *values = call(*arguments)
        if code:
            raise self.error(doing, code)
        return values

    def attempt(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what a call answers, nothing where it fails; never raises."""
        try:
            code, *values = call(*arguments)
        except Exception:  # closing goes on, whatever the bindings raise
            return []
        return [] if code else values

    def reserve(self, purpose: str, count: int, call: Callable[..., Any], *arguments: Any) -> int:
        """Return the address of new memory.

        Raises: EngineError with the bytes needed and free where there is not enough.
        """
        values: list[Any]
        code, *values = call(*arguments)
        if not code:
            return int(values[0])
        if code != self._runtime.cudaError_t.cudaErrorMemoryAllocation:
            raise self.error(f"allocate {purpose}", code)
        self.attempt(self._runtime.cudaGetLastError)  # the error is not sticky; clear it
        free = "less is free"
        if memory := self.attempt(self._runtime.cudaMemGetInfo):
            free = f"{size(memory[0])} of {size(memory[1])} are free"
        raise EngineError(
            f"cannot allocate {purpose}: {size(count)} are needed and {free} on the GPU; close "
            "what else uses it, or build with a smaller max_length, batch or precision"
        )

    def error(self, doing: str, code: Any) -> EngineError:
        """Return what a code means, and what to do."""
        name = _text(self._runtime.cudaGetErrorName(code))
        message = f"cannot {doing}: {name} ({_text(self._runtime.cudaGetErrorString(code))})"
        if name in LOST:
            return EngineError(f"{message}; {_REMEDY}")
        if name in _OLD:
            version = ".".join(map(str, self._newest))
            return EngineError(
                f"{message}; the driver knows CUDA {version}: {install(self._newest)}"
            )
        return EngineError(f"{message}; `specrt doctor` tells what this machine has")


def _text(answer: Any) -> str:
    raw = answer[1]
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


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

    graph: CudaGraph
    """What was captured; there once the capture has ended."""


class CudaStaging:
    """Host memory that the device reads or writes, and where the device finds it.

    On a discrete GPU the host side is pinned and `address` is a device buffer of the same size:
    `send` and `fetch` copy. On an integrated one both are the same memory, and they do nothing.
    """

    def __init__(self, device: CudaDevice, host: Bytes, address: int) -> None:
        self.host, self.address, self._device = host, address, device

    def send(self) -> None:
        """Copy host to device, in stream order."""
        if not self._device.integrated:
            self._device.transfer(self.address, self.host.ctypes.data, self.host.size, sends=True)

    def fetch(self) -> None:
        """Copy device to host, in stream order; read the host side after `CudaDevice.wait`."""
        if not self._device.integrated:
            self._device.transfer(self.host.ctypes.data, self.address, self.host.size, sends=False)


class CudaDevice:
    """One GPU, with one stream that all work of this process's engines goes through, in order.

    The device is made current in every thread that uses it. One thread at a time may.
    Units: bytes; addresses are those of the device.
    Raises: EngineError from every method, saying what was being done and what the driver answered.
    """

    def __init__(
        self, device_id: int = 0, *, runtime: Any = None, devices: Survey | None = None
    ) -> None:
        devices = survey() if devices is None else devices
        if lacks := devices.lacks(device_id):
            raise EngineError(f"TensorRT runs on an NVIDIA GPU only: {lacks}")
        self._cuda = cuda_bindings() if runtime is None else runtime
        self._checked, self.id = Checked(self._cuda, devices.cuda), device_id
        self._current = threading.local()
        self._memory: set[int] = set()
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
        """Return the address of new memory, cleared; `purpose` is for the error message.

        Raises: EngineError with the bytes needed and free where there is not enough.
        """
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
        host: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
        # Results are views of it, and callers may hold them longer than the device.
        weakref.finalize(host, self._checked.attempt, cuda.cudaFreeHost, pointer).atexit = False
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
        """Wait for all work on the stream.

        Raises: EngineError where any of it failed; the device may be lost then.
        """
        self._checked.ask("wait for the device", self._cuda.cudaStreamSynchronize, self._stream)

    def recover(self) -> None:
        """Forget the error of a call that put nothing on the stream, and wait for what is there.

        Raises: EngineError where the device is lost.
        """
        self._checked.attempt(self._cuda.cudaGetLastError)  # libraries ask for it after a launch
        self.wait()

    def close(self) -> None:
        """Give the stream and all memory back; never raises, and may be called twice.

        Host memory goes back with the last array that is a view of it.
        """
        if self._closed:
            return
        self._closed = True
        self._checked.attempt(self._cuda.cudaSetDevice, self.id)
        self._checked.attempt(self._cuda.cudaStreamSynchronize, self._stream)
        for handle in list(self._graphs.values()):
            self.forget(handle)
        for address in list(self._memory):
            self.free(address)
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


class Memory:
    """Allocates device memory, and counts it by purpose.

    Staged memory is small, and goes back with the device.
    """

    def __init__(self, device: CudaDevice) -> None:
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

    def stage(self, size: int, purpose: str) -> CudaStaging:
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

    @property
    def offsets(self) -> dict[str, int]:
        """Where each array begins in the block."""
        return dict(self._offsets)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def view(self, staging: CudaStaging, name: str, shape: tuple[int, ...] | None = None) -> Any:
        """Return an array on the host side, or as much of it as a smaller shape takes."""
        field = self._fields[name]
        shape = field.shape if shape is None else shape
        at = self._offsets[name]
        size = np.dtype(field.type).itemsize * prod(shape)
        part: NDArray[Any] = staging.host[at : at + size].view(field.type)
        return part.reshape(shape)

    def addresses(self, staging: CudaStaging) -> dict[str, int]:
        """Return where the device finds each array."""
        return {name: staging.address + at for name, at in self._offsets.items()}
