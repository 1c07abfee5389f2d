"""Progress, cancelling and Ctrl-C, and what is read out of the messages; without TensorRT."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compile.plans import nothing
from specrt.engine.tensorrt.engine_record import writes_weight
from specrt.engine.tensorrt.library import Message
from specrt_export.compile.monitor import (
    CancelledError,
    Watch,
    compiled,
    highlights,
    interruptible,
)
from specrt_export.compile.network import profiles

STEPS = st.recursive(st.just([]), lambda inner: st.lists(inner, min_size=1, max_size=4))


def walk(watch: Watch, name: str, inside: Any) -> None:
    watch.start(name, max(1, len(inside)))
    for number, each in enumerate(inside or [[]]):
        if each:
            walk(watch, f"{name}.{number}", each)
        watch.step(name, number)
    watch.finish(name)


@settings(max_examples=30)
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


def test_a_step_says_to_stop_once_it_is_asked_or_the_caller_fails() -> None:
    asked = iter([False, True])
    cancelled = Watch(nothing, ("decode",), cancelled=lambda: next(asked))
    failing = Watch(lambda stage, done: 1 / 0, ("decode",))
    for watch, goes_on, error in (
        (cancelled, [True, False, False], CancelledError),
        (failing, [False, False, False], ZeroDivisionError),
    ):
        watch.start("phase", 9)
        assert [watch.step("phase", 0) for _ in range(3)] == goes_on
        with pytest.raises(error):
            watch.check()


def test_ctrl_c_stops_a_build_and_the_handler_of_before_comes_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        watch, ours = Watch(nothing, ("decode",)), signal.getsignal(signal.SIGINT)
        with interruptible(watch):
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a second ends the process"
        assert (watch.interrupted, seen) == (True, [])
        assert signal.getsignal(signal.SIGINT) is ours
        with pytest.raises(KeyboardInterrupt):
            watch.check()
    finally:
        signal.signal(signal.SIGINT, before)


KERNELS = (
    ("__mye1_0", 0, "shape_call", ""),
    ("0.q_U3+0.k_U4", 0, "gemm", "__myelin_CASK_STUB"),
    ("1.q_U8+1.k_U9", 0, "gemm", "__myelin_CASK_STUB"),
    ("_gemm_mha_v2", 0, "kgen", "_gemm_mha_v2_0xab12"),
    ("__myl_CastMulCastFc", 0, "runtime_fusion", ""),
    ("_gemv_mha_v1", 1, "kgen", "_gemv_mha_v1_0xed73"),
    ("__myl_CastMulCast", 1, "kgen", "__myl_CastMulCast_0x1003"),
)
LISTED = [
    Message("verbose", "Constructing optimization profile number 0 [1/2]."),
    Message("info", "Total Activation Memory: 100 bytes"),
    Message("verbose", "Constructing optimization profile number 1 [2/2]."),
    Message("info", "Total Activation Memory: 7 bytes"),
    Message("verbose", "Engine Layer Information:" + "".join(
        f"\nName: {name}_myl{profile}_{at}, LayerType: {kind}, Inputs: [ {{ Name: a }}], "
        f"Constants: [], Outputs: [], TacticName: {tactic}, StreamId: 0, Metadata: "
        for at, (name, profile, kind, tactic) in enumerate(KERNELS)
    )),
]  # fmt: skip


def test_kernels_are_read_out_of_the_messages() -> None:
    wide, narrow = compiled(LISTED, profiles("target", 8, ()))
    assert [(k.name, k.kind, k.count) for k in wide.kernels] == [
        ("#.q+#.k", "gemm", 2),
        ("_gemm_mha_v2", "kgen", 1),
        ("__myl_CastMulCastFc", "runtime_fusion", 1),
    ]
    assert (wide.launches, wide.attention, wide.dequantising) == (4, "gemm", 0)
    assert (narrow.launches, narrow.attention, narrow.dequantising) == (2, "gemv", 1)
    assert (wide.activation_bytes, narrow.activation_bytes) == (100, 7)


def test_kernels_that_only_write_out_a_weight() -> None:
    for name in ("CastMulCast", "ReplCastMulCast", "ReplReshCastMulCastTran"):
        assert writes_weight(f"__myl_{name}")
    for name in ("CastMulCastFc", "CastMulCastMulSumAdd", "CastMulMean", "MulReshCast"):
        assert not writes_weight(f"__myl_{name}")


def test_warnings_are_kept_once_and_fit_a_record() -> None:
    slow = Message("warning", "slow\x00 path " + "x" * 400)
    importer = Message("warning", "ModelImporter: Make sure input rows has Int64 binding.")
    (kept,) = highlights([importer, slow, slow, Message("info", "nothing")])
    assert kept.isprintable()
    assert len(kept) <= 255
