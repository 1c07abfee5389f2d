"""Which NVIDIA devices answer, asked of the driver itself."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

DRIVER = "libcuda.so.1"
_NAME_BYTES = 256


@dataclass(frozen=True)
class Devices:
    """The NVIDIA devices of this machine by name, and why there are none where there are none."""

    names: tuple[str, ...] = ()
    problem: str = ""


def find_devices(driver: str = DRIVER) -> Devices:
    """Ask the driver for its devices; the engine libraries only log why they found none."""
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return Devices(problem=f"no NVIDIA driver: {driver} is not there")
    count = ctypes.c_int()
    code = library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return Devices(problem=f"the NVIDIA driver answers: {_reason(library, code)}")
    if not count.value:
        return Devices(problem="the NVIDIA driver knows no device")
    return Devices(tuple(_name(library, index) for index in range(count.value)))


def _reason(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"").decode(errors="replace") or f"error {code}"


def _name(library: Any, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    if library.cuDeviceGet(ctypes.byref(device), index):
        return "unknown"
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    return name.value.decode(errors="replace") or "unknown"
