"""Progress, cancelling and Ctrl-C, held without TensorRT."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt_export.compile.monitor import CancelledError, Watch, interruptible


def nothing(stage: str, done: float) -> None:
    pass


STEPS = st.recursive(st.just([]), lambda inner: st.lists(inner, min_size=1, max_size=4))


def walk(watch: Watch, name: str, inside: Any) -> None:
    watch.start(name, max(1, len(inside)))
    for number, each in enumerate(inside or [[]]):
        if each:
            walk(watch, f"{name}.{number}", each)
        watch.step(name, number)
    watch.finish(name)


@given(STEPS, st.booleans())
def test_progress_never_falls_whatever_phases_come(inside: Any, known: bool) -> None:
    told: list[float] = []
    watch = Watch(lambda stage, done: told.append(done), ("prefill", "decode"))
    if known:
        watch.start("Building engine", 6)
    walk(watch, "Computing profile costs" if known else "Other", inside)
    if known:
        watch.step("Building engine", 4)
    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] <= 1


def test_steps_name_the_profile_they_belong_to() -> None:
    told: dict[str, float] = {}
    watch = Watch(told.__setitem__, ("prefill", "decode", "verify 4"))
    watch.start("Building engine", 6)
    watch.start("Computing profile costs", 15)
    for number in range(15):
        watch.step("Computing profile costs", number)
    assert list(told) == [
        "building engine",
        "profile prefill (1 of 3)",
        "profile decode (2 of 3)",
        "profile verify 4 (3 of 3)",
    ]
    assert told["profile decode (2 of 3)"] < told["profile verify 4 (3 of 3)"]


def test_a_step_says_to_stop_once_it_is_asked() -> None:
    asked = iter([False, True])
    watch = Watch(nothing, ("decode",), cancelled=lambda: next(asked))
    watch.start("phase", 9)
    assert watch.step("phase", 0)
    assert not watch.step("phase", 1)
    assert not watch.step("phase", 2)
    with pytest.raises(CancelledError):
        watch.check()


def test_an_error_of_the_caller_waits_until_the_library_is_done() -> None:
    def progress(stage: str, done: float) -> None:
        raise KeyError("from the progress bar")

    watch = Watch(progress, ("decode",))
    watch.start("phase", 2)
    assert not watch.step("phase", 0)
    with pytest.raises(KeyError, match="from the progress bar"):
        watch.check()


@pytest.fixture
def mine() -> Iterator[list[int]]:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGINT, before)


def test_the_handler_of_before_comes_back(mine: list[int]) -> None:
    ours = signal.getsignal(signal.SIGINT)
    watch = Watch(nothing, ("decode",))
    with interruptible(watch):
        os.kill(os.getpid(), signal.SIGINT)
    assert watch.interrupted
    assert mine == []
    assert signal.getsignal(signal.SIGINT) is ours
    os.kill(os.getpid(), signal.SIGINT)
    assert mine == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        watch.check()


def test_a_second_ctrl_c_would_end_the_process_at_once(mine: list[int]) -> None:
    with interruptible(Watch(nothing, ("decode",))):
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
