"""The CUDA device: what it asks of the runtime, and what it makes of the answers."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest

from specrt.engine.tensorrt.device import LOST as LOST_ERRORS
from specrt.engine.tensorrt.device import CudaDevice, install, lost
from specrt.errors import EngineError
from specrt.system import Survey
from support.cuda_double import ALWAYS, LOST, MACHINE, Code, CudaDouble


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


@pytest.mark.parametrize("call", ["", "cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_capture_that_fails_is_ended_and_leaves_nothing(call: str) -> None:
    double = CudaDouble()
    one = device(double)
    double.fail(call, ALWAYS, Code.cudaErrorStreamCaptureInvalidated)
    with pytest.raises(ZeroDivisionError), one.capture():
        raise ZeroDivisionError
    if call:
        words = "cannot (end a capture|make a graph)"
        with pytest.raises(EngineError, match=words), one.capture():
            pass
    assert (double.capturing, double.graphs) == (None, {})
    double.fails.clear()
    with one.capture():
        pass


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


DOINGS = {
    "cudaMemsetAsync": lambda one: one.allocate(4, "x"),
    "cudaMemcpyAsync": lambda one: one.copy(1, 2, 3),
    "cudaStreamSynchronize": lambda one: one.wait(),
    "cudaStreamBeginCapture": lambda one: one.capture().__enter__(),
    "cudaMemGetInfo": lambda one: one.available(),
    "cudaGraphLaunch": lambda one: one.launch([]),
}


@pytest.mark.parametrize("name", DOINGS)
def test_every_failure_is_an_error_that_says_what_was_done(name: str) -> None:
    double = CudaDouble()
    one = device(double)
    for code, said in (
        (Code.cudaErrorInvalidValue, "^cannot .+: cudaErrorInvalidValue .*; `specrt doctor`"),
        (LOST, "IllegalAddress.*the device is lost.*start it again"),
    ):
        double.fail(name, code=code)
        with pytest.raises(EngineError, match=said):
            DOINGS[name](one)


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


@pytest.mark.parametrize("is_lost", [False, True])
def test_closing_twice_gives_all_back_even_from_a_lost_device(is_lost: bool) -> None:
    double = CudaDouble()
    one = device(double)
    one.allocate(4, "x")
    one.stage(4)
    with one.capture():
        pass
    if is_lost:
        double.fail("cudaStreamSynchronize", ALWAYS, LOST)
    one.close()
    assert (double.memory, double.host, double.graphs, double.streams) == ({}, {}, {}, 0)
    before = double.calls.copy()
    one.close()
    assert double.calls == before


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


def test_a_lost_device_is_known_from_what_tensorrt_says() -> None:
    assert lost("Error Code 1: Cuda Runtime (an illegal memory access was encountered)")
    assert lost("In x (cudaError 700: y)")
    assert not lost("Error Code 3: API Usage Error")


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
