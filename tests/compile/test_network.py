"""Profiles and options of a plan, and how its build is stopped and told; without TensorRT."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.plans import nothing
from specrt.engine.tensorrt.library import FLAVOURS, Message
from specrt.errors import BuildError
from specrt_export.compile.monitor import CancelledError, Watch, highlights, interruptible
from specrt_export.compile.network import check_options, configure, profiles
from specrt_export.recipe.recipe_tables import PlanOptions

RTX, ENTERPRISE = "tensorrt-rtx", "tensorrt"

GAMMAS = st.lists(st.integers(0, 16), max_size=5)


@given(st.sampled_from(["target", "draft"]), st.integers(17, 512), GAMMAS)
def test_every_pass_has_a_profile_and_no_two_are_alike(
    role: str, prefill: int, gammas: list[int]
) -> None:
    found = profiles(role, prefill, gammas)
    assert len({(p.width, p.rows) for p in found}) == len(found)
    wanted = [(1, 1), (prefill, 1), (2, 1)]
    if role == "target":
        wanted += [(gamma + 1, gamma + 1) for gamma in gammas]
        most = max(gammas, default=0) + 1
        wanted += [(width, min(width, most)) for width in range(1, prefill + 1)]
    for width, rows in wanted:
        assert any(profile.takes(width, rows) for profile in found)
    for gamma in gammas if role == "target" else ():
        fixed = [p for p in found if p.width.fixed and p.takes(gamma + 1, gamma + 1)]
        assert len(fixed) == 1


@given(st.integers(0, 16))
def test_a_head_is_fed_all_that_a_round_kept_in_a_pass_of_its_own(gamma: int) -> None:
    found = profiles("draft", 32, (gamma,), catch_up=gamma + 1)
    fixed = [p.width.best for p in found if p.fixed]
    assert sorted(fixed) == [*range(1, max(2, gamma + 1) + 1)]
    assert {p.rows.most for p in found} == {1}
    if gamma > 1:
        with pytest.raises(BuildError, match=rf"prefill width of the draft .* least {gamma + 1}"):
            profiles("draft", gamma, (gamma,), catch_up=gamma + 1)


CAPABILITIES = SimpleNamespace(NONE=0, CURRENT=1, SM75=2, SM89=3, SM120=4)


def test_every_option_reaches_the_builder() -> None:
    module = MagicMock(ComputeCapability=CAPABILITIES)
    flags = module.BuilderFlag

    def set_by(**settings: Any) -> MagicMock:
        config = MagicMock(max_aux_streams=9)
        configure(config, module, PlanOptions(**settings))
        return config

    config = set_by(
        optimization_level=0, workspace_mib=7, aux_streams=0, hardware_compatible="ampere+",
        version_compatible=True, weight_streaming=True, stripped=True,
    )  # fmt: skip
    wanted = flags.VERSION_COMPATIBLE, flags.WEIGHT_STREAMING, flags.STRIP_PLAN
    assert config.set_flag.mock_calls == [call(flag) for flag in wanted]
    config.set_memory_pool_limit.assert_called_once_with(module.MemoryPoolType.WORKSPACE, 7 << 20)
    assert config.hardware_compatibility_level is module.HardwareCompatibilityLevel.AMPERE_PLUS
    assert (config.builder_optimization_level, config.max_aux_streams) == (0, 0)
    plain = set_by(capabilities=("12.0", "8.9", "12.0"))
    assert plain.set_flag.mock_calls == [call(flags.REQUIRE_USER_ALLOCATION)]
    assert plain.set_compute_capability.mock_calls == [call(4, 0), call(3, 1)]
    assert (plain.set_memory_pool_limit.called, plain.max_aux_streams) == (False, 9)
    assert set_by(capabilities=("current",)).set_compute_capability.mock_calls == [call(1, 0)]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RTX, {"optimization_level": 3}, "optimization_level has no effect on tensorrt-rtx"),
    (RTX, {"hardware_compatible": "ampere+"}, "tensorrt-rtx has no hardware_compatible"),
    (RTX, {"version_compatible": True}, "cannot make version_compatible plans"),
    (RTX, {"stripped": True}, "stripped plans on a machine without a GPU"),
    (RTX, {"capabilities": ("9.0",)}, r"capability '9.0'; it knows 7.5, 8.9, 12.0; .*tensorrt"),
    (RTX, {"capabilities": ("current",)}, "current is that of this machine's GPU"),
    (ENTERPRISE, {"capabilities": ("8.9",)}, "tensorrt builds for the GPU it runs on"),
    (ENTERPRISE, {"optimization_level": 6}, "optimization_level is 6; expected 0 to 5"),
    (ENTERPRISE, {"hardware_compatible": "all"}, r"'all'; expected ampere\+ or same-capability"),
]


@pytest.mark.parametrize(("backend", "settings", "words"), REFUSED)
def test_what_a_library_does_not_offer_is_refused_by_name(
    backend: str, settings: dict[str, Any], words: str
) -> None:
    module = SimpleNamespace(ComputeCapability=CAPABILITIES)
    library = SimpleNamespace(backend=backend, module=module, flavour=FLAVOURS[backend])
    with pytest.raises(BuildError, match=words):
        check_options(PlanOptions(**settings), library, gpu=False)
    if "GPU" in words and backend == RTX:
        check_options(PlanOptions(**settings), library, gpu=True)


def test_a_flag_that_an_old_library_does_not_have_is_named() -> None:
    old = MagicMock(BuilderFlag=object(), __version__="8.6")
    with pytest.raises(BuildError, match=r"weight_streaming is not offered by version 8.6"):
        configure(MagicMock(), old, PlanOptions(weight_streaming=True))


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


def test_warnings_are_kept_once_and_fit_a_record() -> None:
    slow = Message("warning", "slow\x00 path " + "x" * 400)
    importer = Message("warning", "ModelImporter: Make sure input rows has Int64 binding.")
    (kept,) = highlights([importer, slow, slow, Message("info", "nothing")])
    assert kept.isprintable()
    assert len(kept) <= 255
