"""Plans and contexts over a TensorRT in NumPy: what is asked of it, and what its refusals say."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.tensorrt_site import plan_bytes
from specrt.engine.tensorrt import library as library_module
from specrt.engine.tensorrt import plan as trt_plan
from specrt.engine.tensorrt.library import Library, open_library
from specrt.engine.tensorrt.plan import Tensor, TrtContext, TrtPlan, Wants, open_plan, supply
from specrt.errors import EngineError
from specrt.system import Survey
from support.cuda_double import LOST, MACHINE, DoubleDevice
from support.tensorrt_double import (
    CacheDouble,
    ConfigDouble,
    ContextDouble,
    EngineDouble,
    draft_profiles,
    geometry_of,
    library_double,
    module_double,
    record_of,
)
from support.toy import TableEngine

TOY = TableEngine(5, max_length=32)


class Opened:
    """A plan in a file, and the doubles below it."""

    def __init__(self, folder: Path, backend: str = "tensorrt-rtx") -> None:
        self.device = DoubleDevice()
        self.library: Library = library_double(backend, cuda=self.device.cuda)
        self.module = self.library.module
        self.path, self.data = folder / "target.plan", plan_bytes(backend)
        self.path.write_bytes(self.data)
        log, record = self.library.logger.log, record_of(draft_profiles(5))
        self.engine = EngineDouble(self.device.cuda, log, record, TOY)
        self.module.plans[self.data] = lambda log: self.engine

    def plan(self, wants: Wants = trt_plan.WHOLE) -> TrtPlan:
        return open_plan(self.path, self.library, self.device, wants)

    def context(self, profile: int = 1) -> TrtContext:
        plan = self.plan()
        size = plan.scratch_bytes(profile)
        return plan.context(profile, self.device.allocate(size, "working memory"))


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "survey", lambda: MACHINE)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_a_plan_tells_its_tensors(tmp_path: Path, backend: str) -> None:
    opened, rtx = Opened(tmp_path, backend), backend == "tensorrt-rtx"
    plan = opened.plan(Wants(host_code=True))
    assert opened.module.host_code
    geometry = geometry_of(TOY)
    shape = (1, geometry.kv_heads, 32, geometry.head_dim)
    assert plan.tensors["input_ids"] == Tensor((1, -1), "int64", True)
    assert plan.tensors["present_key.0"] == Tensor(shape, "float16", False)
    assert plan.aliases("present_key.0") == ("key.0" if rtx else "")
    assert plan.aliases("argmax") == ""
    assert (plan.profiles, plan.scratch_bytes(1)) == (3, 1000)
    assert plan.ranges(0)["input_ids"] == ((1, 1), (1, 2), (1, 5))
    assert plan.ranges(1)["key.0"] == (shape,) * 3
    for profile, kernels in (0, "none"), (1, "eager"):  # at once only where shapes are fixed
        opened.context(profile)
        config = opened.engine.how
        assert not rtx or config.dynamic_shapes_kernel_specialization_strategy == kernels
    plan.close()
    plan.close()


DOINGS: dict[str, tuple[Callable[[Opened], Any], str]] = {
    "deserialize_cuda_engine": (lambda o: o.plan(), r"cannot open .*target\.plan on this GPU"),
    "create_execution_context": (lambda o: o.context(), r"profile 1 of .* gets no context"),
    "set_optimization_profile_async": (lambda o: o.context(), "profile 1 of .* cannot be chosen"),
    "set_input_shape": (
        lambda o: o.context(0).set_shape("input_ids", (1, 9)),
        r"does not take shape \(1, 9\) for input input_ids \(it takes \(\(1, 1\), ",
    ),
    "set_tensor_address": (
        lambda o: o.context().set_address("key.0", 256), r"address 0x100 for key\.0"
    ),
    "execute_async_v3": (lambda o: o.context().enqueue(), "profile 1 of .* does not run"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOINGS)
@pytest.mark.parametrize("code", [1, LOST])
def test_every_refusal_says_what_tensorrt_said(tmp_path: Path, name: str, code: int) -> None:
    doing, message = DOINGS[name]
    opened = Opened(tmp_path, "tensorrt" if code == LOST else "tensorrt-rtx")
    if code == LOST:
        opened.module.says = "Cuda Runtime (an illegal memory access was encountered)"
    opened.device.cuda.fail(name, code=code)  # type: ignore[arg-type]
    said = "the device is lost" if code == LOST else "Error Code 1: "
    with pytest.raises(EngineError, match=f"{message}.*{said}") as refused:
        doing(opened)
    assert "and more" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "says", "words"),
    [
        (3, "Error Code 1: x", r"another version .*, it was not built for this GPU's .*again"),
        (0, "Cuda Runtime (out of memory)", r"a plan of 0\.00 MiB, and 4\.00 MiB of 4\.00 MiB"),
    ],
)
def test_why_a_plan_does_not_open_is_told(
    tmp_path: Path, flags: int, says: str, words: str
) -> None:
    opened = Opened(tmp_path)
    opened.module.flags, opened.module.says = flags, says
    opened.device.cuda.fail("deserialize_cuda_engine")
    with pytest.raises(EngineError, match=words):
        opened.plan()


@pytest.mark.parametrize(
    ("backend", "data", "message"),
    [
        ("tensorrt-rtx", plan_bytes("tensorrt"), "plan of TensorRT; backend tensorrt-rtx runs .*"
                                                 "backend tensorrt, or"),
        ("tensorrt", plan_bytes("tensorrt-rtx"), "plan of TensorRT for RTX; backend tensorrt runs"),
        ("tensorrt-rtx", b"PK\x03\x04" + bytes(60), "no TensorRT plan: it begins with b'PK"),
        ("tensorrt-rtx", b"", "it is empty"),
        ("tensorrt-rtx", plan_bytes("tensorrt-rtx")[:-1], "damaged: 63 bytes of 64"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_plan_never_reaches_tensorrt(
    tmp_path: Path, backend: str, data: bytes, message: str
) -> None:
    opened = Opened(tmp_path, backend)
    opened.path.write_bytes(data)
    with pytest.raises(EngineError, match=message) as refused:
        opened.plan()
    assert "specrt build RECIPE --backend" in str(refused.value)
    assert not opened.device.calls["deserialize_cuda_engine"]
    opened.path.unlink()
    with pytest.raises(EngineError, match="cannot be read"):
        opened.plan()


def test_tensors_that_the_runtime_cannot_feed_are_refused(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    with pytest.raises(EngineError, match=r"profile 7 of .* is not there; it has 3"):
        opened.plan().context(7, 0)
    opened.engine.kinds["key.0"] = "INT4"
    with pytest.raises(EngineError, match=r"tensor key\.0 is INT4; expected one of FLOAT"):
        opened.plan()
    opened.engine.kinds.clear()
    opened.engine.location = "HOST"
    with pytest.raises(EngineError, match="wanted in host memory"):
        opened.plan()


def test_without_a_driver_there_is_no_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for one, TensorRT itself would end the process."""
    opened = Opened(tmp_path)
    monkeypatch.setattr(library_module, "survey", lambda: Survey(problem="no NVIDIA driver"))
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU only: no NVIDIA driver"):
        opened.plan()


def test_kernels_are_kept_for_the_next_time(tmp_path: Path) -> None:
    kept = tmp_path / "target.kernels"

    def run(made: bytes) -> bytes:
        """Open, make kernels in one context, close; return what another context begins with."""
        opened = Opened(tmp_path)
        plan = opened.plan()
        for profile in (0, 1):
            scratch = opened.device.allocate(plan.scratch_bytes(profile), "working memory")
            plan.context(profile, scratch)
        cache = opened.engine.how.cache
        begun, cache.held = cache.held, made or cache.held
        plan.close()
        return bytes(begun)

    assert run(b"kernels 1") == b""
    assert kept.read_bytes() == b"kernels 1"
    assert run(b"") == b"kernels 1"
    kept.write_bytes(b"of another version")
    assert run(b"") == b""
    assert kept.read_bytes() == b"kernels"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target.kernels", "target.plan"]


# Weights that are not in the plan


def test_streamed_weights_get_what_the_library_finds_right(tmp_path: Path) -> None:
    opened = Opened(tmp_path, "tensorrt")
    opened.plan(Wants(streaming=True))
    assert opened.engine.weight_streaming_budget_v2 == 1 << 20

    refusing = {"weight_streaming_budget_v2": property(lambda self: -1, lambda self, budget: None)}
    opened.engine.__class__ = type("Refusing", (EngineDouble,), refusing)
    with pytest.raises(EngineError, match=r"cannot stream the weights of .*target\.plan with 1048"):
        opened.plan(Wants(streaming=True))


@pytest.mark.parametrize("refused", ["", "parse", "refit"])
def test_a_stripped_plan_is_filled_from_the_graph_beside_it(tmp_path: Path, refused: str) -> None:
    calls: list[str] = []

    def answer(name: str) -> bool:
        calls.append(name)
        if name == refused:
            found.logger.log(1, "Error Code 1: some reason")
        return name != refused

    refitter = SimpleNamespace(
        refit_from_file=lambda path: answer("parse"), refit_cuda_engine=lambda: answer("refit")
    )
    names = dict.fromkeys(("Refitter", "OnnxParserRefitter"), lambda *given: refitter)
    found, plan = library_double(**names), tmp_path / "engine.plan"
    with pytest.raises(EngineError, match=r"engine\.onnx is missing, and the plan beside it holds"):
        supply(None, plan, found, Wants(stripped=True))
    (tmp_path / "engine.onnx").write_bytes(b"a graph")
    if refused:
        with pytest.raises(EngineError, match=r"cannot fill the plan from .*: Error Code 1: some"):
            supply(None, plan, found, Wants(stripped=True))
    else:
        supply(None, plan, found, Wants(stripped=True))
        assert calls == ["parse", "refit"]


# The real library


def test_a_real_plan_begins_as_expected(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    real = open_library("tensorrt-rtx")
    builder = trt.Builder(real.logger)
    network = builder.create_network(0)
    network.mark_output(
        network.add_identity(network.add_input("x", trt.float32, (4,))).get_output(0)
    )
    data = bytes(builder.build_serialized_network(network, builder.create_builder_config()))
    trt_plan.check_header(tmp_path, data[:64], len(data), real, "")
    with pytest.raises(EngineError, match=f"{len(data) - 1} bytes of {len(data)}"):
        trt_plan.check_header(tmp_path, data[:64], len(data) - 1, real, "")


def test_the_double_has_nothing_that_tensorrt_has_not() -> None:
    """Every name, and every call with as many arguments."""
    trt = pytest.importorskip("tensorrt_rtx")
    ours = {"answer", "run", "update", "tell", "cache", "array"}
    for double, real in (
        (EngineDouble, trt.ICudaEngine), (ContextDouble, trt.IExecutionContext),
        (ConfigDouble, trt.IRuntimeConfig), (CacheDouble, trt.IRuntimeCache),
    ):  # fmt: skip
        for name in [n for n in vars(double) if not n.startswith("_") and n not in ours]:
            called, own = getattr(real, name, None), getattr(double, name)
            assert called is not None or name == "held", f"{real} has no {name}"
            if inspect.isfunction(own):
                taken = re.findall(rf"{name}\(self: [\w.]+(.*)\) ->", called.__doc__)
                count = len(inspect.signature(own).parameters) - 1
                assert count in {len(re.findall(r", \w+: ", one)) for one in taken}, name
    for name, own in vars(module_double("tensorrt-rtx")).items():
        if isinstance(own, SimpleNamespace):
            assert vars(own).keys() <= set(dir(getattr(trt, name)))
