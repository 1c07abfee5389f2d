"""How fast the GPU moves memory: what a decode pass, which reads every weight, is held to."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter_ns
from typing import Any

from gpucheck.place import Place
from gpucheck.step import Facts, NotRunError

LEAST_BYTES, WANTED_BYTES = 64 << 20, 2 << 30
COPIES, LAPS = 8, 9


def bandwidth(place: Place, backend: str = "") -> Facts:
    """Copy from device memory to device memory."""
    device = open_device()
    try:
        free, total = device.available()
        size = min(WANTED_BYTES, free // 4)
        if size < LEAST_BYTES:
            raise NotRunError(
                f"{free >> 20} MiB of the GPU's {total >> 20} are free, too few to tell"
            )
        return {**copy_rate(device, size), "free_bytes": free, "total_bytes": total}
    finally:
        device.close()


def open_device() -> Any:
    """Open the GPU.

    Raises: NotRunError where the CUDA bindings are missing.
    """
    from specrt.engine.tensorrt.cuda import CudaDevice, cuda_bindings
    from specrt.errors import EngineError

    try:
        cuda_bindings()
    except EngineError as error:
        raise NotRunError(str(error)) from error
    return CudaDevice()


def copy_rate(device: Any, size: int, clock: Callable[[], int] = perf_counter_ns) -> Facts:
    """Return bytes moved in a second, each byte counted when it is read and when it is written.

    Several copies go onto the stream before the host waits, so that waiting is a small part.
    """
    here, there = (device.allocate(size, "a copy to time") for _ in range(2))
    rates = []
    for _ in range(1 + LAPS):
        device.wait()
        began = clock()
        for _ in range(COPIES):
            device.copy(there, here, size)
        device.wait()
        rates.append(2 * size * COPIES / max(clock() - began, 1) * 1e9)
    device.free(there)
    device.free(here)
    rates = rates[1:]  # the first warms up
    return {
        "bytes_per_second": round(median(rates)),
        "lowest": round(min(rates)),
        "highest": round(max(rates)),
        "copied_bytes": size,
        "copies": COPIES,
        "laps": LAPS,
    }
