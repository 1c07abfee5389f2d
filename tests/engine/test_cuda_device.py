"""The CUDA device: what it makes of a runtime's answers."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from specrt.engine.tensorrt.device import LOST as LOST_ERRORS
from specrt.engine.tensorrt.device import CudaDevice, install, lost
from specrt.errors import EngineError
from specrt.system import Survey
from support.cuda_double import MACHINE, Code, CudaDouble


def device(double: CudaDouble, device_id: int = 0) -> CudaDevice:
    return CudaDevice(device_id, runtime=double, devices=MACHINE)


def test_an_integrated_gpu_shares_memory_with_the_host() -> None:
    double = CudaDouble(integrated=True)
    staged = device(double).stage(8)
    staged.send()
    staged.fetch()
    assert staged.address in double.host
    assert not double.calls["cudaMemcpyAsync"]
    assert not device(CudaDouble(integrated=True, maps=False)).integrated


def test_too_little_memory_is_told_in_bytes() -> None:
    double = CudaDouble(1 << 30)
    one = device(double)
    wanted = r"KV buffers: 3\.00 GiB are needed and 1\.00 GiB of 1\.00 GiB are free.*max_length"
    with pytest.raises(EngineError, match=wanted):
        one.allocate(3 << 30, "KV buffers")
    assert double.calls["cudaGetLastError"], "the error is cleared"
    double.fail("cudaMemGetInfo")
    with pytest.raises(EngineError, match="less is free"):
        one.allocate(3 << 30, "KV buffers")
    double.fail("cudaHostAlloc", code=Code.cudaErrorMemoryAllocation)
    with pytest.raises(EngineError, match="pinned host memory"):
        one.stage(8)


def test_without_driver_or_device_nothing_is_opened() -> None:
    double = CudaDouble()
    with pytest.raises(EngineError, match="device 2 was asked for, and there is devices 0 to 1"):
        device(double, 2)
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU only: no NVIDIA driver"):
        CudaDevice(runtime=double, devices=Survey(problem="no NVIDIA driver"))
    assert not double.calls
    double.fail("cudaSetDevice", code=Code.cudaErrorInsufficientDriver)
    remedy = r"knows CUDA 13\.0: `pip install 'cuda-bindings==13\.\*'"
    with pytest.raises(EngineError, match=remedy):
        device(double)
    assert install((0, 0)) == "`pip install 'cuda-bindings'`"


def test_results_outlive_the_device() -> None:
    double = CudaDouble()
    one = device(double)
    view = one.stage(16).host[4:8].view(np.int32)
    view[:] = 7
    one.close()
    assert (len(double.host), view.tolist()) == (1, [7])
    del view
    assert double.host == {}


def test_each_thread_sets_the_device() -> None:
    double = CudaDouble()
    one = device(double, device_id=1)
    other = threading.Thread(target=one.allocate, args=(4, "y"))
    other.start()
    other.join()
    one.allocate(4, "x")
    assert double.calls["cudaSetDevice"] == 2


def test_the_double_has_nothing_that_cuda_has_not() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    ours = {"_done", "_block", "_take"}
    calls = {name for name in vars(CudaDouble) if name[0] == "_" != name[1]} - ours
    assert {f"cuda{name[1:]}" for name in calls} <= {name.lower() for name in dir(real)}
    assert set(LOST_ERRORS) | set(Code.__members__) <= set(real.cudaError_t.__members__)
    assert lost("In x (cudaError 700: y)")  # as TensorRT says it
