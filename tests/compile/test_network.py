"""Profiles and options of a plan, held without TensorRT."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engine.tensorrt.library import FLAVOURS
from specrt.errors import BuildError
from specrt_export.compile.network import check_options, configure, profiles
from specrt_export.recipe import PlanOptions

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


def test_a_prefill_narrower_than_a_verify_pass_is_refused() -> None:
    with pytest.raises(BuildError, match=r"prefill width of the target is 4.* at least 5"):
        profiles("target", 4, (4,))
    assert profiles("target", 5, (4,))


class Flags:
    """A module or a configuration that remembers what was set."""

    ComputeCapability = SimpleNamespace(NONE=0, CURRENT=1, SM75=2, SM89=3, SM120=4)
    BuilderFlag = SimpleNamespace(
        VERSION_COMPATIBLE="version", WEIGHT_STREAMING="streaming", STRIP_PLAN="strip",
        REQUIRE_USER_ALLOCATION="own memory",
    )  # fmt: skip
    MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
    HardwareCompatibilityLevel = SimpleNamespace(AMPERE_PLUS="ampere")
    ProfilingVerbosity = SimpleNamespace(DETAILED="detailed")

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.pools: dict[str, int] = {}
        self.capabilities: dict[int, int] = {}
        self.builder_optimization_level = self.hardware_compatibility_level = None
        self.max_aux_streams = 9
        self.set_flag = self.flags.append
        self.set_memory_pool_limit = self.pools.__setitem__

    def set_compute_capability(self, value: int, index: int) -> None:
        self.capabilities[index] = value


def library(backend: str) -> Any:
    return SimpleNamespace(backend=backend, module=Flags, flavour=FLAVOURS[backend])


def test_every_option_reaches_the_builder() -> None:
    config, plain = Flags(), Flags()
    options = PlanOptions(
        optimization_level=0, workspace_mib=7, aux_streams=0, hardware_compatible="ampere+",
        version_compatible=True, weight_streaming=True, stripped=True,
    )  # fmt: skip
    configure(config, Flags, options)
    assert config.flags == ["version", "streaming", "strip"]
    assert config.pools == {"workspace": 7 << 20}
    assert config.hardware_compatibility_level == "ampere"
    assert (config.builder_optimization_level, config.max_aux_streams) == (0, 0)
    assert len(options.settings()) == 7
    configure(plain, Flags, PlanOptions())
    assert (plain.flags, plain.pools, plain.capabilities) == (["own memory"], {}, {})
    assert plain.max_aux_streams == 9
    configure(plain, Flags, PlanOptions(capabilities=("12.0", "8.9", "12.0")))
    assert plain.capabilities == {0: Flags.ComputeCapability.SM120, 1: Flags.ComputeCapability.SM89}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RTX, {"optimization_level": 3}, "optimization_level has no effect on tensorrt-rtx"),
    (RTX, {"hardware_compatible": "ampere+"}, "tensorrt-rtx has no hardware_compatible"),
    (RTX, {"version_compatible": True}, "cannot make version_compatible plans"),
    (RTX, {"stripped": True}, "stripped plans on a machine without a GPU"),
    (RTX, {"capabilities": ("9.0",)}, r"capability '9.0'; it knows 7.5, 8.9, 12.0; .*tensorrt"),
    (ENTERPRISE, {"capabilities": ("8.9",)}, "tensorrt builds for the GPU it runs on"),
    (ENTERPRISE, {"optimization_level": 6}, "optimization_level is 6; expected 0 to 5"),
    (ENTERPRISE, {"hardware_compatible": "all"}, r"'all'; expected ampere\+ or same-capability"),
]


@pytest.mark.parametrize(("backend", "settings", "words"), REFUSED)
def test_what_a_library_does_not_offer_is_refused_by_name(
    backend: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        check_options(PlanOptions(**settings), library(backend), gpu=False)
    check_options(PlanOptions(stripped=True), library(RTX), gpu=True)
    check_options(PlanOptions(stripped=True, version_compatible=True), library(ENTERPRISE), True)


def test_what_the_builder_refuses_is_named() -> None:
    verbosity = Flags.ProfilingVerbosity
    old = SimpleNamespace(ProfilingVerbosity=verbosity, BuilderFlag=object(), __version__="8.6")
    with pytest.raises(BuildError, match=r"weight_streaming is not offered by version 8.6"):
        configure(Flags(), old, PlanOptions(weight_streaming=True))
