"""What is asked of the driver, in the numbers of its own header, and what it answers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from specrt import system as cuda
from specrt.system import Devices, Gpu, Survey, driver_version, find_devices, survey

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu)\n"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:54:38 UTC 2026\n"


class Driver:
    """Answers like libcuda."""

    def __init__(self, count: int = 1, refuse: tuple[str, ...] = ()) -> None:
        self.count, self.refuse = count, refuse

    def _answer(self, name: str, place: Any, value: Any) -> int:
        if name in self.refuse:
            return 999
        place._obj.value = value
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 100 if "cuInit" in self.refuse else 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        return self._answer("cuDeviceGetCount", count, self.count)

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        return self._answer("cuDriverGetVersion", version, 12060)

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        return self._answer("cuDeviceGet", device, index)

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"Orin"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        return self._answer("cuDeviceTotalMem_v2", memory, 61 << 30)

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:  # noqa: N802
        return self._answer("cuDeviceGetAttribute", value, {75: 8, 76: 7, 18: 1}[which])

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"no CUDA-capable device is detected"
        return 0


def surveyed(monkeypatch: pytest.MonkeyPatch, driver: Any, proc: Path) -> Survey:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    return survey(proc=proc)


def test_a_gpu_is_told_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(OPEN, encoding="utf-8")
    gpus = tuple(Gpu(at, "Orin", "8.7", 61 << 30, True) for at in range(2))
    found = surveyed(monkeypatch, Driver(2), tmp_path)
    assert found == Survey(gpus, "", (12, 6), "540.4.0")
    assert find_devices() == Devices(("Orin", "Orin"))
    assert found.lacks(1) == ""
    assert found.lacks(2) == "device 2 was asked for, and there is devices 0 to 1"


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (Driver(0), Survey(problem="the NVIDIA driver knows no device", cuda=(12, 6))),
        (
            Driver(refuse=("cuInit",)),
            Survey(
                problem="the NVIDIA driver answers: no CUDA-capable device is detected",
                cuda=(12, 6),
            ),
        ),
        (Driver(refuse=("cuDeviceGet", "cuDriverGetVersion")), Survey((Gpu(0, "unknown"),))),
        (
            Driver(refuse=("cuDeviceGetAttribute", "cuDeviceTotalMem_v2")),
            Survey((Gpu(0, "Orin"),), cuda=(12, 6)),
        ),
    ],
)
def test_what_is_not_told_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Driver, found: Survey
) -> None:
    assert surveyed(monkeypatch, driver, tmp_path) == found
    assert bool(found.lacks()) is bool(found.problem)


@pytest.mark.parametrize(
    ("text", "version"),
    [(OPEN, "540.4.0"), (CLOSED, "580.65.06"), ("NVRM version: x", ""), ("", "")],
)
def test_the_driver_has_a_version(tmp_path: Path, text: str, version: str) -> None:
    assert driver_version(tmp_path) == ""
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(text, encoding="utf-8")
    assert driver_version(tmp_path) == version


def test_the_numbers_are_those_of_the_header() -> None:
    attributes = pytest.importorskip("cuda.bindings.driver").CUdevice_attribute
    assert cuda._INTEGRATED == attributes.CU_DEVICE_ATTRIBUTE_INTEGRATED
    assert cuda._MAJOR == attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert cuda._MINOR == attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
