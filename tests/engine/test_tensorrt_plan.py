"""TensorRT's two libraries and plans over them: how they are opened, and what is said if not."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrt.engine.tensorrt import library
from specrt.engine.tensorrt.device import BINDINGS
from specrt.engine.tensorrt.library import FLAVOURS, lacks_to_build, lacks_to_run, open_library
from specrt.engine.tensorrt.plan import (
    NO_SUCH_GPU,
    WHOLE,
    TrtPlan,
    Wants,
    check_header,
    open_plan,
    supply,
)
from specrt.errors import EngineError
from specrt.system.gpu import Gpu, Survey
from support.gpu_double import (
    MACHINE,
    CacheDouble,
    ConfigDouble,
    ContextDouble,
    DoubleDevice,
    EngineDouble,
    draft_profiles,
    library_double,
    module_double,
    plan_bytes,
    record_of,
)
from support.toy import TableEngine

A_GRAPH = b"\x12\x07a graph"
"""One without nodes, made by `a graph`."""
NONE = Survey(problem="no NVIDIA driver: x is not there")


def survey_of(capability: str) -> Survey:
    return Survey((Gpu(0, "A GPU", capability, 8 << 30),), "", (13, 0), "580.65.06")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return what is installed: a module, or what its import raises."""
    have: dict[str, Any] = {}
    monkeypatch.setattr(library, "is_installed", lambda name: FLAVOURS[name].module in have)

    def imported(name: str) -> Any:
        if isinstance(have[name], Exception):
            raise have[name]
        return have[name]

    monkeypatch.setattr(importlib, "import_module", imported)
    open_library.cache_clear()
    yield have
    open_library.cache_clear()


def test_a_library_that_does_not_open_is_told_with_the_remedy(installed: dict[str, Any]) -> None:
    def refused(said: str, name: str = "tensorrt-rtx") -> None:
        with pytest.raises(EngineError, match=said):
            open_library(name)

    refused("'tensort' is not a TensorRT backend; did you mean", "tensort")
    refused("not installed: it comes with JetPack", "tensorrt")
    refused("not installed: `pip install tensorrt-rtx`$")
    installed["tensorrt"] = module_double()
    refused("is installed here, and backend tensorrt would use it")
    installed["tensorrt_rtx"] = ImportError("libx.so: cannot open\nand more")
    refused(r"cannot be imported \(libx.so: cannot open\)")
    installed["tensorrt_rtx"] = module_double("tensorrt-rtx")
    assert open_library("tensorrt-rtx").backend == "tensorrt-rtx"  # a failure is not remembered


def test_the_form_follows_the_version() -> None:
    assert not library_double("tensorrt", "10.13.3.9").native
    assert library_double("tensorrt", "10.15.0rc1").native
    assert library_double("tensorrt-rtx", "1.7.1.116").native


@pytest.mark.parametrize(
    ("backend", "found", "run", "build"),
    [
        ("tensorrt", NONE, "x is not there; install the NVIDIA driver", "builds on the GPU"),
        ("tensorrt", survey_of("9.0"), "", ""),
        ("tensorrt-rtx", NONE, "install the NVIDIA driver", ""),
        ("tensorrt-rtx", survey_of("8.9"), "", ""),
        ("tensorrt-rtx", survey_of("9.0"), "compute capability 7.5, 8.9, 12.0, 12.1", ""),
    ],
)
def test_what_is_lacking_is_told_with_the_remedy(
    installed: dict[str, Any], backend: str, found: Survey, run: str, build: str
) -> None:
    config = SimpleNamespace()
    if backend == "tensorrt-rtx":
        config.set_compute_capability = None
    names = dict.fromkeys(("NONE", "CURRENT", "SM75", "SM89", "SM121", "SM120"))
    capabilities = SimpleNamespace(__members__=names)
    installed[FLAVOURS[backend].module] = module_double(
        backend, IBuilderConfig=config, ComputeCapability=capabilities
    )
    installed[BINDINGS] = "installed"
    for lacks, said in (
        (lacks_to_run(backend, found), run), (lacks_to_build(backend, found), build)
    ):  # fmt: skip
        assert bool(lacks) is bool(said)
        assert said in lacks
    del installed[BINDINGS]
    assert "cannot be imported" in lacks_to_run(backend, survey_of("8.9"))


# Plans


class Opened:
    """A plan in a file, and the doubles below it."""

    def __init__(self, folder: Path, backend: str = "tensorrt-rtx") -> None:
        self.device = DoubleDevice()
        self.library = library_double(backend, cuda=self.device.cuda)
        self.path, data = folder / "target.plan", plan_bytes(backend)
        self.path.write_bytes(data)
        log, record = self.library.logger.log, record_of(draft_profiles(5))
        self.engine = EngineDouble(self.device.cuda, log, record, TableEngine(5, max_length=32))
        self.library.module.plans[data] = lambda log: self.engine

    def plan(self, wants: Wants = WHOLE) -> TrtPlan:
        return open_plan(self.path, self.library, self.device, wants)


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "survey", lambda: MACHINE)


@pytest.mark.parametrize(
    ("flags", "says", "words"),
    [
        (3, "Error 1: x\nand more", r"Error 1: x \(it was built by another version .*, it was not"
                                    r" built for this GPU's .*\); build it again here"),
        (2, f"RTX {NO_SUCH_GPU}", r"GPU's compute capability\); build it for tensorrt or ort-cuda"),
        (0, "Cuda Runtime (out of memory)", r"a plan of 0\.00 MiB, and 4\.00 MiB of 4\.00 MiB"),
    ],
)  # fmt: skip
def test_why_a_plan_does_not_open_is_told(
    tmp_path: Path, flags: int, says: str, words: str
) -> None:
    opened = Opened(tmp_path)
    opened.library.module.flags, opened.library.module.says = flags, says
    opened.device.cuda.fail("deserialize_cuda_engine")
    with pytest.raises(EngineError, match=words):
        opened.plan()


@pytest.mark.parametrize(
    ("backend", "data", "message"),
    [
        ("tensorrt-rtx", plan_bytes("tensorrt"), "plan of TensorRT; .* open it with backend tenso"),
        ("tensorrt", b"PK\x03\x04" + bytes(60), "no TensorRT plan: it begins with b'PK"),
        ("tensorrt-rtx", b"", "it is empty"),
        ("tensorrt-rtx", plan_bytes("tensorrt-rtx")[:-1], "damaged: 63 bytes of 64"),
        ("tensorrt", None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_plan_never_reaches_tensorrt(
    tmp_path: Path, backend: str, data: bytes | None, message: str
) -> None:
    opened = Opened(tmp_path, backend)
    opened.path.unlink()
    if data is not None:
        opened.path.write_bytes(data)
    with pytest.raises(EngineError, match=f"{message}.*specrt build RECIPE --backend"):
        opened.plan()
    assert not opened.device.calls["deserialize_cuda_engine"]


def test_without_a_driver_there_is_no_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for one, TensorRT itself would end the process."""
    opened = Opened(tmp_path)
    monkeypatch.setattr(library, "survey", lambda: Survey(problem="no NVIDIA driver"))
    with pytest.raises(EngineError, match="runs on an NVIDIA GPU only: no NVIDIA driver"):
        opened.plan()


def test_kernels_are_kept_for_the_next_time(tmp_path: Path) -> None:
    """They are made at once only where all shapes are fixed: a wide pass never waits for them."""
    kept = tmp_path / "target.kernels"

    def run(made: bytes) -> bytes:
        """Open, make kernels in one context, close; return what another context begins with."""
        opened = Opened(tmp_path)
        plan = opened.plan()
        for profile, kernels in (0, "none"), (1, "eager"):
            plan.context(profile, opened.device.allocate(plan.scratch_bytes, "x"))
            assert opened.engine.how.dynamic_shapes_kernel_specialization_strategy == kernels
        cache = opened.engine.how.cache
        begun, cache.held = cache.held, made or cache.held
        plan.close()
        return bytes(begun)

    assert run(b"kernels 1") == b""
    assert kept.read_bytes() == b"kernels 1"
    assert run(b"") == b"kernels 1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["target.kernels", "target.plan"]
    kept.chmod(0o666)
    assert run(b"kernels 2") == b""
    assert run(b"") == b"kernels 2"
    with kept.open("r+b") as file:
        file.truncate(1 << 40)
    assert run(b"") == b""
    kept.unlink()
    os.mkfifo(kept)
    assert run(b"") == b""
    kept.unlink()
    kept.symlink_to("/dev/zero")
    assert run(b"kernels 3") == b""
    assert (kept.read_bytes(), kept.is_symlink()) == (b"kernels 3", False)


def test_a_plan_is_opened_with_what_it_was_built_to_want(tmp_path: Path) -> None:
    opened = Opened(tmp_path, "tensorrt")
    opened.plan(Wants(host_code=True, streaming=True))
    assert opened.library.module.host_code
    assert opened.engine.weight_streaming_budget_v2 == 1 << 20


def test_a_stripped_plan_is_filled_from_the_graph_beside_it(tmp_path: Path) -> None:
    answers = {"parse": True, "refit": True}
    refitter = SimpleNamespace(
        refit_from_file=lambda path: Path(path).read_bytes() == A_GRAPH and answers["parse"],
        refit_cuda_engine=lambda: answers["refit"],
    )
    names = dict.fromkeys(("Refitter", "OnnxParserRefitter"), lambda *given: refitter)
    found, plan = library_double(**names), tmp_path / "engine.plan"
    with pytest.raises(
        EngineError, match=r"engine\.onnx is missing, and the plan next to it holds"
    ):
        supply(None, plan, found, Wants(stripped=True))
    (tmp_path / "engine.onnx").write_bytes(A_GRAPH)
    supply(None, plan, found, Wants(stripped=True))
    for refused in answers:
        answers[refused] = False
        with pytest.raises(EngineError, match=r"cannot fill the plan from .*engine\.onnx: no"):
            supply(None, plan, found, Wants(stripped=True))
        answers[refused] = True


# The real library


def test_the_real_library_and_its_plans_are_as_written_down(tmp_path: Path) -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    real = open_library("tensorrt-rtx")
    tells = (real.tells_validity, real.tells_capturable, real.tells_aliases)
    assert (*tells, real.native, real.has_runtime_config) == (True,) * 5
    assert {"7.5", "8.6", "12.0"} <= set(real.capabilities)
    builder = trt.Builder(real.logger)  # it must outlive its networks
    network = builder.create_network(0)
    with real.messages() as log:
        assert not trt.OnnxParser(network, real.logger).parse(b"no graph")
    assert log.first_error
    network.mark_output(
        network.add_identity(network.add_input("x", trt.float32, (4,))).get_output(0)
    )
    data = bytes(builder.build_serialized_network(network, builder.create_builder_config()))
    check_header(tmp_path, data[:64], len(data), real, "")
    with pytest.raises(EngineError, match=f"{len(data) - 1} bytes of {len(data)}"):
        check_header(tmp_path, data[:64], len(data) - 1, real, "")


def test_the_double_has_nothing_that_tensorrt_has_not() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    ours = {"answer", "run", "update", "tell", "cache", "array", "held", "sizes"}
    for double, real in (
        (EngineDouble, trt.ICudaEngine), (ContextDouble, trt.IExecutionContext),
        (ConfigDouble, trt.IRuntimeConfig), (CacheDouble, trt.IRuntimeCache),
    ):  # fmt: skip
        assert {name for name in vars(double) if name[0] != "_"} - ours <= set(dir(real))
    for name, own in vars(module_double("tensorrt-rtx")).items():
        if isinstance(own, SimpleNamespace):
            assert vars(own).keys() <= set(dir(getattr(trt, name)))
