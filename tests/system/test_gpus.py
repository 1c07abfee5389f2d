"""What is asked of the NVIDIA driver, in the numbers of its own header, and what it answers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from specrt import system
from specrt.system import Devices, Gpu, Survey, driver_version, find_devices, survey

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build\n"
    "GCC version:  gcc version 11.4.0 (Ubuntu)\n"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:54:38 UTC 2026\n"
VALUES = {"cuDriverGetVersion": 12060, "cuDeviceTotalMem_v2": 61 << 30}
ATTRIBUTES = {75: 8, 76: 7, 18: 1}


class Driver:
    """Answers like libcuda; calls that are refused answer a code."""

    def __init__(self, count: int = 1, refuse: tuple[str, ...] = ()) -> None:
        self.count, self.refuse = count, refuse

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name in self.refuse:
                return 100
            place = given[0] if given else None
            if name == "cuDeviceGetName":
                given[0].value = b"Orin"
            elif name == "cuGetErrorString":
                given[1]._obj.value = b"no CUDA-capable device is detected"
            elif name == "cuDeviceGetAttribute":
                place._obj.value = ATTRIBUTES[given[1]]
            elif name == "cuDeviceGetCount":
                place._obj.value = self.count
            elif name == "cuDeviceGet":
                place._obj.value = given[1]
            elif name in VALUES:
                place._obj.value = VALUES[name]
            else:
                assert name == "cuInit"
            return 0

        return call


@pytest.mark.parametrize(
    ("driver", "found"),
    [
        (Driver(2), Survey(tuple(Gpu(at, "Orin", "8.7", 61 << 30, True) for at in range(2)), "",
                           (12, 6), "540.4.0")),
        (Driver(0), Survey((), "the NVIDIA driver knows no device", (12, 6), "540.4.0")),
        (Driver(refuse=("cuInit",)),
         Survey((), "the NVIDIA driver answers: no CUDA-capable device is detected", (12, 6),
                "540.4.0")),
        (Driver(refuse=("cuDeviceGet", "cuDriverGetVersion")),
         Survey((Gpu(0, "unknown"),), driver="540.4.0")),
        (Driver(refuse=("cuDeviceGetAttribute", "cuDeviceTotalMem_v2")),
         Survey((Gpu(0, "Orin"),), "", (12, 6), "540.4.0")),
    ],
)  # fmt: skip
def test_what_the_driver_tells_is_told_and_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Driver, found: Survey
) -> None:
    (tmp_path / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "driver" / "nvidia" / "version").write_text(OPEN, encoding="utf-8")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert survey(proc=tmp_path) == found
    assert find_devices() == Devices(tuple(gpu.name for gpu in found.gpus), found.problem)
    assert found.lacks() == found.problem
    if not found.problem:
        there = "devices 0 to 1" if len(found.gpus) == 2 else "device 0 alone"
        assert found.lacks(2) == f"device 2 was asked for, and there is {there}"


def test_a_machine_without_a_driver_has_no_devices() -> None:
    problem = "no NVIDIA driver: libthere-is-none.so is not there"
    assert find_devices("libthere-is-none.so") == Devices((), problem)


def test_the_driver_has_a_version(tmp_path: Path) -> None:
    assert driver_version(tmp_path) == ""
    place = tmp_path / "driver" / "nvidia"
    place.mkdir(parents=True)
    for text, version in (CLOSED, "580.65.06"), ("NVRM version: x", ""):
        (place / "version").write_text(text, encoding="utf-8")
        assert driver_version(tmp_path) == version


def test_the_numbers_are_those_of_the_header() -> None:
    attributes = pytest.importorskip("cuda.bindings.driver").CUdevice_attribute
    assert system._INTEGRATED == attributes.CU_DEVICE_ATTRIBUTE_INTEGRATED
    assert system._MAJOR == attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert system._MINOR == attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
