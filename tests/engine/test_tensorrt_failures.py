"""Failures of a device: an error each that says what was done, never a number, nothing leaked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from engine.numpy_device import ALWAYS, NumpyDevice
from engine.tensorrt_double import (
    PREFILL,
    NumpyPlan,
    draft_profiles,
    geometry_of,
    opened,
    record_of,
    target_profiles,
)
from runtime.toy import TableEngine
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import CapturedRounds
from specrt.errors import EngineError

LENGTH = 64
CALLS = (
    "allocate", "stage", "send", "fetch", "launch", "capture", "copy", "read", "wait", "context",
    "set_shape", "set_address", "enqueue",
)  # fmt: skip


def toy() -> TableEngine:
    return TableEngine(5, max_length=LENGTH)


def test_too_little_memory_names_what_is_needed_and_free() -> None:
    device = NumpyDevice(7000)
    with pytest.raises(EngineError, match=r"KV buffers needs \d+ bytes .* which has \d+ free"):
        opened(device, toy())
    assert device.live == []


@pytest.mark.parametrize("call", [1, 2])
def test_an_engine_that_does_not_open_gives_everything_back(call: int) -> None:
    device = NumpyDevice(fails={"allocate": call})
    record, geometry = record_of(target_profiles((2,), PREFILL)), geometry_of(toy())
    plan = NumpyPlan(device, record, toy(), geometry)
    with pytest.raises(EngineError, match="allocate failed"):
        TensorRtEngine(
            plan, device, record, geometry, batch=1, max_length=LENGTH, max_width=PREFILL
        )
    assert plan.closed == 1
    assert device.live == []


def test_a_pass_that_finds_no_memory_leaves_the_engine_as_it_was() -> None:
    device = NumpyDevice()
    engine = opened(device, toy())
    engine.forward([[1, 2, 3]], 0)
    live, taken = device.live, engine.memory_bytes
    for call in ("allocate", "context", "stage", "set_address"):
        device.fails = {call: device.calls[call] + 1}
        with pytest.raises(EngineError, match=f"{call} failed"):
            engine.forward([[1] * 5], 3)
        if call == "context":  # room for scores is kept for the next try
            assert sorted(device.live) == sorted([*live, "scores"])
            live, taken = device.live, engine.memory_bytes
        assert device.live == live
        for purpose in ("KV buffers", "working memory", "scores"):
            assert engine.memory_bytes[purpose] == taken[purpose]
    found = engine.forward([[4] * 5], 3)
    fresh = opened(NumpyDevice(), toy())
    fresh.forward([[1, 2, 3]], 0)
    assert (found.argmax == fresh.forward([[4] * 5], 3).argmax).all()


def work(device: NumpyDevice, finished: list[int]) -> list[str]:
    """Do a bit of everything, count what was finished, and return the engines' notices."""
    target = opened(device, toy(), form="native", candidates=3)
    try:
        draft = opened(device, toy(), draft_profiles(PREFILL), confidence=True)
    except EngineError:
        target.close()
        raise
    rounds = CapturedRounds(target, draft)
    engines = target, draft
    try:
        for engine in engines:
            engine.forward([[1, 2, 3, 4, 5]], 0, 1)
            finished.append(0)
        for _ in range(2):
            said = rounds.run([5], 4, 5, 4, 2)
            target.forward([[5, *said.tokens]], 4).logits.sum()
            target.forward([[1]], 5).logits.sum()
            draft.forward([[1]], 5, 1)
            finished.append(0)
        target.forward([[1, 2, 3]], 6)
        return target.notices + draft.notices
    except EngineError:
        again(device, target, draft, rounds)
        raise
    finally:
        draft.close()  # in either order
        target.close()
        target.close()
        rounds.close()


def again(
    device: NumpyDevice, target: TensorRtEngine, draft: TensorRtEngine, rounds: CapturedRounds
) -> None:
    """With a device that is gone, nothing answers again."""
    if not device.lost:
        return
    for engine in (target, draft):
        for width in (1, 3, 5):
            with pytest.raises(EngineError):
                engine.forward([[1] * width], 0, 1)
    with pytest.raises(EngineError):
        rounds.run([5], 4, 5, 4, 2)


def calls_in_all() -> Mapping[str, int]:
    device = NumpyDevice()
    finished: list[int] = []
    assert work(device, finished) == []
    assert len(finished) == 4
    assert device.live == []
    return device.calls


def outcome_of(device: NumpyDevice) -> str:
    """Return the error that work ends with; only what fails inside a capture can be spared."""
    try:
        (notice, *_) = work(device, [])
    except EngineError as error:
        return f"failed: {error}"
    return notice.partition(" run ")[2]


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_whatever_fails_is_an_error_and_everything_is_given_back(call: str, loses: bool) -> None:
    count = calls_in_all()[call] - (3 if call == "wait" else 0)  # closing waits, and forgives
    assert count > 0
    for n in sorted({1, 2, 3, count // 4, count // 2, count - 1, count} & set(range(1, count + 1))):
        device = NumpyDevice(fails={call: n}, loses=loses)
        outcome = outcome_of(device)
        assert outcome.startswith("failed" if loses else (f"failed: {call}", "kernel by kernel"))
        assert f"{call} failed: the driver answers" in outcome or loses
        assert device.live == []


@pytest.mark.parametrize("call", ["send", "enqueue", "fetch", "wait", "launch"])
def test_a_failed_pass_ends_the_engine(call: str) -> None:
    device = NumpyDevice()
    engine = opened(device, toy())
    engine.forward([[1, 2, 3]], 0)
    engine.forward([[1]], 3)
    device.fails = {call: device.calls[call] + 1}
    pass_: Any = [[1]] if call == "launch" else [[1] * 5]
    with pytest.raises(EngineError, match=f"^{call} failed"):
        engine.forward(pass_, 3)
    for _ in range(2):  # the device answers again, but what was written is not known
        with pytest.raises(EngineError, match=rf"earlier pass failed \({call} failed.*open the bu"):
            engine.forward([[1]], 3)


@pytest.mark.parametrize("refuses", [False, True])
def test_passes_that_cannot_be_captured_run_all_the_same_and_say_so(refuses: bool) -> None:
    """Each is tried once; one that the library refuses is not tried at all."""

    def steps(device: NumpyDevice) -> tuple[list[int], list[str]]:
        target = opened(device, toy())
        draft = opened(device, toy(), draft_profiles(PREFILL))
        if device.fails and refuses:
            target.model.plan.capturable = False  # type: ignore[attr-defined]
        rounds, tokens = CapturedRounds(target, draft), list[int]()
        for engine in (target, draft):
            engine.forward([[1, 2, 3, 4, 5]], 0, 1)
        for start in (4, 5, 6):
            drafted = rounds.run([5], start, 5, start, 2).tokens
            scores = target.forward([[5, *drafted]], start)
            tokens += [*drafted, *scores.argmax[0].tolist()]
            tokens += target.forward([[1]], start).argmax[0].tolist()
        return tokens, target.notices

    wanted, silent = steps(NumpyDevice())
    device = NumpyDevice(fails={"capture": ALWAYS})
    tokens, notices = steps(device)
    assert (tokens, silent) == (wanted, [])
    assert [notice.partition(" run ")[0] for notice in notices] == [
        "passes of width 1 with 1 scored rows", "rounds of gamma 2"
    ]  # fmt: skip
    assert device.calls["capture"] == (0 if refuses else 2)


def test_a_failed_round_ends_both_engines_and_finishes_nothing() -> None:
    device = NumpyDevice()
    target = opened(device, toy())
    draft = opened(device, toy(), draft_profiles(PREFILL))
    rounds = CapturedRounds(target, draft)
    for engine in (target, draft):
        engine.forward([[1, 2, 3, 4, 5]], 0, 1)
    done = rounds.run([5], 4, 5, 4, 2)
    device.fails = {"wait": device.calls["wait"] + 1}
    with pytest.raises(EngineError, match=r"^wait failed"):
        rounds.run([5], 4, 5, 4, 2)
    with pytest.raises(EngineError, match="earlier pass failed"):
        target.forward([[5, *done.tokens]], 4)
    with pytest.raises(EngineError, match="earlier pass failed"):
        draft.forward([[5]], 4, 1)
    with pytest.raises(EngineError, match="earlier pass failed"):
        rounds.run([5], 4, 5, 4, 2)


@pytest.mark.parametrize("rounds_first", [False, True])
def test_what_a_failure_left_on_the_stream_is_done_before_memory_goes(rounds_first: bool) -> None:
    device = NumpyDevice()
    target = opened(device, toy())
    draft = opened(device, toy(), draft_profiles(PREFILL))
    rounds = CapturedRounds(target, draft)
    for engine in (target, draft):
        engine.forward([[1, 2, 3, 4, 5]], 0, 1)
    device.fails = {"fetch": device.calls["fetch"] + 1}
    with pytest.raises(EngineError, match="fetch failed"):
        rounds.run([5], 4, 5, 4, 2)
    if rounds_first:
        rounds.close()
    target.close()
    draft.close()
    assert device.live == []


def test_a_closed_engine_answers_nothing() -> None:
    device = NumpyDevice()
    engine = opened(device, toy())
    kept = engine.forward([[1, 2, 3]], 0)
    engine.close()
    with pytest.raises(EngineError, match="engine was closed"):
        engine.forward([[1, 2, 3]], 0)
    with pytest.raises(EngineError, match="was closed"):
        _ = kept.logits
