"""A CUDA runtime of plain host memory: answers like `cuda.bindings.runtime`, fails on request."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from specrt.system import Gpu, Survey

MACHINE = Survey((Gpu(0, "A GPU", "8.9", 8 << 30), Gpu(1, "B GPU", "8.9", 8 << 30)), "", (13, 0))


class Code(IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorInsufficientDriver = 35  # noqa: N815
    cudaErrorIllegalAddress = 700  # noqa: N815
    cudaErrorStreamCaptureInvalidated = 901  # noqa: N815


class CudaDouble:
    """What is put on the stream runs at once, or is kept while a capture is on."""

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

    def __init__(self, integrated: bool = False, maps: bool = True) -> None:
        self.attributes = {"integrated": int(integrated), "maps": int(maps)}
        self.fail: dict[str, Code] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.memory: dict[int, Any] = {}
        self.host: dict[int, Any] = {}
        self.graphs: set[int] = set()
        self.capturing: list[Callable[[], object]] | None = None
        self.streams = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        method = getattr(type(self), "_" + name[4:].lower(), None)
        if method is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.fail:
                self._endcapture() if name == "cudaStreamEndCapture" else None
                answers = 1 if name.startswith(("cudaMemcpy", "cudaMemset", "cudaFree")) else 2
                return (self.fail[name], None, None)[:answers]
            found = method(self, *arguments)
            return (Code.cudaSuccess, *found)

        return call

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def _put(self, work: Callable[[], object]) -> tuple[()]:
        work() if self.capturing is None else self.capturing.append(work)
        return ()

    def _taken(self, size: int, where: dict[int, Any]) -> tuple[int]:
        array = np.full(size, 255, np.uint8)
        where[array.ctypes.data] = array
        return (array.ctypes.data,)

    def _setdevice(self, _: int) -> tuple[()]:
        return ()

    def _devicegetattribute(self, which: str, _: int) -> tuple[int]:
        return (self.attributes[which],)

    def _streamcreatewithflags(self, _: int) -> tuple[int]:
        self.streams += 1
        return (77,)

    def _streamdestroy(self, _: int) -> tuple[()]:
        self.streams -= 1
        return ()

    def _streamsynchronize(self, _: int) -> tuple[()]:
        return ()

    def _memgetinfo(self) -> tuple[int, int]:
        return 1 << 30, 8 << 30

    def _getlasterror(self) -> tuple[()]:
        return ()

    def _malloc(self, size: int) -> tuple[int]:
        return self._taken(size, self.memory)

    def _hostalloc(self, size: int, _: int) -> tuple[int]:
        return self._taken(size, self.host)

    def _hostgetdevicepointer(self, pointer: int, _: int) -> tuple[int]:
        return (pointer,)

    def _free(self, pointer: int) -> tuple[()]:
        del self.memory[pointer]
        return ()

    def _freehost(self, pointer: int) -> tuple[()]:
        del self.host[pointer]
        return ()

    def _memsetasync(self, to: int, value: int, size: int, _: int) -> tuple[()]:
        return self._put(lambda: ctypes.memset(to, value, size))

    def _memcpyasync(self, to: int, source: int, size: int, kind: int, _: int) -> tuple[()]:
        assert kind in vars(self.cudaMemcpyKind).values()
        return self._put(lambda: ctypes.memmove(to, source, size))

    def _streambegincapture(self, _: int, mode: int) -> tuple[()]:
        assert mode == 1
        self.capturing = []
        return ()

    def _endcapture(self) -> list[Callable[[], object]]:
        work, self.capturing = self.capturing or [], None
        return work

    def _streamendcapture(self, _: int) -> tuple[Any]:
        work = self._endcapture()
        self.graphs.add(id(work))
        return (work,)

    def _graphinstantiate(self, template: Any, _: int) -> tuple[Any]:
        handle = list(template)
        self.graphs.add(id(handle))
        return (handle,)

    def _graphlaunch(self, handle: Any, _: int) -> tuple[()]:
        for work in handle:
            work()
        return ()

    def _graphdestroy(self, template: Any) -> tuple[()]:
        self.graphs.remove(id(template))
        return ()

    def _graphexecdestroy(self, handle: Any) -> tuple[()]:
        self.graphs.remove(id(handle))
        return ()

    def _geterrorname(self, code: Code) -> tuple[bytes]:
        return (code.name.encode(),)

    def _geterrorstring(self, code: Code) -> tuple[bytes]:
        return (b"what the runtime says",)
