"""Failures of a device: an error each that says what was done, never a number, nothing leaked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest

from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError
from support.cuda_double import ALWAYS, LOST, Code, DoubleDevice
from support.tensorrt_double import PREFILL, double_of, draft_profiles, opened, record_of
from support.toy import TableEngine

LENGTH = 64
CALLS = (
    "cudaMalloc", "cudaHostAlloc", "cudaMemcpyAsync", "cudaGraphLaunch", "cudaStreamBeginCapture",
    "cudaStreamSynchronize", "create_execution_context", "set_input_shape", "set_tensor_address",
    "execute_async_v3",
)  # fmt: skip
WORDS = r"^(cannot |profile \d+ of nowhere/engine\.plan )"
"""How every error begins: with what was being done."""
FIRST = [[1, 2, 3, 4, 5]]


def toy() -> TableEngine:
    return TableEngine(5, max_length=LENGTH)


def pair(device: DoubleDevice, **options: Any) -> tuple[TensorRtEngine, TensorRtEngine]:
    target = opened(device, toy(), candidates=3, **options)
    try:
        return target, opened(device, toy(), draft_profiles(PREFILL), confidence=True, **options)
    except EngineError:
        target.close()
        raise


def test_a_pass_that_finds_no_memory_leaves_the_engine_as_it_was() -> None:
    device = DoubleDevice()
    engine, fresh = opened(device, toy()), opened(DoubleDevice(), toy())
    for one in (engine, fresh):
        one.forward([[1, 2, 3]], 0)
    live, taken = device.live, engine.memory_bytes
    for call in ("cudaMalloc", "create_execution_context", "cudaHostAlloc", "set_tensor_address"):
        device.cuda.fail(call)
        with pytest.raises(EngineError):
            engine.forward([[1] * 5], 3)
        if call == "create_execution_context":  # room for scores is kept for the next try
            live, taken = sorted([*live, "scores"]), engine.memory_bytes
        assert device.live == live
        for purpose in ("KV buffers", "working memory", "scores"):
            assert engine.memory_bytes[purpose] == taken[purpose]
    assert (engine.forward([[4] * 5], 3).argmax == fresh.forward([[4] * 5], 3).argmax).all()


def work(device: DoubleDevice) -> list[str]:
    """Do a bit of everything, and return the engines' notices."""
    target, draft = pair(device)
    rounds = CapturedRounds(target, draft)
    try:
        for engine in (target, draft):
            engine.forward(FIRST, 0, 1)
        for _ in range(2):
            drafted = rounds.run([5], 4, 5, 4, 2)
            target.forward([[5, *drafted.tokens]], 4).logits.sum()
            target.forward([[1]], 5).logits.sum()
            draft.forward([[1]], 5, 1)
        target.forward([[1, 2, 3]], 6)
        return target.notices + draft.notices
    except EngineError:
        if device.cuda.lost:  # nothing answers again
            for engine in (target, draft):
                for width in (1, 3, 5):
                    with pytest.raises(EngineError):
                        engine.forward([[1] * width], 0, 1)
            with pytest.raises(EngineError):
                rounds.run([5], 4, 5, 4, 2)
        raise
    finally:
        draft.close()  # in either order
        target.close()
        rounds.close()


@pytest.fixture(scope="module")
def calls() -> Mapping[str, int]:
    """How often each call is made where none fails."""
    device = DoubleDevice()
    assert work(device) == []
    assert device.live == []
    return device.calls


@pytest.mark.parametrize("code", [Code.cudaErrorInvalidValue, LOST], ids=["refused", "lost"])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_fails_is_an_error_and_everything_is_given_back(
    call: str, code: Code, calls: Mapping[str, int]
) -> None:
    count = calls[call] - 3 * (call == "cudaStreamSynchronize")  # closing waits, and forgives
    for n in sorted({1, 2, count // 2, count} & set(range(1, count + 1))):
        device = DoubleDevice()
        device.cuda.fail(call, n - device.calls[call], code)
        try:
            (notice, *_) = work(device)
        except EngineError as error:
            message = str(error)
            assert ("the device is lost" in message) == (code == LOST)
            with pytest.raises(EngineError, match=WORDS):
                raise
        else:  # only what fails inside a capture can be spared
            assert "run kernel by kernel: " in notice
            assert code != LOST
        assert device.live == []


@pytest.mark.parametrize(
    ("call", "gamma"),
    [("cudaMemcpyAsync", 0), ("execute_async_v3", 0), ("cudaStreamSynchronize", 0),
     ("cudaMemcpyAsync", 3), ("cudaStreamSynchronize", 2), ("cudaGraphLaunch", 2)],
)  # fmt: skip
def test_a_failed_pass_ends_its_engine_and_a_failed_round_both(call: str, gamma: int) -> None:
    """The device answers again, but what was written is not known."""
    device = DoubleDevice()
    target, draft = pair(device)
    rounds = CapturedRounds(target, draft)
    for engine in (target, draft):
        engine.forward(FIRST, 0, 1)
    done = rounds.run([5], 4, 5, 4, 2)
    device.cuda.fail(call)
    failing: Callable[[], object] = partial(target.forward, [[1] * 4], 3)
    if gamma:  # work of a new one stays on the stream
        failing = partial(rounds.run, [5], 4, 5, 4, gamma)
    with pytest.raises(EngineError, match=WORDS):
        failing()
    refused: list[Callable[[], object]] = [
        lambda: target.forward([[5, *done.tokens]], 4), lambda: rounds.run([5], 4, 5, 4, 2)
    ]  # fmt: skip
    if gamma:
        refused.append(lambda: draft.forward([[5]], 4, 1))
    for work in refused * 2:
        with pytest.raises(EngineError, match=r"earlier pass failed .*open the bundle again"):
            work()
    if gamma == 3:
        rounds.close()
    target.close()
    draft.close()
    assert device.live == []


@pytest.mark.parametrize("refuses", [False, True])
def test_passes_that_cannot_be_captured_run_all_the_same_and_say_so(refuses: bool) -> None:
    """Each is tried once; one that the library refuses is not tried at all."""

    def steps(device: DoubleDevice) -> tuple[list[int], list[str]]:
        target, draft = pair(device, backend="tensorrt-rtx")  # which says what may be captured
        double_of(target).capturable = not (device.cuda.fails and refuses)
        rounds, tokens = CapturedRounds(target, draft), list[int]()
        for engine in (target, draft):
            engine.forward(FIRST, 0, 1)
        for start in (4, 5, 6):
            drafted = rounds.run([5], start, 5, start, 2).tokens
            scores = target.forward([[5, *drafted]], start)
            tokens += [*drafted, *scores.argmax[0].tolist()]
            tokens += target.forward([[1]], start).argmax[0].tolist()
        return tokens, target.notices

    device = DoubleDevice()
    device.cuda.fail("cudaStreamBeginCapture", ALWAYS)
    tokens, notices = steps(device)
    assert (tokens, []) == steps(DoubleDevice())
    assert [notice.partition(" run ")[0] for notice in notices] == [
        "passes of width 1 with 1 scored rows", "rounds of gamma 2"
    ]  # fmt: skip
    assert device.calls["cudaStreamBeginCapture"] == (0 if refuses else 2)


def test_scores_are_not_read_from_a_closed_engine() -> None:
    engine = opened(DoubleDevice(), toy())
    kept = engine.forward([[1, 2, 3]], 0)
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        _ = kept.logits


TARGET, DRAFT = None, draft_profiles(PREFILL)


@pytest.mark.parametrize(
    ("profiles", "width", "rows", "message"),
    [
        (TARGET, 16, 16, r"width 16 with 16 scored rows \(gamma 15; the nearest built: 4 and 8\)"),
        (TARGET, 16, 11, r"width 16 with 11 scored rows; there are 'prefill' of width 1 to 16 and "
                         r"rows 1 to 9, 'decode' of width 1 and rows 1, .*build the bundle with"),
        (DRAFT, 5, 5, r"width 5 with 5 scored rows; there are .*'catch-up'"),
    ],
)  # fmt: skip
def test_a_pass_without_a_profile_names_those_there_are(
    profiles: Any, width: int, rows: int, message: str
) -> None:
    engine = opened(DoubleDevice(), toy(), profiles)
    with pytest.raises(EngineError, match=message):
        engine.forward([[1] * width], 0, rows)
    engine.forward([[1]], 0)


@pytest.mark.parametrize(
    ("message", "told", "made"),
    [
        (r"key\.0 as input .* of float16, .* of float32", {"compute": "fp32"}, {}),
        ("computes in fp8", {"compute": "fp8"}, {}),
        ("form ring", {"form": "ring"}, {}),
        ("has a tensor confidence", {"confidence": False}, {}),
        (r"candidates\.values as output \[1, -1, 4\]", {"candidates": 8}, {}),
        (r"no tensor candidates", {}, {"candidates": 0}),
        (r"writes present_key\.1 into key\.0", {},
         {"change": lambda engine: engine.aliases.update({"present_key.1": "key.0"})}),
        (r"key\.0 as input \[1, 2, 64, 3\] of float16, .* \[1, 2, 32, 3\]", {}, {"max_length": 32}),
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
