"""NVIDIA GPUs and their driver, asked by the driver's own library."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")

DRIVER = "libcuda.so.1"

_NAME_BYTES = 256

_INTEGRATED, _MAJOR, _MINOR = 18, 75, 76
"""CU_DEVICE_ATTRIBUTE_INTEGRATED, _COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


@dataclass(frozen=True)
class Devices:
    """The NVIDIA devices of this machine by name, and why there are none where there are none."""

    names: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA device; what is not known is 0 or empty."""

    id: int
    name: str
    capability: str = ""
    """The compute capability, as in `8.7`."""
    memory_bytes: int = 0
    integrated: bool = False
    """Whether it shares its memory with the processor, as on a Jetson."""


@dataclass(frozen=True)
class Survey:
    """The devices and versions of the driver, or why there are none."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA the driver knows."""
    driver: str = ""
    """The version of the driver, as in `580.65.06`."""

    def lacks(self, device_id: int = 0) -> str:
        """Return why a device cannot be used; empty where it is there."""
        if self.problem:
            return self.problem
        if not 0 <= device_id < len(self.gpus):
            count = len(self.gpus)
            known = "devices 0 to " + str(count - 1) if count > 1 else "device 0 alone"
            return f"device {device_id} was asked for, and there is {known}"
        return ""


def find_devices(driver: str = DRIVER) -> Devices:
    """Ask the driver for its devices; the engine libraries only log why they found none."""
    devices = survey(driver)
    return Devices(tuple(gpu.name for gpu in devices.gpus), devices.problem)


def survey(driver: str = DRIVER, proc: Path = _PROC) -> Survey:
    """Ask the driver for its devices and what they are."""
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return Survey(problem=f"no NVIDIA driver: {driver} is not there")
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    problem, gpus = "", tuple[Gpu, ...]()
    if code:
        problem = f"the NVIDIA driver answers: {_driver_reason(library, code)}"
    elif not count.value:
        problem = "the NVIDIA driver knows no device"
    else:
        gpus = tuple(_describe_gpu(library, index) for index in range(count.value))
    return Survey(gpus, problem, _newest_cuda(library), driver_version(proc))


def driver_version(proc: Path = _PROC) -> str:
    """Return the version of the kernel's NVIDIA driver; empty where there is none."""
    try:
        text = (proc / "driver" / "nvidia" / "version").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\b", text)
    return match.group(1) if match else ""


def _driver_reason(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"").decode(errors="replace") or f"error {code}"


def _newest_cuda(library: Any) -> tuple[int, int]:
    version = ctypes.c_int()
    if _driver_call(library, "cuDriverGetVersion", ctypes.byref(version)):
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _describe_gpu(library: Any, index: int) -> Gpu:
    device, name, memory = (
        ctypes.c_int(),
        ctypes.create_string_buffer(_NAME_BYTES),
        ctypes.c_size_t(),
    )
    if library.cuDeviceGet(ctypes.byref(device), index):
        return Gpu(index, "unknown")
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    _driver_call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    major, minor, shared = (
        _device_attribute(library, device, which) for which in (_MAJOR, _MINOR, _INTEGRATED)
    )
    return Gpu(
        id=index,
        name=name.value.decode(errors="replace") or "unknown",
        capability=f"{major}.{minor}" if major else "",
        memory_bytes=memory.value,
        integrated=bool(shared),
    )


def _device_attribute(library: Any, device: Any, which: int) -> int:
    value = ctypes.c_int()
    code = _driver_call(library, "cuDeviceGetAttribute", ctypes.byref(value), which, device)
    return 0 if code else value.value


def _driver_call(library: Any, name: str, *arguments: Any) -> int:
    """Call a function of the driver; a library without it answers as one that failed."""
    function = getattr(library, name, None)
    return -1 if function is None else int(function(*arguments))
