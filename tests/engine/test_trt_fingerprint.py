"""What keeps a plan from running on this machine is said precisely, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.test_trt_library import module_like
from specrt.engine.tensorrt.engine_record import DeviceRecord, difference, remark, this_device
from specrt.engine.tensorrt.library import FLAVOURS, describe
from specrt.errors import EngineError
from specrt.system import Gpu, Survey

TRT = DeviceRecord("tensorrt", "10.13.3.9", "NVIDIA H200", ("9.0",), "580.65.06")
RTX = DeviceRecord("tensorrt-rtx", "1.7.1.116", "NVIDIA RTX 4090", ("8.9",), "580.65.06")
AHEAD = replace(RTX, gpu="", capabilities=(), driver="")


@pytest.mark.parametrize(
    ("built", "here", "said"),
    [
        (TRT, TRT, ""),
        (TRT, replace(TRT, driver="575.1"), ""),
        (TRT, replace(TRT, version="10.13.3"), ""),
        (TRT, replace(TRT, version="10.13.3.10"), "by TensorRT 10.13.3.9, and here is 10.13.3.10"),
        (TRT, replace(TRT, version="10.14.1"), "by TensorRT 10.13.3.9, and here is 10.14.1"),
        (replace(TRT, newer_versions=True), replace(TRT, version="11.0.0.1"), ""),
        (replace(TRT, newer_versions=True), replace(TRT, version="10.12.0.1"), "and here is 10.12"),
        (
            TRT,
            replace(TRT, gpu="Orin", capabilities=("8.7",)),
            "built on NVIDIA H200 of compute capability 9.0, and Orin has 8.7",
        ),
        (TRT, replace(TRT, gpu="NVIDIA H100"), "built on NVIDIA H200, and here is NVIDIA H100"),
        (replace(TRT, hardware="same-capability"), replace(TRT, gpu="NVIDIA H100"), ""),
        (
            replace(TRT, hardware="same-capability"),
            replace(TRT, gpu="B200", capabilities=("10.0",)),
            "B200 has 10.0",
        ),
        (
            replace(TRT, hardware="ampere+"),
            replace(TRT, gpu="B200", capabilities=("10.0",)),
            "",
        ),
        (
            replace(TRT, hardware="ampere+"),
            replace(TRT, gpu="T4", capabilities=("7.5",)),
            "for compute capability 8.0 and later, and T4 has 7.5",
        ),
        (TRT, RTX, "a plan of TensorRT 10.13.3.9, and TensorRT for RTX 1.7.1.116 was asked"),
        (AHEAD, RTX, ""),
        (AHEAD, replace(RTX, version="1.7.1.120"), ""),
        (AHEAD, replace(RTX, version="1.8.0.1"), "by TensorRT for RTX 1.7.1.116, and here is 1.8"),
        (AHEAD, replace(RTX, version="1.6.1.120"), "and here is 1.6.1.120"),
        (AHEAD, replace(RTX, gpu="RTX 5090", capabilities=("12.0",)), ""),
        (
            AHEAD,
            replace(RTX, gpu="T4", capabilities=("7.5",)),
            "for compute capability 8.0 and later, and T4 has 7.5",
        ),
        (replace(AHEAD, capabilities=("7.5", "8.9")), RTX, ""),
        (
            replace(AHEAD, capabilities=("7.5", "12.0")),
            RTX,
            "for compute capability 7.5, 12.0, and NVIDIA RTX 4090 has 8.9",
        ),
        (AHEAD, replace(RTX, capabilities=()), ""),
    ],
)
def test_what_differs_is_said_with_the_command_that_rebuilds(
    built: DeviceRecord, here: DeviceRecord, said: str
) -> None:
    found = difference(built, here)
    assert bool(found) is bool(said)
    assert said in found
    assert "\n" not in found
    if said:
        assert found.endswith(f"`specrt build RECIPE --backend {here.backend}`")


def test_what_does_not_matter_is_a_remark() -> None:
    assert remark(TRT, TRT) == ""
    assert remark(AHEAD, RTX) == ""
    other = replace(TRT, driver="575.1", gpu="NVIDIA H100")
    assert "driver 580.65.06, here is 575.1" in remark(TRT, other)
    assert "chosen on NVIDIA H200, here is NVIDIA H100" in remark(TRT, other)


def test_a_machine_has_the_record_of_its_gpu() -> None:
    library = describe(FLAVOURS["tensorrt"], module_like("10.13.3.9"))
    found = Survey((Gpu(0, "NVIDIA H200", "9.0", 1 << 37),), "", (13, 0), "580.65.06")
    assert this_device(library, devices=found) == TRT
    with pytest.raises(EngineError, match="device 1 was asked for, and there is device 0 alone"):
        this_device(library, 1, found)
    with pytest.raises(EngineError, match="GPU only: no driver"):
        this_device(library, devices=Survey(problem="no driver"))
