"""What surrounds TensorRT's builder, held without it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.engines.tensorrt.journal import Message
from specrt.engines.tensorrt.library import FLAVOURS
from specrt.engines.tensorrt.record import (
    EngineRecord,
    Profile,
    Range,
    read_engine_record,
    writes_weight,
)
from specrt.engines.tensorrt.summary import summary
from specrt.errors import BuildError
from specrt_export.compile.tensorrt.cache import TimingCache
from specrt_export.compile.tensorrt.memory import (
    Room,
    Weights,
    check_memory,
    need,
    weights_of,
)
from specrt_export.compile.tensorrt.monitor import CancelledError, Watch, interruptible
from specrt_export.compile.tensorrt.options import PlanOptions, check_options, configure
from specrt_export.compile.tensorrt.place import written_aside
from specrt_export.compile.tensorrt.profiles import add_profiles, profiles
from specrt_export.compile.tensorrt.report import compiled, highlights, read_header

MIB = 1 << 20
RTX, ENTERPRISE = "tensorrt-rtx", "tensorrt"
GAMMAS = st.lists(st.integers(0, 16), max_size=5)


def nothing(stage: str, done: float) -> None:
    pass


# --- profiles


def test_the_profiles_of_a_target_and_a_draft() -> None:
    target = profiles("target", 128, (4, 1, 4))
    assert [(p.name, p.width.most, p.rows.most) for p in target] == [
        ("prefill", 128, 5),
        ("decode", 1, 1),
        ("verify 1", 2, 2),
        ("verify 4", 5, 5),
    ]
    assert target[0].width == Range(1, 64, 128)
    assert target[0].rows == Range(1, 1, 5)
    draft = profiles("draft", 128, (4, 1))
    assert [(p.name, p.width.most, p.rows.most) for p in draft] == [
        ("prefill", 128, 1),
        ("decode", 1, 1),
        ("catch-up", 2, 1),
    ]


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
    with pytest.raises(BuildError, match=r"prefill width of the draft is 1.* at least 2"):
        profiles("draft", 1, ())


def test_profiles_are_added_in_order_and_a_refusal_is_told() -> None:
    shapes: list[dict[str, Any]] = []

    class Shapes(dict[str, Any]):
        def set_shape(self, name: str, *sizes: Any) -> None:
            self[name] = sizes

    def add(profile: dict[str, Any]) -> int:
        shapes.append(profile)
        return len(shapes) - 1 if len(shapes) < 3 else -1

    builder = SimpleNamespace(create_optimization_profile=Shapes)
    config = SimpleNamespace(add_optimization_profile=add)
    add_profiles(builder, config, 3, profiles("target", 32, ()))
    assert shapes[0] == {
        "input_ids": ((3, 1), (3, 16), (3, 32)),
        "rows": ((1,), (1,), (1,)),
    }
    with pytest.raises(BuildError, match="refused the profile 'prefill'"):
        add_profiles(builder, config, 1, profiles("target", 32, ()))


# --- options


class Flags:
    """A module or a configuration that remembers what was set."""

    class ComputeCapability:
        NONE, CURRENT, SM75, SM89, SM120 = range(5)

    class BuilderFlag:
        VERSION_COMPATIBLE, WEIGHT_STREAMING, STRIP_PLAN = "version", "streaming", "strip"

    class MemoryPoolType:
        WORKSPACE = "workspace"

    class HardwareCompatibilityLevel:
        AMPERE_PLUS = "ampere"

    class ProfilingVerbosity:
        DETAILED = "detailed"

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.pools: dict[str, int] = {}
        self.capabilities: dict[int, int] = {}
        self.builder_optimization_level = self.hardware_compatibility_level = None

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size

    def set_compute_capability(self, value: int, index: int) -> None:
        self.capabilities[index] = value


def library(backend: str, module: Any = Flags) -> Any:
    return SimpleNamespace(backend=backend, module=module, flavour=FLAVOURS[backend])


def test_every_option_reaches_the_builder() -> None:
    config = Flags()
    options = PlanOptions(
        optimization_level=0,
        workspace_mib=7,
        hardware_compatible="ampere+",
        version_compatible=True,
        weight_streaming=True,
        stripped=True,
    )
    check_options(options, library(ENTERPRISE), gpu=True)
    configure(config, Flags, options)
    assert config.flags == ["version", "streaming", "strip"]
    assert config.pools == {"workspace": 7 * MIB}
    assert config.hardware_compatibility_level == "ampere"
    assert config.builder_optimization_level == 0
    assert options.settings() == {
        "optimization_level": "0",
        "workspace_mib": "7",
        "hardware_compatible": "ampere+",
        "version_compatible": "True",
        "weight_streaming": "True",
        "stripped": "True",
    }
    plain = Flags()
    configure(plain, Flags, PlanOptions())
    assert (plain.flags, plain.pools, plain.capabilities) == ([], {}, {})
    configure(plain, Flags, PlanOptions(capabilities=("12.0", "8.9", "12.0")))
    assert plain.capabilities == {0: Flags.ComputeCapability.SM120, 1: Flags.ComputeCapability.SM89}
    assert PlanOptions().settings() == {}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RTX, {"optimization_level": 3}, "optimization_level has no effect on tensorrt-rtx"),
    (RTX, {"hardware_compatible": "ampere+"}, "tensorrt-rtx has no hardware_compatible"),
    (RTX, {"version_compatible": True}, "cannot make version_compatible plans"),
    (RTX, {"stripped": True}, "stripped plans on a machine without a GPU"),
    (RTX, {"capabilities": ("9.0",)}, r"capability '9.0'; it knows 7.5, 8.9, 12.0; .*tensorrt"),
    (RTX, {"capabilities": ("8.9", "CURRENT")}, "capability 'CURRENT'; it knows"),
    (ENTERPRISE, {"capabilities": ("8.9",)}, "tensorrt builds for the GPU it runs on"),
    (ENTERPRISE, {"optimization_level": 6}, "optimization_level is 6; expected 0 to 5"),
    (ENTERPRISE, {"workspace_mib": 0}, "workspace_mib is 0; expected 1 or more"),
    (ENTERPRISE, {"hardware_compatible": "all"}, r"'all'; expected ampere\+ or same-capability"),
]


@pytest.mark.parametrize(("backend", "settings", "words"), REFUSED)
def test_what_a_library_does_not_offer_is_refused_by_name(
    backend: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        check_options(PlanOptions(**settings), library(backend), gpu=False)


def test_the_same_is_taken_where_it_is_offered() -> None:
    check_options(PlanOptions(stripped=True), library(RTX), gpu=True)
    check_options(PlanOptions(capabilities=("8.9",)), library(RTX), gpu=False)
    check_options(PlanOptions(stripped=True, version_compatible=True), library(ENTERPRISE), True)


def test_a_flag_of_a_newer_version_is_named() -> None:
    old = SimpleNamespace(
        ProfilingVerbosity=Flags.ProfilingVerbosity, BuilderFlag=object(), __version__="8.6"
    )
    with pytest.raises(BuildError, match=r"weight_streaming is not offered by version 8.6"):
        configure(Flags(), old, PlanOptions(weight_streaming=True))


# --- memory


MEASURED = [  # MiB: floats, codes, int4, gammas (None: prefill alone), peak
    (88, 0, 0, None, 478),
    (88, 0, 0, (4,), 572),
    (424, 0, 0, None, 1286),
    (424, 0, 0, (4,), 1779),
    (641, 0, 0, None, 1875),
    (641, 0, 0, (4,), 2563),
    (0, 48, 0, (4,), 395),
    (0, 228, 0, (1, 4, 8), 859),
    (0, 0, 30, (4,), 354),
    (0, 0, 142, (1, 4, 8), 896),
]


@pytest.mark.parametrize(("floats", "codes", "halves", "gammas", "peak"), MEASURED)
def test_the_estimate_is_above_what_was_measured_and_near(
    floats: int, codes: int, halves: int, gammas: tuple[int, ...] | None, peak: int
) -> None:
    made = profiles("target", 128, gammas or ())
    if gammas is None:
        made = made[:1]
    weights = Weights(floats * MIB, codes * MIB, halves * MIB)
    needed = need(weights, made, PlanOptions(), RTX)
    taken = peak * MIB - weights.stored  # mapped weights can be dropped
    assert taken <= needed.host_bytes <= 1.4 * taken
    assert needed.device_bytes == 0
    assert need(weights, made, PlanOptions(workspace_mib=5), ENTERPRISE).device_bytes > 0


def test_weights_are_added_up_by_type() -> None:
    kinds = (("FLOAT16", 10), ("FLOAT", 10), ("INT8", 10), ("FLOAT8E4M3FN", 5), ("INT4", 7))
    tensors = [
        onnx.TensorProto(data_type=onnx.TensorProto.DataType.Value(kind), dims=[count])
        for kind, count in kinds
    ]
    assert weights_of(tensors) == Weights(60, 15, 4)


def test_a_refusal_says_what_would_fit() -> None:
    weights, made = Weights(14 << 30, 0, 0), profiles("target", 128, (4,))
    needed = need(weights, made, PlanOptions(), RTX)
    with pytest.raises(BuildError) as caught:
        check_memory(needed, weights, made, RTX, Room(20 << 30))
    text = str(caught.value)
    assert "GiB of memory, and 20.0 GiB is free" in text
    assert "precision int8 or int4 would fit" in text
    assert "tensorrt-rtx needs no GPU to build" in text
    with pytest.raises(BuildError) as caught:
        check_memory(needed, weights, made, RTX, Room(1 << 30))
    assert "would fit" not in str(caught.value)
    check_memory(needed, weights, made, RTX, Room(needed.host_bytes))
    check_memory(needed, weights, made, RTX, Room(None))


def test_a_gpu_that_is_too_small_is_refused_and_shared_memory_counts_once() -> None:
    weights, made = Weights(1 << 30, 0, 0), profiles("target", 128, ())
    needed = need(weights, made, PlanOptions(), ENTERPRISE)
    with pytest.raises(BuildError, match="of GPU memory, and 512 MiB is free"):
        check_memory(needed, weights, made, ENTERPRISE, Room(None, 512 * MIB))
    both = needed.host_bytes + needed.device_bytes
    check_memory(needed, weights, made, ENTERPRISE, Room(both, both, shared=True))
    with pytest.raises(BuildError, match="of memory, and"):
        check_memory(needed, weights, made, ENTERPRISE, Room(both - 1, both, shared=True))


# --- watching


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


# --- what was built


def listing(*kernels: tuple[str, int, str, str]) -> Message:
    lines = [
        f"Name: {name}_myl{profile}_{at}, LayerType: {kind}, Inputs: [ {{ Name: a }}], "
        f"Constants: [], Outputs: [], TacticName: {tactic}, StreamId: 0, Metadata: "
        for at, (name, profile, kind, tactic) in enumerate(kernels)
    ]
    return Message("verbose", "\n".join(["Engine Layer Information:", *lines]))


LISTED = [
    Message("verbose", "Constructing optimization profile number 0 [1/2]."),
    Message("info", "Total Activation Memory: 100 bytes"),
    Message("verbose", "Constructing optimization profile number 1 [2/2]."),
    Message("info", "Total Activation Memory: 7 bytes"),
    listing(
        ("__mye1_0", 0, "shape_call", ""),
        ("__mye9", 0, "signal", ""),
        ("0.q_U3+0.k_U4", 0, "gemm", "__myelin_CASK_STUB"),
        ("1.q_U8+1.k_U9", 0, "gemm", "__myelin_CASK_STUB"),
        ("_gemm_mha_v2", 0, "kgen", "_gemm_mha_v2_0xab12"),
        ("__myl_CastMulCastFc", 0, "runtime_fusion", ""),
        ("_gemv_mha_v1", 1, "kgen", "_gemv_mha_v1_0xed73"),
        ("__myl_CastMulCast", 1, "kgen", "__myl_CastMulCast_0x1003"),
        ("__myl_ReplCastMulCast", 1, "kgen", "__myl_ReplCastMulCast_0x1"),
    ),
]


def test_kernels_are_read_out_of_the_messages() -> None:
    wide, narrow = compiled(LISTED, profiles("target", 8, ()))
    assert [(k.name, k.kind, k.count) for k in wide.kernels] == [
        ("#.q+#.k", "gemm", 2),
        ("_gemm_mha_v2", "kgen", 1),
        ("__myl_CastMulCastFc", "runtime_fusion", 1),
    ]
    assert (wide.launches, wide.attention, wide.dequantising) == (4, "gemm", 0)
    assert (narrow.launches, narrow.attention, narrow.dequantising) == (3, "gemv", 2)
    assert (wide.activation_bytes, narrow.activation_bytes) == (100, 7)
    silent = compiled([], profiles("target", 8, ()))
    assert [(one.launches, one.attention) for one in silent] == [(0, "none"), (0, "none")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("__myl_CastMulCast", True),
        ("__myl_ReplCastMulCast", True),
        ("__myl_ReplReshCastMulCastTran", True),
        ("__myl_CastMulCastFc", False),
        ("__myl_CastMulCastMulSumAdd", False),
        ("__myl_CastMulCastSiluMulReshMulSum", False),
        ("__myl_CastMulMean", False),
        ("__myl_CastReshCast", False),
        ("_gemv_mha_v1", False),
    ],
)
def test_kernels_that_only_write_out_a_weight(name: str, expected: bool) -> None:
    assert writes_weight(name) is expected


def test_the_head_of_a_plan() -> None:
    head = bytearray(64)
    head[:4], head[32] = b"vtrt", 0x7E
    assert read_header(bytes(head)).capabilities == ("8.0", "8.6", "8.9", "12.0", "12.1")
    head[:4] = b"ptrt"
    assert read_header(bytes(head)).capabilities == ()
    assert read_header(b"").magic == b""


def test_warnings_are_kept_once_and_fit_a_record() -> None:
    said = [
        Message("warning", "ModelImporter: Make sure input rows has Int64 binding."),
        Message("warning", "slow\x00 path " + "x" * 400),
        Message("warning", "slow\x00 path " + "x" * 400),
        Message("info", "nothing"),
    ]
    kept = highlights(said)
    assert len(kept) == 1
    assert kept[0].isprintable()
    assert len(kept[0]) <= 255


def test_records_from_before_are_read_and_shown(tmp_path: Path) -> None:
    record = EngineRecord(1, RTX, "1.7", "native", "fp16", profiles("target", 8, (2,)))
    short = record.to_json().split(' "plan_bytes"')[0].rstrip().rstrip(",") + "}"
    (tmp_path / "engine.json").write_text(short)
    found = read_engine_record(tmp_path / "engine.json")
    assert found == record
    assert dict(summary(found))["profile prefill"] == "width 1 to 8, best 4"
    assert "plan" not in dict(summary(found))


# --- files


def write(place: Path, data: bytes, error: BaseException | None = None) -> None:
    with written_aside(place) as file:
        file.write(data)
        if error is not None:
            raise error


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "plan"
    with pytest.raises(ZeroDivisionError):
        write(place, b"half", ZeroDivisionError())
    assert list(place.parent.iterdir()) == []
    write(place, b"whole")
    assert place.read_bytes() == b"whole"
    with pytest.raises(BuildError, match="could not be written"):
        write(place, b"half", OSError(errno.ENOSPC, "No space left on device"))
    assert [path.read_bytes() for path in place.parent.iterdir()] == [b"whole"]


class Timings:
    """A library that times kernels: what it was given, and what it knows after."""

    def __init__(self, takes: bool) -> None:
        self.given: list[bytes] = []
        self._takes = takes

    def create_timing_cache(self, data: bytes) -> bytes:
        self.given.append(data)
        return data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return self._takes or not cache

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: self.given[-1] + b"+")


def test_timings_are_kept_beside_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.timing"
    for expected, note in ((b"+", "begun"), (b"++", "read and kept")):
        cache, config = TimingCache(library(ENTERPRISE), path), Timings(takes=True)
        cache.attach(config)
        cache.keep(config)
        assert (path.read_bytes(), cache.note) == (expected, note)
    other = TimingCache(library(ENTERPRISE), path)
    config = Timings(takes=False)
    other.attach(config)
    other.keep(config)
    assert config.given == [b"++", b""]
    assert path.read_bytes() == b"+"
    assert "of another version or GPU" in other.note


def test_a_library_that_times_nothing_keeps_nothing(tmp_path: Path) -> None:
    cache = TimingCache(library(RTX), tmp_path / "model.timing")
    cache.attach(None)
    cache.keep(None)
    assert cache.note.startswith("none: tensorrt-rtx times kernels on the device")
    assert list(tmp_path.iterdir()) == []


def test_profiles_take_part_in_the_order_of_the_plan() -> None:
    made = [
        Profile("a", Range(1, 1, 1), Range(1, 1, 1)),
        Profile("b", Range(2, 2, 2), Range(1, 1, 1)),
    ]
    assert [one.profile for one in compiled(LISTED, made)] == ["a", "b"]
