"""Plans and contexts over a TensorRT of Python objects that answer as told."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cuda_double import MACHINE, Code, CudaDouble
from specrt.engine.tensorrt import library as kernels
from specrt.engine.tensorrt import library as library_module
from specrt.engine.tensorrt import plan as trt_plan
from specrt.engine.tensorrt.cuda import CudaDevice
from specrt.engine.tensorrt.library import FLAVOURS, Library, describe
from specrt.engine.tensorrt.plan import Plan, Tensor, TrtContext, TrtPlan, open_plan
from specrt.errors import EngineError
from specrt.system import Survey

Members = IntEnum("Members", ["VERSION_MISMATCH", "UNSUPPORTED_CC"], start=1)
SHAPES = {
    "input_ids": ("INT64", (1, -1), ((1, 1), (1, 5), (1, 5))),
    "key.0": ("HALF", (1, 2, 8, 4), ((1, 2, 8, 4),) * 3),
    "argmax": ("INT64", (1, -1), None),
    "present_key.0": ("HALF", (1, 2, 8, 4), None),
}


class World:
    """What the doubles answer, and what they were asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse: set[str] = set()
        self.says = "Error Code 1: something is wrong\nand more"
        self.logger: Any = None
        self.flags = 0
        self.scratch = 512
        self.location = "DEVICE"
        self.kinds: dict[str, str] = {}

    def answer(self, name: str, *given: Any) -> bool:
        self.calls.append((name, *given))
        if name in self.refuse:
            self.logger.log(1, self.says)
        return name not in self.refuse

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def context_of(world: World) -> Any:
    class Context:
        def set_device_memory(self, memory: int, size: int) -> None:
            world.answer("memory", memory, size)

        def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
            return world.answer("profile", profile, stream)

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            return world.answer("shape", name, shape)

        def set_tensor_address(self, name: str, address: int) -> bool:
            return world.answer("address", name, address)

        def execute_async_v3(self, stream: int) -> bool:
            return world.answer("run", stream)

        def is_stream_capturable(self, stream: int) -> bool:
            return world.answer("capturable", stream)

    return Context


def engine_of(world: World, context: Any, module: Any) -> Any:  # noqa: C901
    class Engine:
        num_io_tensors, num_optimization_profiles = len(SHAPES), 2

        def get_tensor_name(self, index: int) -> str:
            return list(SHAPES)[index]

        def get_tensor_dtype(self, name: str) -> Any:
            return SimpleNamespace(name=world.kinds.get(name, SHAPES[name][0]))

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return SHAPES[name][1]

        def get_tensor_mode(self, name: str) -> str:
            return "in" if SHAPES[name][2] else "out"

        def get_tensor_location(self, name: str) -> str:
            return world.location

        def get_tensor_profile_shape(self, name: str, profile: int) -> Any:
            shapes: Any = SHAPES[name][2]
            least, best, most = shapes
            return (most, most, most) if profile else (least, best, most)

        def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
            return world.scratch + profile

        def get_aliased_input_tensor(self, name: str) -> str | None:
            return "key.0" if name == "present_key.0" else None

        def create_runtime_config(self) -> Any:
            return module.IRuntimeConfig()

        def create_execution_context(self, how: Any) -> Any:
            return context() if world.answer("context", how) else None

    return Engine


class Cache:
    """Kernels made at run time; the library takes back what it wrote itself."""

    def __init__(self, world: World) -> None:
        self.world, self.held = world, b""

    def deserialize(self, data: bytes) -> bool:
        fits = data.startswith(b"kernels")
        self.held = data if fits else b""
        return fits

    def serialize(self) -> bytes:
        return self.held or b"kernels of " + str(len(self.world.calls)).encode()


def fake(world: World, rtx: bool) -> Any:
    """Return a module like either library; the enterprise one has less."""
    module = SimpleNamespace(
        __version__="1.7.1.116" if rtx else "10.3.0",
        ILogger=type("ILogger", (), {}),
        IBuilderConfig=type("IBuilderConfig", (), {}),
        TensorLocation=SimpleNamespace(DEVICE="DEVICE"),
        TensorIOMode=SimpleNamespace(INPUT="in"),
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="ours"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager", NONE="none"),
        CudaGraphStrategy=SimpleNamespace(DISABLED="off"),
        EngineInvalidityDiagnostics=Members,
    )
    context = context_of(world)

    class Config:
        dynamic_shapes_kernel_specialization_strategy = cuda_graph_strategy = ""

        def set_execution_context_allocation_strategy(self, how: Any) -> None:
            self.how = how

        def create_runtime_cache(self) -> Any:
            return Cache(world)

        def set_runtime_cache(self, cache: Any) -> bool:
            return world.answer("cache", cache)

    class Runtime:
        def __init__(self, logger: Any) -> None:
            world.logger = logger

        def deserialize_cuda_engine(self, data: Any) -> Any:
            return engine() if world.answer("open", bytes(data)) else None

        def get_engine_validity(self, data: Any) -> tuple[int, int]:
            return 2, world.flags

    module.IRuntimeConfig = Config
    engine = engine_of(world, context, module)
    if not rtx:
        del context.is_stream_capturable, engine.get_aliased_input_tensor
        del engine.create_runtime_config, Runtime.get_engine_validity, module.IRuntimeConfig
    module.Runtime, module.ICudaEngine, module.IExecutionContext = Runtime, engine, context
    return module


class Opened:
    """A plan that was opened, and the worlds below it."""

    def __init__(self, folder: Path, rtx: bool = True, head: bytes = b"", size: int = 64) -> None:
        self.world, self.cuda = World(), CudaDouble()
        flavour = FLAVOURS["tensorrt-rtx" if rtx else "tensorrt"]
        self.library: Library = describe(flavour, fake(self.world, rtx))
        self.device = CudaDevice(runtime=self.cuda, devices=MACHINE)
        self.path = folder / "target.plan"
        mark = head or flavour.magics[0]
        self.path.write_bytes(mark + bytes(12) + (64).to_bytes(8, "little") + bytes(40))
        self.path.write_bytes(self.path.read_bytes()[:size])

    def plan(self) -> TrtPlan:
        kind: type[Plan] = TrtPlan  # for the type checker to say
        assert kind is TrtPlan
        return open_plan(self.path, self.library, self.device)

    def context(self, profile: int = 1) -> TrtContext:
        return self.plan().context(profile, 4096)


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "survey", lambda: MACHINE)


@pytest.mark.parametrize("rtx", [True, False])
def test_a_plan_tells_its_tensors_and_contexts_run_it(tmp_path: Path, rtx: bool) -> None:
    opened = Opened(tmp_path, rtx)
    world, plan = opened.world, opened.plan()
    assert world.named("open") == [(opened.path.read_bytes(),)]
    assert plan.tensors["input_ids"] == Tensor((1, -1), "int64", True)
    assert plan.tensors["present_key.0"] == Tensor((1, 2, 8, 4), "float16", False)
    assert plan.aliases("present_key.0") == ("key.0" if rtx else "")
    assert plan.aliases("argmax") == ""
    assert (plan.profiles, plan.scratch_bytes(1)) == (2, 513)
    assert plan.ranges(0)["input_ids"] == ((1, 1), (1, 5), (1, 5))
    assert plan.ranges(1)["key.0"] == ((1, 2, 8, 4),) * 3
    assert set(plan.ranges(1)) == {"input_ids", "key.0"}
    context = plan.context(1, 4096)
    made = [call[0] for call in world.calls[1:] if call[0] != "cache"]
    assert made == ["context", "profile", "memory"]
    assert world.named("profile") == [(1, opened.device.stream)]
    assert world.named("memory") == [(4096, 513)]
    context.set_shape("input_ids", (1, 5))
    context.set_address("input_ids", 256)
    assert context.capturable()
    context.enqueue()
    assert world.named("shape") == [("input_ids", (1, 5))]
    assert world.named("address") == [("input_ids", 256)]
    assert world.named("run") == [(opened.device.stream,)]
    plan.close()
    plan.close()


@pytest.mark.parametrize(("profile", "kernels"), [(0, "none"), (1, "eager")])
def test_kernels_are_made_at_once_only_where_shapes_are_fixed(
    tmp_path: Path, profile: int, kernels: str
) -> None:
    opened = Opened(tmp_path)
    opened.context(profile)
    ((config,),) = opened.world.named("context")
    assert config.dynamic_shapes_kernel_specialization_strategy == kernels
    assert (config.how, config.cuda_graph_strategy) == ("ours", "off")


DOINGS: dict[str, tuple[Callable[[Opened], Any], str]] = {
    "open": (lambda o: o.plan(), r"cannot open .*target\.plan on this GPU.*build it again"),
    "context": (lambda o: o.context(), r"profile 1 of .* gets no context"),
    "profile": (lambda o: o.context(), r"profile 1 of .* cannot be chosen"),
    "shape": (
        lambda o: o.context(0).set_shape("input_ids", (1, 9)),
        r"does not take shape \(1, 9\) for input input_ids \(it takes \(\(1, 1\), ",
    ),
    "address": (lambda o: o.context().set_address("key.0", 3), r"address 0x3 for key\.0"),
    "run": (lambda o: o.context().enqueue(), r"profile 1 of .* does not run"),
}


@pytest.mark.parametrize("rtx", [True, False])
@pytest.mark.parametrize("name", sorted(DOINGS))
def test_every_refusal_says_what_tensorrt_said(tmp_path: Path, name: str, rtx: bool) -> None:
    doing, message = DOINGS[name]
    opened = Opened(tmp_path, rtx)
    opened.world.refuse = {name}
    with pytest.raises(EngineError, match=message) as refused:
        doing(opened)
    assert "Error Code 1: something is wrong" in str(refused.value)
    assert "and more" not in str(refused.value)
    opened.world.says = "Cuda Runtime (an illegal memory access was encountered)"
    with pytest.raises(EngineError, match="the device is lost"):
        doing(opened)


def test_tensorrt_for_rtx_says_what_is_wrong_with_a_plan(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.world.refuse, opened.world.flags = {"open"}, 3
    with pytest.raises(EngineError, match=r"another version .*, it was not built for this GPU's"):
        opened.plan()


def test_too_little_memory_is_told_with_what_there_is(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.world.refuse, opened.world.says = {"open"}, "Cuda Runtime (out of memory)"
    with pytest.raises(EngineError, match=r"a plan of 0\.00 MiB, and 1\.00 GiB of 8\.00 GiB"):
        opened.plan()


@pytest.mark.parametrize(
    ("rtx", "head", "size", "message"),
    [
        (True, b"ptrt", 64, "plan of TensorRT; backend tensorrt-rtx runs .*backend tensorrt, or"),
        (False, b"vtrt", 64, "plan of TensorRT for RTX; backend tensorrt runs"),
        (True, b"PK\x03\x04", 64, "damaged or no TensorRT plan: it begins with b'PK"),
        (False, b"\0\0\0\0", 64, "damaged or no TensorRT plan"),
        (True, b"", 0, "it is empty"),
        (True, b"", 63, "damaged: 63 bytes of 64"),
    ],
)
def test_a_file_that_is_no_plan_never_reaches_tensorrt(
    tmp_path: Path, rtx: bool, head: bytes, size: int, message: str
) -> None:
    opened = Opened(tmp_path, rtx, head, size)
    with pytest.raises(EngineError, match=message) as refused:
        opened.plan()
    assert "specrt build RECIPE --backend" in str(refused.value)
    assert opened.world.calls == []
    opened.path.unlink()
    with pytest.raises(EngineError, match="cannot be read"):
        opened.plan()


def test_tensors_that_the_runtime_cannot_feed_are_refused(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.world.kinds["key.0"] = "INT4"
    with pytest.raises(EngineError, match=r"tensor key\.0 is INT4; expected one of FLOAT"):
        opened.plan()
    opened.world.kinds.clear()
    opened.world.location = "HOST"
    with pytest.raises(EngineError, match="wanted in host memory"):
        opened.plan()
    opened.world.location = "DEVICE"
    with pytest.raises(EngineError, match=r"profile 2 of .* is not there; it has 2"):
        opened.context(2)


def test_without_a_driver_there_is_no_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(tmp_path)
    monkeypatch.setattr(library_module, "survey", lambda: Survey(problem="no NVIDIA driver"))
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU only: no NVIDIA driver"):
        opened.plan()
    assert opened.world.logger is None


def test_a_lost_device_is_seen_before_the_plan(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    opened.cuda.fail["cudaMemGetInfo"] = Code.cudaErrorIllegalAddress
    with pytest.raises(EngineError, match="the device is lost"):
        opened.device.available()


def test_kernels_are_kept_for_the_next_time(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    kept = opened.path.with_suffix(".kernels")
    plan = opened.plan()
    for profile in (0, 1):
        plan.context(profile, 0)
    caches = opened.world.named("cache")
    assert len({id(cache) for (cache,) in caches}) == 1, "one for all contexts of a plan"
    assert len(caches) == 2
    plan.close()
    written = kept.read_bytes()
    assert written.startswith(b"kernels of")
    again = opened.plan()
    again.context(0, 0)
    again.close()
    assert kept.read_bytes() == written, "nothing new was made"
    kept.write_bytes(b"of another version")
    other = opened.plan()
    other.context(0, 0)
    other.close()
    assert kept.read_bytes().startswith(b"kernels of")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target.kernels", "target.plan"]


def test_a_real_plan_begins_as_expected(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    real = library_module.open_library("tensorrt-rtx")
    builder = trt.Builder(real.logger)
    network = builder.create_network(0)
    given = network.add_input("x", trt.float32, (1, 4))
    layer = network.add_activation(given, trt.ActivationType.RELU)
    network.mark_output(layer.get_output(0))
    data = bytes(builder.build_serialized_network(network, builder.create_builder_config()))
    path = tmp_path / "real.plan"
    trt_plan.check_header(path, data[:64], len(data), real, "")
    with pytest.raises(EngineError, match=f"{len(data) - 1} bytes of {len(data)}"):
        trt_plan.check_header(path, data[:64], len(data) - 1, real, "")


def test_all_that_is_used_of_tensorrt_is_there() -> None:
    """Walk the source: every name, and every call with a number of arguments that is taken."""
    trt = pytest.importorskip("tensorrt_rtx")
    owners = {
        "engine": trt.ICudaEngine, "_engine": trt.ICudaEngine, "runtime": trt.Runtime,
        "handle": trt.IExecutionContext, "_context": trt.IExecutionContext,
        "config": trt.IRuntimeConfig, "module": trt, "cache": trt.IRuntimeCache,
        "_cache": trt.IRuntimeCache,
        "choices": trt.DynamicShapesKernelSpecializationStrategy,
    }  # fmt: skip
    sources = [Path(one.__file__).read_text(encoding="utf-8") for one in (trt_plan, kernels)]
    tree = ast.parse(
        "\n".join(s.replace("from __future__ import annotations", "") for s in sources)
    )
    seen = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
        if name in owners and not node.attr.startswith("_"):
            assert hasattr(owners[name], node.attr), f"{name}.{node.attr}"
            seen.add(node.attr)
        if isinstance(owner, ast.Attribute) and getattr(owner.value, "id", "") == "module":
            assert hasattr(getattr(trt, owner.attr), node.attr), ast.unparse(node)
    assert {"execute_async_v3", "set_device_memory", "get_engine_validity", "INPUT"} & seen
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        function = call.func
        on: Any = getattr(function, "value", None)
        name = on.id if isinstance(on, ast.Name) else getattr(on, "attr", "")
        if isinstance(function, ast.Attribute) and name in owners:
            called = getattr(owners[name], function.attr)
            if isinstance(called, type):  # a class says what it takes elsewhere
                continue
            documented = called.__doc__
            taken = re.findall(rf"{function.attr}\(self: [\w.]+(.*)\) ->", documented)
            assert len(call.args) in {len(re.findall(r", \w+: ", one)) for one in taken}, name
