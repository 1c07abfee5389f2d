"""The native TensorRT part over doubles of TensorRT and CUDA: nothing here has run on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cpp.conftest import Library, run_program
from cpp.native_calls import Document
from specrt.engine.tensorrt import engine_record
from specrt.engine.tensorrt.engine_record import (
    BuildSetting,
    DeviceRecord,
    EngineRecord,
    Profile,
    Range,
)
from specrt.engine.tensorrt.passes import expected
from specrt.geometry import Geometry
from support.gpu_double import GAMMAS, PREFILL, draft_profiles, target_profiles

FLAVOURS = {"tensorrt": "tensorrt_check", "rtx": "tensorrt_rtx_check"}
RTX_VERSION = "1.7.1.116"
SHAPE = {"layers": 3, "kv_heads": 2, "head_dim": 5, "vocabulary": 61, "max_length": 150}
MEMORIES = 6
"""How often an engine takes memory of the device, and waits for it."""
STREAMED = (BuildSetting("weight_streaming", "True"),)
BUNDLE, ENGINE, UNSUPPORTED = 4, 5, 7
"""Statuses of specrt.h."""


@dataclass
class Site:
    """A bundle of one plan in a folder, as the checks read it, and the machine it is opened on."""

    folder: Path
    library: Library
    flavour: str = "tensorrt"
    record: EngineRecord = field(
        default_factory=lambda: EngineRecord(
            1, "tensorrt", "10.3.0.26", "native", "fp16", target_profiles(GAMMAS, PREFILL),
            candidates=3, confidence=True, gpu="Orin", gpu_capability="8.7",
        )
    )  # fmt: skip
    machine: Document = field(
        default_factory=lambda: {
            "devices": 1, "gpu": "Orin", "major": 8, "minor": 7, "integrated": False,
            "memory": 1 << 28, "version": [10, 3, 0, 26], "fails": "", "after": 0,
            "error": 700, "said": "internal error",
        }
    )  # fmt: skip
    case: Document = field(default_factory=dict)
    plan: Document = field(default_factory=dict)
    damage: Callable[[bytes], bytes] = bytes

    def change(
        self, *, rtx: bool = False, machine: Any = None, case: Any = None, plan: Any = None,
        damage: Callable[[bytes], bytes] | None = None, **record: Any,
    ) -> None:  # fmt: skip
        """Change the machine, the case, the plan alone, or the record and with it the plan."""
        if rtx:
            self.flavour = "rtx"
            rest = {"backend": "tensorrt-rtx", "version": RTX_VERSION}
            record = {**rest, "gpu": "", "gpu_capability": "", **record}
            self.machine["version"] = [1, 7, 1, 116]
        self.record = replace(self.record, **record)
        self.machine |= machine or {}
        self.case |= case or {}
        self.plan |= plan or {}
        self.damage = damage or self.damage

    def write(self) -> None:
        case = {
            **SHAPE, "backend": self.record.backend, "batch": 1, "prefill": PREFILL,
            "gammas": sorted(GAMMAS), "machine": self.machine,
            "files": ["engine.plan", "engine.json"], **self.case,
        }  # fmt: skip
        text = json.dumps(_plan_of(self.record, **self.plan)).encode()
        mark = b"vtrt" if self.record.backend == "tensorrt-rtx" else b"ptrt"
        data = mark + bytes(12) + (24 + len(text)).to_bytes(8, "little") + text
        (self.folder / "engine.plan").write_bytes(self.damage(data))
        (self.folder / "engine.json").write_text(self.record.to_json())
        (self.folder / "case.json").write_text(json.dumps(case))

    def check(self, name: str, *, written: bool = False) -> str:
        if not written:
            self.write()
        return run_program([self.library.program(FLAVOURS[self.flavour]), name, self.folder])

    def refused(self, status: int, *parts: str, written: bool = False) -> None:
        """Check the status of opening, and what must be in its message of one line."""
        message = self.check("open", written=written)
        assert message.startswith(f"{status} "), message
        assert message.count("\n") == 1, message
        for part in parts:
            assert part in message, message


NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 7, "int64": 8}
"""Of TensorRT's element types."""


def _plan_of(
    record: EngineRecord, *, batch: int = 1, profiles: Any = None, more: Document | None = None,
    aliases: Document | None = None, compute: str = "", confidence: bool = True, **shape: int,
) -> Document:  # fmt: skip
    """Return the plan of a record, of which something may be changed."""
    confidence = record.confidence and confidence
    of = replace(record, compute=compute or record.compute, confidence=confidence)
    layers, heads, *sizes = {**SHAPE, **shape}.values()
    geometry = Geometry.uniform(layers, heads, heads, *sizes, (0,) * layers)
    tensors: Document = {
        name: {"shape": tensor.shape, "type": NUMBERS[tensor.type], "is_input": tensor.is_input,
               "on_host": False}
        for name, tensor in expected(of, geometry, batch, sizes[-1]).items()
    }  # fmt: skip
    native = record.form == "native"
    written = {name: name[8:] for name in tensors if native and name.startswith("present_")}
    for name, fields in (more or {}).items():
        tensors[name] = {**tensors.get(name, tensors["start"]), **fields}
    return {
        "tensors": tensors, "aliases": {**written, **(aliases or {})}, "scratch": 1000,
        "updates_in_place": native,
        "profiles": profiles or [_sizes(profile) for profile in record.profiles],
    }  # fmt: skip


def _sizes(profile: Profile) -> list[int]:
    ranges = [r for r in (profile.width, profile.rows, profile.kv_length) if r is not None]
    return [n for r in ranges for n in (r.least, r.best, r.most)]


@pytest.fixture
def site(tmp_path: Path, native: Library) -> Site:
    return Site(tmp_path, native)


@pytest.mark.parametrize("integrated", [False, True])
@pytest.mark.parametrize(
    "change",
    [{"settings": STREAMED}, {"form": "decomposed"}, {"rtx": True},
     {"profiles": target_profiles(GAMMAS, PREFILL, (20, 64, SHAPE["max_length"]))},
     {"compute": "bf16", "candidates": 0},
     {"compute": "fp32", "confidence": False}],
    ids=" ".join,
)  # fmt: skip
def test_passes_of_every_width_return_what_the_model_returns(
    site: Site, change: dict[str, Any], integrated: bool
) -> None:
    case = {} if "profiles" in change else {"profiles": "of a target"}
    site.change(machine={"integrated": integrated}, case=case, **change)
    if site.flavour == "rtx":
        (site.folder / "engine.kernels").write_text("kernels")
    assert site.check("passes") == ""


def test_drafts_have_a_profile_for_two_tokens(site: Site) -> None:
    site.change(profiles=draft_profiles(PREFILL))
    site.case["passes"] = [[16, 0, 1], [2, 16, 1], [1, 18, 1], [5, 19, 1], [2, 24, 2]]
    lines = site.check("refused").splitlines()
    assert lines[:4] == ["ran"] * 4
    assert "no profile of the plan takes a pass of width 2 with 2 scored rows" in lines[4]
    assert "'catch-up' of width 2 and rows 1" in lines[4]


def test_passes_out_of_bounds_are_refused_and_do_no_harm(site: Site) -> None:
    site.case["passes"] = [
        [17, 0, 1], [0, 0, 1], [1, 150, 1], [16, 140, 1], [1, 2**62, 1], [4, 0, 5], [4, 0, 0],
        [16, 0, 1], [1, 16, 1],
    ]  # fmt: skip
    lines = site.check("refused").splitlines()
    assert [line.split()[0] for line in lines] == [str(ENGINE)] * 7 + ["ran"] * 2
    assert "a pass of 17 tokens was asked of an engine built for widths 1 to 16" in lines[0]
    assert "from position 150 on of a KV buffer that has 0 to 149" in lines[2]
    assert "width 4 with 5 scored rows" in lines[5]


@pytest.mark.parametrize(
    ("call", "after", "says"),
    [
        ("enqueueV3", 1, "profile 0 of"),
        ("cudaStreamSynchronize", MEMORIES + 1, "cannot wait for the device: cudaErrorIllegalAddr"),
        ("cudaMemcpyAsync", 2, "cannot copy to the device"),  # after a feed, and its results
    ],
)
def test_a_pass_that_fails_ends_the_engine(site: Site, call: str, after: int, says: str) -> None:
    site.machine |= {"fails": call, "after": after, "said": "an illegal memory access"}
    site.case["passes"] = [[3, 0, 1], [3, 0, 1], [3, 0, 1]]
    lines = site.check("refused").splitlines()
    assert lines[0] == "ran"
    assert says in lines[1]
    assert "the device is lost to this process: start it again" in lines[1]
    assert lines[2].startswith(f"{ENGINE} an earlier pass failed (")
    assert says in lines[2]


def test_what_a_pass_lacks_leaves_the_engine_as_it_is(site: Site) -> None:
    site.machine |= {"fails": "createExecutionContext", "after": 1, "said": "no room"}
    site.case["passes"] = [[3, 0, 1], [1, 3, 1], [1, 3, 1]]
    lines = site.check("refused").splitlines()
    assert lines[0] == lines[2] == "ran"
    assert "gets no context: no room; close what else uses the GPU" in lines[1]
    site.machine |= {"fails": "cudaMemcpyAsync", "after": 2}
    site.case["passes"] = [[3, 0, 1, 1]]
    assert "cannot copy from the device" in site.check("refused")


def _fails(call: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"machine": {"fails": call, "said": message, **more}}


def _plan(**plan: Any) -> dict[str, Any]:
    return {"plan": plan}


RANGE = Range(1, 1, 1)
FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    # the machine
    ({"machine": {"memory": 10_000}}, ENGINE,
     ("cannot allocate KV buffers: 0.02 MiB are needed and 0.01 MiB of 0.01",)),
    *[(_fails("cudaMalloc", after=taken, error=2), ENGINE, ("cannot allocate ", "are needed"))
      for taken in range(MEMORIES)],  # the check counts what is not given back
    (_fails("cudaHostAlloc", error=2), ENGINE, ("cannot allocate pinned host memory",)),
    ({"machine": {"devices": 0}}, ENGINE, ("cannot find an NVIDIA GPU", "--backend ort-cpu")),
    (_fails("cudaGetDeviceCount", error=35), ENGINE,
     ("cudaErrorInsufficientDriver", "install the NVIDIA driver, or a newer one")),
    # TensorRT
    *[(_fails(call, message), ENGINE, (message,))
      for call in ("createInferRuntime", "deserializeCudaEngine")
      for message in ("Error Code 1: Serialization", "out of memory")],
    ({"rtx": True, **_fails("deserializeCudaEngine", "no")}, ENGINE,
     ("no (it was not built for this GPU's compute capability)",)),
    *[(_fails(call, "not now"), ENGINE, ("profile 0 of", "not now"))
      for call in ("setOptimizationProfileAsync", "setTensorAddress")],
    ({"settings": STREAMED, **_fails("setWeightStreamingBudgetV2", "too many bytes")}, ENGINE,
     ("cannot stream the weights", "4096 bytes", "too many bytes")),
    # plans of other machines
    *[(change, ENGINE, ("engine.plan does not run here: ", "specrt build RECIPE", *parts))
      for change, *parts in (
          ({"version": "10.4.0"}, "built by TensorRT 10.4.0, and here is 10.3.0.26"),
          ({"gpu": "Thor"}, "it was built on Thor, and here is Orin"),
          ({"gpu_capability": "9.0"}, "of compute capability 9.0, and Orin has 8.7"),
          ({"backend": "tensorrt-rtx"}, "TensorRT for RTX", "built with TensorRT 10.3.0.26"))],
    # plans that are not their record's
    *[(_plan(**plan), ENGINE, (says, "build"))
      for plan, says in (
          ({"vocabulary": 62}, "has logits as output [1, -1, 62] of float32"),
          ({"max_length": 149}, "has key.0 as input [1, 2, 149, 5] of float16"),
          ({"layers": 2}, "has no tensor key.2"),
          ({"compute": "bf16"}, "of bfloat16"),
          ({"confidence": False}, "has no tensor confidence"),
          ({"batch": 2}, "has argmax as output [2, -1] of int64"),
          ({"profiles": [[1, 1, 1, 1, 1, 1]]}, "has 1 profiles"),
          ({"profiles": [[1, 7, 16, 1, 1, 4]] + [[1] * 6] * 6}, "takes input_ids of 1, 7, 16 in"),
          ({"aliases": {"present_value.0": "key.1"}}, "writes present_value.0 into key.1"),
          ({"more": {"kv_length": {"shape": [-1]}}}, "has a tensor kv_length"),
          ({"more": {"odd": {"type": 2}}}, "tensor odd has element type 2"),
          ({"more": {"rows": {"on_host": True}}}, "tensor rows is wanted in host memory"))],
    # files that are not plans
    *[({"damage": damage, "rtx": rtx}, ENGINE, (says, "build the bundle again"))
      for rtx, damage, says in (
          (False, lambda data: b"", "is damaged or no TensorRT plan: it is empty"),
          (False, lambda data: b"\xff\x00ab" + data[4:], "begins with"),
          (False, lambda data: b"vtrt" + data[4:], "is a plan of TensorRT for RTX; this libspecrt"),
          (True, lambda data: data[:-1], "engine.plan is damaged: "))],
    # what was built for others
    ({"profiles": (Profile("prefill", Range(1, 9, 8), RANGE),)}, BUNDLE,
     ('width of profile "prefill" is 1, 9, 8; expected rising sizes',)),
    ({"case": {"batch": 4}}, UNSUPPORTED, ("for 4 texts at once", "use the hosted library")),
    ({"settings": (BuildSetting("stripped", "True"),)}, UNSUPPORTED,
     ("holds no weights", "use the hosted library")),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "says"), FAULTS, ids=map(str, range(len(FAULTS))))
def test_what_cannot_be_opened_is_refused_with_its_remedy(
    site: Site, change: dict[str, Any], status: int, says: tuple[str, ...]
) -> None:
    site.change(**change)
    site.refused(status, *says)


CAPABILITIES = "capabilities"
NATIVE = (
    ["10.3.0", "10.3.0.26", "10.3.0.27", "10.3.1.26", "10.2", "11.0.0", "no version"],
    [(), (BuildSetting("version_compatible", "True"),),
     (BuildSetting("hardware_compatible", "ampere+"),),
     (BuildSetting("hardware_compatible", "same-capability"),)],
    [("Orin", "8.7"), ("", "")],
    [("Orin", 8, 7), ("Other Orin", 8, 7), ("Old", 7, 5), ("New", 12, 0)],
)  # fmt: skip
RTX = (
    [RTX_VERSION, "1.7.1.9", "1.7.2", "1.6.1.116"],
    [(), (BuildSetting(CAPABILITIES, "8.9, 12.0"),), (BuildSetting(CAPABILITIES, "7.5"),)],
    [("", "")],
    [("A", 8, 9), ("B", 7, 5), ("C", 9, 0), ("D", 12, 0)],
)


@pytest.mark.parametrize("rtx", [False, True])
def test_other_machines_are_judged_as_python_judges_them(site: Site, rtx: bool) -> None:
    site.change(rtx=rtx)
    version = ".".join(map(str, site.machine.get("version", [10, 3, 0, 26])))
    judged, machines = [], []
    for built, settings, (gpu, capability), (name, major, minor) in product(
        *(RTX if rtx else NATIVE)
    ):
        record = replace(
            site.record, version=built, settings=settings, gpu=gpu, gpu_capability=capability
        )
        (site.folder / f"{len(machines)}.json").write_text(record.to_json())
        machines.append({**site.machine, "gpu": name, "major": major, "minor": minor})
        here = DeviceRecord(record.backend, version, name, (f"{major}.{minor}",))
        judged.append(engine_record.difference(record.device, here))
    site.case["machines"] = machines
    assert site.check("differences").splitlines() == judged
    assert "" in judged
    assert len(set(judged)) > 5
