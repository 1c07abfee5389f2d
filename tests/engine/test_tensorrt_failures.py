"""A CUDA device and its failures: an error each that says what was done, and nothing leaked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from specrt.engine.protocol import cuda_graphs
from specrt.engine.tensorrt.device import LOST as LOST_ERRORS
from specrt.engine.tensorrt.device import CudaDevice, lost
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from specrt.system.gpu import Survey
from support.gpu_double import (
    LOST,
    MACHINE,
    PREFILL,
    Code,
    CudaDouble,
    DoubleDevice,
    Pair,
    draft_profiles,
    opened,
    record_of,
)
from support.toy import TableEngine

LENGTH = 64
CALLS = (
    "cudaMalloc", "cudaMemsetAsync", "cudaHostAlloc", "cudaMemcpyAsync", "cudaGraphLaunch",
    "cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate",
    "cudaStreamSynchronize", "create_execution_context", "set_optimization_profile_async",
    "set_input_shape", "set_tensor_address", "execute_async_v3",
)  # fmt: skip
WORDS = r"^(cannot |profile \d+ of nowhere/engine\.plan )"
"""How every error begins: with what was being done."""
FIRST = [[1, 2, 3, 4, 5]]
DRAFT = draft_profiles(PREFILL)


def toy() -> TableEngine:
    return TableEngine(5, max_length=LENGTH)


def ready(**options: Any) -> Pair:
    """Return a pair that has read a prompt."""
    pair = Pair(toy(), toy(), candidates=3, **options)
    for engine in (pair.target, pair.draft):
        engine.forward(FIRST, 0, 1)
    return pair


def work(device: DoubleDevice) -> list[str]:
    """Do a bit of everything, and return why passes were not captured."""
    made: list[Any] = []
    try:
        made.append(target := opened(device, toy(), candidates=3))
        made.append(draft := opened(device, toy(), DRAFT, candidates=3, confidence=True))
        made.append(rounds := CapturedRounds(target, draft))
        for engine in (target, draft):
            engine.forward(FIRST, 0, 1)
        for _ in range(2):
            drafted = rounds.run([5], 4, 5, 4, 2)
            target.forward([[5, *drafted.tokens]], 4).logits.sum()
            target.forward([[1]], 5).logits.sum()
            draft.forward([[1]], 5, 1)
        target.forward([[1, 2, 3]], 6)
        graphs = cuda_graphs(target, draft, rounds)
        assert graphs is not None
        return list(graphs.refusals)
    except EngineError:
        for engine in made[:2] if device.cuda.lost else ():  # nothing answers again
            for width in (1, 3, 5):
                with pytest.raises(EngineError):
                    engine.forward([[1] * width], 0, 1)
        raise
    finally:
        for one in made[1:] + made[:1]:  # the draft first
            one.close()


@pytest.mark.parametrize("code", [Code.cudaErrorInvalidValue, LOST], ids=["refused", "lost"])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_fails_is_an_error_and_everything_is_given_back(call: str, code: Code) -> None:
    device = DoubleDevice()
    assert work(device) == device.live == []
    count = device.calls[call] - 3 * (call == "cudaStreamSynchronize")  # closing forgives
    said = "the device is lost to this process: start it again" if code == LOST else (
        "`specrt doctor` tells" if call.startswith("cuda") else f"Error Code 1: {call} is refused"
    )  # fmt: skip
    for n in sorted({1, 2, count // 2, count} & set(range(1, count + 1))):
        device = DoubleDevice()
        device.cuda.fail(call, n - device.calls[call], code)
        try:
            (message, *_) = work(device)
        except EngineError as error:
            message = str(error)
            with pytest.raises(EngineError, match=WORDS):
                raise
        else:  # only what fails inside a capture can be spared
            assert "run kernel by kernel: " in message
            assert code != LOST
        assert said in message
        assert "and more" not in message
        assert device.live == []


@pytest.mark.parametrize(
    ("call", "gamma"),
    [("execute_async_v3", 0), ("cudaMemcpyAsync", 3), ("cudaStreamSynchronize", 2)],
)
def test_a_failed_pass_ends_its_engine_and_a_failed_round_both(call: str, gamma: int) -> None:
    """The device answers again, but what was written is not known."""
    pair = ready()
    done = pair.rounds.run([5], 4, 5, 4, 2)
    pair.device.cuda.fail(call)
    failing: Callable[[], object] = partial(pair.target.forward, [[1] * 4], 3)
    if gamma:  # work of a new one stays on the stream
        failing = partial(pair.rounds.run, [5], 4, 5, 4, gamma)
    with pytest.raises(EngineError, match=WORDS):
        failing()
    refused: list[Callable[[], object]] = [
        lambda: pair.target.forward([[5, *done.tokens]], 4),
        lambda: pair.rounds.run([5], 4, 5, 4, 2),
    ]
    if gamma:
        refused.append(lambda: pair.draft.forward([[5]], 4, 1))
    for work in refused * 2:
        with pytest.raises(EngineError, match=r"earlier pass failed .*open the bundle again"):
            work()
    pair.close()


def test_a_pass_without_a_profile_names_those_there_are() -> None:
    engine = opened(DoubleDevice(), toy())
    with pytest.raises(
        EngineError,
        match=r"16 scored rows \(gamma 15; the nearest built: 4 and 8\); there are .* 'decode' of "
        "width 1 and rows 1, .*build the bundle with",
    ):
        engine.forward([[1] * 16], 0, 16)
    kept = engine.forward([[1]], 0)
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        _ = kept.logits


@pytest.mark.parametrize(
    ("message", "told", "made"),
    [
        (r"key\.0 as input .* of float16, .* of float32", {"compute": "fp32"}, {}),
        ("form ring", {"form": "ring"}, {}),
        (r"candidates\.values as output \[1, -1, 4\]", {"candidates": 8}, {}),
        (r"no tensor candidates", {}, {"candidates": 0}),
    ],
)  # fmt: skip
def test_a_plan_of_another_model_is_refused(
    message: str, told: dict[str, Any], made: dict[str, Any]
) -> None:
    device, own = DoubleDevice(), {"confidence": True, "candidates": 4}
    record = record_of(DRAFT, **{**own, **told})
    options = {"backend": "tensorrt-rtx", **own, **made}  # the library that knows aliases
    with pytest.raises(EngineError, match=f"{message}.*build the bundle again"):
        opened(device, toy(), DRAFT, record=record, **options)
    assert device.live == []


# The device itself


def test_without_driver_or_device_nothing_is_opened() -> None:
    double = CudaDouble()
    with pytest.raises(EngineError, match="device 2 was asked for, and there is devices 0 to 1"):
        CudaDevice(2, runtime=double, devices=MACHINE)
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU only: no NVIDIA driver"):
        CudaDevice(runtime=double, devices=Survey(problem="no NVIDIA driver"))
    assert not double.calls
    double.fail("cudaSetDevice", code=Code.cudaErrorInsufficientDriver)
    remedy = r"knows CUDA 13\.0: `pip install 'cuda-bindings==13\.\*'"
    with pytest.raises(EngineError, match=remedy):
        CudaDevice(runtime=double, devices=MACHINE)


def test_each_thread_sets_the_device() -> None:
    double = CudaDouble()
    one = CudaDevice(1, runtime=double, devices=MACHINE)
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
