"""The CUDA device: what it makes of a runtime's answers."""

from __future__ import annotations

import inspect
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


def test_a_discrete_gpu_copies_and_an_integrated_one_shares() -> None:
    double, shared = CudaDouble(), CudaDouble(integrated=True)
    for cuda in (double, shared):
        one = device(cuda)
        assert one.integrated is (cuda is shared)
        staged = one.stage(8)
        staged.host[:] = np.arange(8)
        staged.send()
        one.wait()
        place = cuda.host if one.integrated else cuda.memory
        assert place[staged.address].tolist() == list(range(8))
        place[staged.address][:] = 9
        staged.fetch()
        one.wait()
        assert staged.host.tolist() == [9] * 8
    assert not shared.calls["cudaMemcpyAsync"]
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
    """Every name, and every call with as many arguments."""
    real = pytest.importorskip("cuda.bindings.runtime")
    functions = {name[4:].lower(): name for name in dir(real) if name.startswith("cuda")}
    for name, own in vars(CudaDouble).items():
        if name.startswith("cuda") and not isinstance(own, int):
            kinds = vars(own) if name != "cudaError_t" else own.__members__
            assert all(hasattr(getattr(real, name), kind) for kind in kinds)
        elif name[1:] in functions:
            first = getattr(real, functions[name[1:]]).__doc__.strip().splitlines()[0]
            taken = first.partition("(")[2].rpartition(")")[0].split(",")
            assert len(inspect.signature(own).parameters) - 1 == len(list(filter(None, taken)))
    assert set(LOST_ERRORS) <= set(real.cudaError_t.__members__)
    assert lost("In x (cudaError 700: y)")  # as TensorRT says it
