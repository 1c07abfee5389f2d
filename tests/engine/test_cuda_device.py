"""The CUDA device: what it asks of the runtime, and what it makes of the answers."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import numpy as np
import pytest

from specrt.engine.tensorrt import device as device_module
from specrt.engine.tensorrt.device import LOST as LOST_ERRORS
from specrt.engine.tensorrt.device import CudaDevice, install, lost
from specrt.errors import EngineError
from specrt.system import Survey
from support.cuda_double import ALWAYS, LOST, MACHINE, Code, CudaDouble


def device(double: CudaDouble, device_id: int = 0) -> CudaDevice:
    return CudaDevice(device_id, runtime=double, devices=MACHINE)


def test_a_discrete_gpu_copies_and_an_integrated_one_shares() -> None:
    double = CudaDouble()
    one = device(double)
    staged = one.stage(8)
    assert not one.integrated
    staged.host[:] = np.arange(8)
    staged.send()
    one.wait()
    assert double.memory[staged.address].tolist() == list(range(8))
    double.memory[staged.address][:] = 9
    staged.fetch()
    one.wait()
    assert staged.host.tolist() == [9] * 8
    shared = CudaDouble(integrated=True)
    jetson = device(shared)
    staged = jetson.stage(8)
    assert (jetson.integrated, shared.memory) == (True, {})
    assert staged.address == staged.host.ctypes.data
    assert shared.arguments["cudaHostAlloc"] == (8, shared.cudaHostAllocMapped)
    staged.send()
    staged.fetch()
    assert not shared.calls["cudaMemcpyAsync"]
    assert not device(CudaDouble(integrated=True, maps=False)).integrated


@pytest.mark.parametrize("code", [Code.cudaSuccess, Code.cudaErrorStreamCaptureInvalidated])
def test_a_capture_that_fails_is_ended(code: Code) -> None:
    double = CudaDouble()
    one = device(double)
    if code:
        double.fail("cudaStreamEndCapture", code=code)
    with pytest.raises(ZeroDivisionError), one.capture():
        raise ZeroDivisionError
    assert double.capturing is None
    assert double.graphs == {}
    double.fails.clear()
    with one.capture():
        pass


@pytest.mark.parametrize("name", ["cudaStreamEndCapture", "cudaGraphInstantiate"])
def test_a_graph_that_cannot_be_made_leaves_nothing(name: str) -> None:
    double = CudaDouble()
    one = device(double)
    double.fail(name)
    with pytest.raises(EngineError, match=r"cannot (end a capture|make a graph)"), one.capture():
        pass
    assert double.capturing is None
    assert double.graphs == {}


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


@pytest.mark.parametrize("name", sorted(DOINGS))
def test_every_failure_is_an_error_that_says_what_was_done(name: str) -> None:
    double = CudaDouble()
    one = device(double)
    double.fail(name)
    with pytest.raises(
        EngineError, match=r"^cannot .+: cudaErrorInvalidValue \(what the runtime says\)"
    ) as refused:
        DOINGS[name](one)
    assert "lost" not in str(refused.value)
    double.fail(name, code=LOST)
    with pytest.raises(EngineError, match=r"IllegalAddress.*the device is lost.*start it again"):
        DOINGS[name](one)


def test_a_driver_that_is_too_old_is_told_with_the_bindings_that_suit_it() -> None:
    double = CudaDouble()
    double.fail("cudaSetDevice", code=Code.cudaErrorInsufficientDriver)
    with pytest.raises(
        EngineError, match=r"knows CUDA 13\.0: `pip install 'cuda-bindings==13\.\*'"
    ):
        device(double)
    assert install((0, 0)) == "`pip install 'cuda-bindings'`"


def test_without_the_device_nothing_is_called() -> None:
    double = CudaDouble()
    with pytest.raises(EngineError, match="device 2 was asked for, and there is devices 0 to 1"):
        device(double, 2)
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU only: no NVIDIA driver"):
        CudaDevice(runtime=double, devices=Survey(problem="no NVIDIA driver"))
    assert not double.calls


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
    assert len(double.host) == 1
    assert view.tolist() == [7]
    del view
    assert double.host == {}


def test_each_thread_uses_the_same_device() -> None:
    double = CudaDouble()
    one = device(double, device_id=1)
    one.allocate(4, "x")
    other = threading.Thread(target=one.allocate, args=(4, "y"))
    other.start()
    other.join()
    assert (double.calls["cudaSetDevice"], double.arguments["cudaSetDevice"]) == (2, (1,))


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("Error Code 1: Cuda Runtime (an illegal memory access was encountered)", True),
        ("In x (cudaError 700: y)", True),
        ("Error Code 3: API Usage Error", False),
    ],
)
def test_a_lost_device_is_known_from_what_tensorrt_says(text: str, is_lost: bool) -> None:
    assert bool(lost(text)) is is_lost


def used() -> dict[str, list[int]]:
    """Return what a file takes from the runtime, and with how many arguments it is called."""
    found: dict[str, list[int]] = {}
    for node in ast.walk(ast.parse(Path(device_module.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("cuda") and node.attr != "cuda":
            found.setdefault(node.attr, [])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            at = VERBS.get(node.func.attr, len(node.args))
            for given in node.args[at : at + 1]:
                if isinstance(given, ast.Attribute):
                    found.setdefault(given.attr, []).append(len(node.args) - at - 1)
    return found


VERBS = {"ask": 1, "attempt": 0, "reserve": 2}
"""Where `Checked` is given the function; what follows are its arguments."""


def test_all_that_is_used_is_there() -> None:
    real = pytest.importorskip("cuda.bindings.runtime")
    places = (
        real, real.cudaError_t, real.cudaMemcpyKind, real.cudaDeviceAttr, real.cudaStreamCaptureMode
    )  # fmt: skip
    names = used()
    assert len(names) > 2
    for name, counts in names.items():
        assert any(hasattr(place, name) for place in places), name
        for count in counts:
            first = getattr(real, name).__doc__.strip().splitlines()[0]
            inside = first.partition("(")[2].rpartition(")")[0]
            assert count == len([part for part in inside.split(",") if part.strip()]), first
    assert set(LOST_ERRORS) <= set(real.cudaError_t.__members__)
