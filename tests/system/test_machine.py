"""What a machine is, as its files and its NVIDIA driver tell, whatever they tell."""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from specrt.system.gpu import Devices, Gpu, Survey, find_devices, survey
from specrt.system.machine import Machine, this_machine, vector_units
from specrt.system.memory import available_bytes

X86 = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Some Xeon @ 2.00GHz
flags\t\t: fpu avx2 avx512f amx_tile rdpid

processor\t: 1
model name\t: another
flags\t\t: sve
"""
ARM = "Features\t: fp asimd asimddp sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n"
LIBRARY = "onnxruntime 1.31.1"


def test_an_x86_processor_is_its_name_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(X86)
    machine = this_machine(LIBRARY, tmp_path)
    assert machine.cpu == "Some Xeon @ 2.00GHz, cpu family 6 model 143"
    assert machine.vector_units == vector_units(tmp_path) == "avx2, avx512f, amx_tile"
    assert (machine.accelerator, machine.library) == ("", LIBRARY)


def test_an_arm_board_is_its_parts_and_its_name_or_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM)
    (tmp_path / "device-tree").mkdir()
    (tmp_path / "device-tree" / "model").write_bytes(b"Some Board Developer Kit\0")
    machine = this_machine("", tmp_path)
    assert machine.cpu == "CPU implementer 0x41 CPU part 0xd42"
    assert machine.vector_units == "asimd, asimddp, sve"
    assert machine.accelerator == "Some Board Developer Kit"
    for number, name in enumerate(("Small GPU", "Large GPU")):
        folder = tmp_path / "driver/nvidia/gpus" / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
    assert this_machine("", tmp_path).accelerator == "Small GPU, Large GPU"


def test_every_difference_is_named() -> None:
    here = Machine("cpu", "avx2", 2, "", LIBRARY)
    for name in (field.name for field in fields(Machine)):
        other = replace(here, **{name: "else"})  # type: ignore[arg-type]
        difference = here.difference(other) or ""
        # The same machine may have another library, and lend fewer cores.
        elsewhere = name not in ("cores", "library")
        assert ("another machine" in difference) is elsewhere
        assert f"{name.replace('_', ' ')} " in difference or not elsewhere
        assert "not else" in difference
    assert here.difference(here) is None


@pytest.mark.parametrize(("most", "left"), [("1500000", 700000), ("max", 2 << 20), ("", 2 << 20)])
def test_the_kernel_or_a_control_group_limits_memory(tmp_path: Path, most: str, left: int) -> None:
    assert available_bytes(tmp_path / "meminfo", tmp_path) is None
    meminfo = "MemTotal:       24000000 kB\nMemFree:  10 kB\nMemAvailable:    2048 kB\n"
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "memory.max").write_text(most + "\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 7\ninactive_file 200000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == left


OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build\nGCC 11.4\n"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:54:38 UTC 2026\n"
VALUES = {"cuDriverGetVersion": 12060, "cuDeviceTotalMem_v2": 61 << 30}
ATTRIBUTES = {75: 8, 76: 7, 18: 1}
"""Major and minor of the capability and whether memory is shared, by their numbers in cuda.h."""


class Driver:
    """Answers like libcuda; calls that are refused answer a code."""

    def __init__(self, count: int, *refuse: str) -> None:
        self.count, self.refuse = count, refuse

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name in self.refuse:
                return 100
            if name == "cuDeviceGetName":
                given[0].value = b"Orin"
            elif name == "cuGetErrorString":
                given[1]._obj.value = b"no CUDA-capable device is detected"
            elif name == "cuDeviceGetAttribute":
                given[0]._obj.value = ATTRIBUTES[given[1]]
            elif name == "cuDeviceGetCount":
                given[0]._obj.value = self.count
            elif name == "cuDeviceGet":
                given[0]._obj.value = given[1]
            elif name != "cuInit":
                given[0]._obj.value = VALUES[name]
            return 0

        return call


ORIN = Gpu(0, "Orin", "8.7", 61 << 30, True)
TWO = (ORIN, replace(ORIN, id=1))
REFUSED = "the NVIDIA driver answers: no CUDA-capable device is detected"


@pytest.mark.parametrize(
    ("driver", "version", "found"),
    [
        (Driver(2), OPEN, Survey(TWO, "", (12, 6), "540.4.0")),
        (Driver(0), CLOSED, Survey((), "the NVIDIA driver knows no device", (12, 6), "580.65.06")),
        (Driver(1, "cuInit"), "NVRM version: x", Survey((), REFUSED, (12, 6))),
        (Driver(1, "cuDeviceGet", "cuDriverGetVersion"), "", Survey((Gpu(0, "unknown"),))),
        (Driver(1, "cuDeviceGetAttribute", "cuDeviceTotalMem_v2"), "",
         Survey((Gpu(0, "Orin"),), "", (12, 6))),
    ],
)  # fmt: skip
def test_what_the_driver_tells_is_told_and_the_rest_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: Driver, version: str, found: Survey
) -> None:
    if version:
        (tmp_path / "driver" / "nvidia").mkdir(parents=True)
        (tmp_path / "driver" / "nvidia" / "version").write_text(version, encoding="utf-8")
    absent = "no NVIDIA driver: libthere-is-none.so is not there"
    assert find_devices("libthere-is-none.so") == Devices((), absent)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert survey(proc=tmp_path) == found
    assert find_devices() == Devices(tuple(gpu.name for gpu in found.gpus), found.problem)
    assert found.lacks() == found.problem
    if not found.problem:
        there = "devices 0 to 1" if len(found.gpus) == 2 else "device 0 alone"
        assert found.lacks(2) == f"device 2 was asked for, and there is {there}"
