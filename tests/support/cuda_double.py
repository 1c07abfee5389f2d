"""A CUDA runtime in host memory: answers like `cuda.bindings.runtime`, strict where CUDA is silent.

Memory that is not there or was given back, and calls that no capture allows, fail here with an
AssertionError. Work that was put on the stream is done when somebody waits, and not before.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.engine.tensorrt.device import ALIGNMENT, CudaDevice
from specrt.system.gpu import Gpu, Survey

MACHINE = Survey((Gpu(0, "A GPU", "8.9", 8 << 30), Gpu(1, "B GPU", "8.9", 8 << 30)), "", (13, 0))
POISON, ALWAYS = 0xA5, 0
Work = Callable[[], object]


Code = IntEnum(
    "Code",
    {
        "cudaSuccess": 0, "cudaErrorInvalidValue": 1, "cudaErrorMemoryAllocation": 2,
        "cudaErrorInsufficientDriver": 35, "cudaErrorIllegalAddress": 700,
    },
)  # fmt: skip
LOST = Code.cudaErrorIllegalAddress


class CudaDouble:
    """One runtime with `size` bytes of device memory, whose calls can be told to fail."""

    cudaError_t = Code  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(  # noqa: N815
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDefault=4
    )
    cudaDeviceAttr = SimpleNamespace(  # noqa: N815
        cudaDevAttrIntegrated="integrated", cudaDevAttrCanMapHostMemory="maps"
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815
    cudaHostAllocDefault, cudaHostAllocMapped = 0, 2  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815

    def __init__(self, size: int = 1 << 22, *, integrated: bool = False, maps: bool = True) -> None:
        self.size = size
        self.attributes = {"integrated": int(integrated), "maps": int(maps)}
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, int] = {}
        self.code = Code.cudaErrorInvalidValue
        self.lost = False
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.host: dict[int, NDArray[np.uint8]] = {}
        self.graphs: dict[int, list[Work]] = {}
        self.streams = 0
        self.capturing: list[Work] | None = None
        self.waited: Work = lambda: None
        """Called whenever the host has waited."""
        self._queue: list[Work] = []
        self._taken: list[tuple[int, int, Any]] = []
        """Addresses, sizes and memory, never let go, so that no address comes twice."""

    def fail(self, name: str, after: int = 1, code: Code = Code.cudaErrorInvalidValue) -> None:
        """Let one call fail, the next when `after` is 1; every one when it is `ALWAYS`."""
        self.fails = {name: self.calls[name] + after if after else ALWAYS}
        self.code = code

    def enter(self, name: str) -> Code:
        """Count a call and return what it answers; a device that is lost stays so."""
        self.calls[name] += 1
        if self.lost:
            return LOST
        if self.fails.get(name) not in (ALWAYS, self.calls[name]):
            return Code.cudaSuccess
        if self.code == LOST:
            self.lost = True
            self._queue.clear()
        return self.code

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), "_" + name[4:].lower(), None)
        if not name.startswith("cuda") or method is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            code = self.enter(name)
            if code and not any(part in name for part in ("cudaGet", "Free", "Destroy")):
                if name == "cudaStreamEndCapture":
                    self.capturing = None
                return (code,)
            answer = method(self, *arguments)
            return (answer,) if isinstance(answer, Code) else (Code.cudaSuccess, *answer)

        return call

    def put(self, work: Work) -> tuple[()]:
        """Put work on the stream, or into what is being captured."""
        (self._queue if self.capturing is None else self.capturing).append(work)
        return ()

    def at(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return bytes of one live block."""
        block = self._block(address, size)
        assert block is not None, f"bytes {address} to {address + size} belong to no block"
        return block

    def _block(self, address: int, size: int) -> NDArray[np.uint8] | None:
        """Return bytes of a live block; None for memory that was never this runtime's."""
        number = bisect_right(self._taken, address, key=itemgetter(0))
        first, size_there, _ = self._taken[number - 1] if number else (0, 0, None)
        if address >= first + size_there:
            return None
        block = self.memory.get(first, self.host.get(first))
        assert block is not None, "used after it was given back"
        assert address + size <= first + len(block), "used beyond its end"
        return block[address - first : address - first + size]

    def _take(self, size: int, where: dict[int, NDArray[np.uint8]]) -> tuple[int]:
        assert self.capturing is None, "memory was taken during a capture"
        assert size > 0
        raw = np.full(size + ALIGNMENT, POISON, np.uint8)
        first = -raw.ctypes.data % ALIGNMENT
        address = int(raw.ctypes.data) + first
        where[address] = raw[first : first + size]
        insort(self._taken, (address, size, raw), key=itemgetter(0))
        return (address,)

    def _done(self, *_: Any) -> tuple[()]:
        return ()

    _setdevice = _getlasterror = _done

    def _devicegetattribute(self, which: str, _: int) -> tuple[int]:
        return (self.attributes[which],)

    def _streamcreatewithflags(self, _: int) -> tuple[int]:
        self.streams += 1
        return (77,)

    def _streamdestroy(self, _: int) -> tuple[()]:
        assert not self._queue, "a stream was given back before its work was done"
        self.streams -= 1
        return ()

    def _streamsynchronize(self, _: int) -> tuple[()]:
        assert self.capturing is None, "waited during a capture"
        queue, self._queue = self._queue, []
        for work in queue:
            work()
        self.waited()
        return ()

    def _memgetinfo(self) -> tuple[int, int]:
        return self.size - sum(map(len, self.memory.values())), self.size

    def _malloc(self, size: int) -> tuple[int] | Code:
        if size > self._memgetinfo()[0]:
            return Code.cudaErrorMemoryAllocation
        return self._take(size, self.memory)

    def _hostalloc(self, size: int, _: int) -> tuple[int]:
        return self._take(size, self.host)

    def _hostgetdevicepointer(self, pointer: int, _: int) -> tuple[int]:
        return (pointer,)

    def _free(self, pointer: int) -> tuple[()]:
        assert not self._queue, "memory was given back before the work on it was done"
        self.memory.pop(pointer)[:] = POISON
        return ()

    def _freehost(self, pointer: int) -> tuple[()]:
        self.host.pop(pointer)[:] = POISON
        return ()

    def _memsetasync(self, to: int, value: int, size: int, _: int) -> tuple[()]:
        self.at(to, size)[:] = value  # at once: nothing on the stream knows of new memory
        return ()

    def _memcpyasync(self, to: int, source: int, size: int, kind: int, _: int) -> tuple[()]:
        assert kind in vars(self.cudaMemcpyKind).values()

        def copy() -> None:
            known = self._block(to, size)
            if known is None:  # an array of the caller's
                ctypes.memmove(to, self.at(source, size).ctypes.data, size)
            else:
                known[:] = self.at(source, size)

        return self.put(copy)

    def _streambegincapture(self, _: int, mode: int) -> tuple[()]:
        assert mode == 1
        assert not self._queue, "captured before earlier work was done"
        self.capturing = []
        return ()

    def _streamendcapture(self, _: int) -> tuple[Any]:
        work, self.capturing = self.capturing or [], None
        self.graphs[id(work)] = work
        return (work,)

    def _graphinstantiate(self, template: list[Work], _: int) -> tuple[Any]:
        handle = list(template)
        self.graphs[id(handle)] = handle
        return (handle,)

    def _graphlaunch(self, handle: list[Work], _: int) -> tuple[()]:
        assert id(handle) in self.graphs, "launched a graph that was given back"
        for work in handle:
            self.put(work)
        return ()

    def _graphdestroy(self, template: Any) -> tuple[()]:
        del self.graphs[id(template)]
        return ()

    _graphexecdestroy = _graphdestroy

    def _geterrorname(self, code: Code) -> tuple[bytes]:
        return (code.name.encode(),)

    _geterrorstring = _geterrorname


class DoubleDevice(CudaDevice):
    """A device over a double, which knows what is not given back."""

    def __init__(
        self, size: int = 1 << 22, *, cuda: CudaDouble | None = None, **options: Any
    ) -> None:
        self.cuda = cuda or CudaDouble(size, **options)
        self.calls, self.closed = self.cuda.calls, 0
        self.leaked: list[str] = []
        """What nobody had given back when the device was closed."""
        self._taken: dict[int, str] = {}
        super().__init__(runtime=self.cuda, devices=MACHINE)

    def allocate(self, size: int, purpose: str) -> int:
        address = super().allocate(size, purpose)
        if purpose != "a buffer for the host":  # which goes with the device
            self._taken[address] = purpose
        return address

    @property
    def live(self) -> list[str]:
        """What was taken and not given back."""
        memory = [self._taken[a] for a in self._memory & self._taken.keys()]
        return memory + ["graph"] * len(self._graphs)

    def close(self) -> None:
        self.leaked += [] if self.closed else self.live
        self.closed += 1
        super().close()
