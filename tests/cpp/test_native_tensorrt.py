"""The native TensorRT part over doubles of TensorRT and CUDA: nothing here has run on a GPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cpp.conftest import CHECKS, SOURCES, BuildLibrary, Library, compiler, run_program
from specrt.engine.tensorrt import engine_record as fingerprint
from specrt.engine.tensorrt.engine_record import (
    BuildSetting,
    DeviceRecord,
    EngineRecord,
    Profile,
    Range,
)
from support.tensorrt_double import GAMMAS, PREFILL, draft_profiles, target_profiles

FLAVOURS = {"tensorrt": "tensorrt_check", "rtx": "tensorrt_rtx_check"}
RTX_VERSION = "1.7.1.116"
MEMORIES = 6
"""How often an engine takes memory of the device, and waits for it."""
BUNDLE, ENGINE, UNSUPPORTED = 4, 5, 7
"""Statuses of specrt.h."""

Check = Callable[..., str]


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
    machine: dict[str, Any] = field(default_factory=dict)
    case: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    damage: Callable[[bytes], bytes] = bytes

    def change(self, **options: Any) -> None:
        """Change the record, of which the plan is made as well."""
        self.record = replace(self.record, **options)

    def as_rtx(self) -> None:
        self.flavour = "rtx"
        self.change(backend="tensorrt-rtx", version=RTX_VERSION, gpu="", gpu_capability="")
        self.machine["version"] = [1, 7, 1, 116]

    def write(self) -> None:
        shape = {"layers": 3, "kv_heads": 2, "head_dim": 5, "vocabulary": 61, "max_length": 150}
        case = {
            **shape, "backend": self.record.backend, "batch": 1, "prefill": PREFILL,
            "gammas": sorted(GAMMAS), "machine": self.machine, **self.case,
        }  # fmt: skip
        record = self.record
        plan = {
            **shape, "batch": 1, "candidates": record.candidates, "scratch": 1000,
            "native": record.form == "native", "confidence": record.confidence,
            "compute": record.compute, "profiles": [_sizes(p) for p in record.profiles],
            **self.plan,
        }  # fmt: skip
        text = json.dumps(plan).encode()
        mark = b"vtrt" if record.backend == "tensorrt-rtx" else b"ptrt"
        data = mark + bytes(12) + (24 + len(text)).to_bytes(8, "little") + text
        (self.folder / "engine.plan").write_bytes(self.damage(data))
        (self.folder / "engine.json").write_text(record.to_json())
        (self.folder / "case.json").write_text(json.dumps(case))

    def check(self, name: str, *, written: bool = False) -> str:
        if not written:
            self.write()
        told = subprocess.run(
            [self.library.program(FLAVOURS[self.flavour]), name, self.folder],
            check=False,
            capture_output=True,
            text=True,
        )
        assert told.returncode == 0, told.stdout + told.stderr
        return told.stdout

    def refused(self, status: int, *parts: str) -> None:
        """Hold what opening says to its status and to what must be in the message."""
        said = self.check("open")
        assert said.startswith(f"{status} "), said
        assert said.count("\n") == 1, said
        for part in parts:
            assert part in said, said


def _sizes(profile: Profile) -> list[int]:
    return [n for r in (profile.width, profile.rows) for n in (r.least, r.best, r.most)]


@pytest.fixture
def site(tmp_path: Path, built_library: BuildLibrary) -> Site:
    return Site(tmp_path, built_library("native", sanitize=True))


@pytest.mark.parametrize("kind", ["native", "decomposed", "rtx"])
@pytest.mark.parametrize("integrated", [False, True])
def test_passes_of_every_width_say_what_the_model_says(
    site: Site, kind: str, integrated: bool
) -> None:
    if kind == "rtx":
        site.as_rtx()
        (site.folder / "engine.kernels").write_text("kernels")
    else:
        site.change(form=kind)
    site.machine["integrated"] = integrated
    site.case["profiles"] = "of a target"
    assert site.check("passes") == ""


def test_headers_before_10_15_do_not_know_of_aliases() -> None:
    native = SOURCES / "src"
    folders = (CHECKS, CHECKS / "tensorrt" / "include", native, SOURCES / "include")
    plan = native / "native" / "engine" / "tensorrt" / "plan.cpp"
    includes = [f"-I{folder}" for folder in folders]
    run_program([*compiler(), "-std=c++17", "-Wall", "-Werror", *includes, "-fsyntax-only", plan])


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_plans_without_extras(site: Site, compute: str) -> None:
    site.change(compute=compute, candidates=0, confidence=False)
    assert site.check("passes") == ""


def test_a_device_that_is_not_current_is_made_so(site: Site) -> None:
    assert site.check("elsewhere") == ""


def test_drafts_have_a_profile_for_two_tokens(site: Site) -> None:
    site.change(profiles=draft_profiles(PREFILL))
    site.case["passes"] = [[16, 0, 1], [2, 16, 1], [1, 18, 1], [5, 19, 1], [2, 24, 2]]
    said = site.check("refused").splitlines()
    assert said[:4] == ["ran"] * 4
    assert "no profile of the plan takes a pass of width 2 with 2 scored rows" in said[4]
    assert "'catch-up' of width 2 and rows 1" in said[4]


def test_passes_out_of_bounds_are_refused_and_do_no_harm(site: Site) -> None:
    huge = 2**62
    site.case["passes"] = [
        [17, 0, 1], [0, 0, 1], [1, 150, 1], [16, 140, 1], [1, huge, 1], [4, 0, 5], [4, 0, 0],
        [16, 0, 1], [1, 16, 1],
    ]  # fmt: skip
    said = site.check("refused").splitlines()
    assert [line.split()[0] for line in said] == [str(ENGINE)] * 7 + ["ran"] * 2
    assert "a pass of 17 tokens was asked of an engine built for widths 1 to 16" in said[0]
    assert "from position 150 on of a KV buffer that has 0 to 149" in said[2]
    assert "width 4 with 5 scored rows" in said[5]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("enqueueV3", "profile 0 of"),
        ("cudaStreamSynchronize", "cannot wait for the device: cudaErrorIllegalAddress"),
        ("cudaMemcpyAsync", "cannot copy to the device"),
    ],
)
def test_a_pass_that_fails_ends_the_engine(site: Site, call: str, says: str) -> None:
    site.machine |= {"fails": call, "after": 1, "said": "an illegal memory access was encountered"}
    site.case["passes"] = [[3, 0, 1], [3, 0, 1], [3, 0, 1]]
    if call == "cudaMemcpyAsync":
        site.machine["after"] = 2  # the feed and the results of the first pass
    if call == "cudaStreamSynchronize":
        site.machine["after"] = MEMORIES + 1
    said = site.check("refused").splitlines()
    assert said[0] == "ran"
    assert says in said[1]
    assert "the device is lost to this process: start it again" in said[1]
    assert said[2].startswith(f"{ENGINE} an earlier pass failed (")
    assert says in said[2]


def test_scores_that_cannot_be_copied_are_told(site: Site) -> None:
    site.machine |= {"fails": "cudaMemcpyAsync", "after": 2}
    site.case["passes"] = [[3, 0, 1, 1]]
    assert "cannot copy from the device" in site.check("refused")


def test_a_context_that_cannot_be_had_leaves_the_engine_as_it_is(site: Site) -> None:
    site.machine |= {"fails": "createExecutionContext", "after": 1, "said": "no room"}
    site.case["passes"] = [[3, 0, 1], [1, 3, 1], [1, 3, 1]]
    said = site.check("refused").splitlines()
    assert said[0] == said[2] == "ran"
    assert "gets no context: no room; close what else uses the GPU" in said[1]


def test_too_little_memory_is_told_with_what_is_needed(site: Site) -> None:
    site.machine["memory"] = 10_000
    site.refused(ENGINE, "cannot allocate KV buffers: 0.02 MiB are needed and 0.01 MiB of 0.01")


@pytest.mark.parametrize("taken", range(MEMORIES))
def test_whatever_memory_is_lacking_what_was_taken_is_given_back(site: Site, taken: int) -> None:
    """Each reservation of an engine fails once; the check counts what stays."""
    site.machine |= {"fails": "cudaMalloc", "after": taken, "error": 2}
    site.refused(ENGINE, "cannot allocate ", "are needed")


def test_pinned_memory_may_be_lacking_too(site: Site) -> None:
    site.machine |= {"fails": "cudaHostAlloc", "error": 2}
    site.refused(ENGINE, "cannot allocate pinned host memory")


def test_no_gpu_is_told_with_what_else_there_is(site: Site) -> None:
    site.machine["devices"] = 0
    site.refused(ENGINE, "cannot find an NVIDIA GPU", "--backend ort-cpu")


def test_an_old_driver_is_told(site: Site) -> None:
    site.machine |= {"fails": "cudaGetDeviceCount", "error": 35}
    site.refused(ENGINE, "cudaErrorInsufficientDriver", "install the NVIDIA driver, or a newer one")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"version": "10.4.0"}, ("built by TensorRT 10.4.0, and here is 10.3.0.26",)),
        ({"gpu": "Thor"}, ("it was built on Thor, and here is Orin",)),
        ({"gpu_capability": "9.0"}, ("of compute capability 9.0, and Orin has 8.7",)),
        ({"backend": "tensorrt-rtx"}, ("TensorRT for RTX", "built with TensorRT 10.3.0.26")),
    ],
)
def test_plans_of_other_machines_are_refused(
    site: Site, change: dict[str, str], parts: tuple[str, ...]
) -> None:
    site.change(**change)
    site.refused(ENGINE, "engine.plan does not run here: ", "specrt build RECIPE", *parts)


def test_other_machines_are_judged_as_python_judges_them(site: Site) -> None:
    versions = ["10.3.0", "10.3.0.26", "10.3.0.27", "10.3.1.26", "10.2", "11.0.0", "no version"]
    asked = [
        (), (BuildSetting("version_compatible", "True"),),
        (BuildSetting("hardware_compatible", "ampere+"),),
        (BuildSetting("hardware_compatible", "same-capability"),),
    ]  # fmt: skip
    machines = [("Orin", 8, 7), ("Other Orin", 8, 7), ("Old", 7, 5), ("New", 12, 0)]
    records = [
        replace(site.record, version=v, settings=s, gpu=g, gpu_capability=c)
        for v in versions for s in asked for g, c in (("Orin", "8.7"), ("", ""))
    ]  # fmt: skip
    _compare(site, records, machines)


def test_other_machines_are_judged_as_python_judges_them_for_rtx(site: Site) -> None:
    site.as_rtx()
    asked = [
        (),
        (BuildSetting("capabilities", "8.9, 12.0"),),
        (BuildSetting("capabilities", "7.5"),),
    ]
    records = [
        replace(site.record, version=version, settings=settings)
        for version in (RTX_VERSION, "1.7.1.9", "1.7.2", "1.6.1.116") for settings in asked
    ]  # fmt: skip
    _compare(site, records, [("A", 8, 9), ("B", 7, 5), ("C", 9, 0), ("D", 12, 0)])


def _compare(site: Site, records: list[EngineRecord], machines: list[tuple[str, int, int]]) -> None:
    pairs = [(record, machine) for record in records for machine in machines]
    version = site.machine.get("version", [10, 3, 0, 26])
    expected, told = [], []
    for number, (record, (gpu, major, minor)) in enumerate(pairs):
        (site.folder / f"{number}.json").write_text(record.to_json())
        told.append({"gpu": gpu, "major": major, "minor": minor})
        text = ".".join(map(str, version))
        here = DeviceRecord(record.backend, text, gpu, (f"{major}.{minor}",))
        expected.append(fingerprint.difference(record.device, here))
    site.case["machines"] = told
    assert site.check("differences").splitlines() == expected
    assert "" in expected
    assert len(set(expected)) > 5


RANGE = Range(1, 1, 1)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"vocabulary": 62}, "has logits as output [1, -1, 62] of float32"),
        ({"max_length": 149}, "has key.0 as input [1, 2, 149, 5] of float16"),
        ({"layers": 2}, "has no tensor key.2"),
        ({"compute": "bf16"}, "of bfloat16"),
        ({"confidence": False}, "has no tensor confidence"),
        ({"batch": 2}, "has argmax as output [2, -1] of int64"),
        ({"profiles": [[1, 1, 1, 1, 1, 1]]}, "has 1 profiles"),
        ({"crossed": "present_value.0"}, "writes present_value.0 into key.1"),
        ({"more": "odd"}, "tensor odd has element type 2"),
        ({"on_host": True}, "tensor rows is wanted in host memory"),
    ],
)
def test_plans_that_are_not_their_record_s_are_refused(
    site: Site, plan: dict[str, Any], says: str
) -> None:
    site.plan = plan
    site.refused(ENGINE, says, "build")


def test_profiles_that_are_not_the_record_s_are_refused(site: Site) -> None:
    sizes = [_sizes(profile) for profile in site.record.profiles]
    sizes[0][1] = 7
    site.plan["profiles"] = sizes
    site.refused(ENGINE, "takes input_ids of 1, 7, 16 in profile 0", "say 1, 8, 16 ('prefill')")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"", "is damaged or no TensorRT plan: it is empty"),
        (lambda data: b"\xff\x00ab" + data[4:], "begins with"),
        (lambda data: b"vtrt" + data[4:], "is a plan of TensorRT for RTX; this libspecrt was"),
    ],
)
def test_files_that_are_no_plans_are_refused(
    site: Site, damage: Callable[[bytes], bytes], says: str
) -> None:
    site.damage = damage
    site.refused(ENGINE, says, "build the bundle again")


def test_half_a_plan_is_refused(site: Site) -> None:
    site.as_rtx()
    site.damage = lambda data: data[:-1]
    site.refused(ENGINE, "engine.plan is damaged: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be read"),
        ('{"format": 2}', "it has format 2, and this libspecrt reads up to 1"),
        ("[]", "expected an object"),
        ("", "cannot be read"),
    ],
)
def test_records_that_cannot_be_read_are_refused(site: Site, text: str, says: str) -> None:
    site.write()
    (site.folder / "engine.json").write_text(text)
    said = site.check("open", written=True)
    assert said.startswith(f"{BUNDLE} ")
    assert says in said


def test_a_missing_record_or_plan_is_told(site: Site) -> None:
    site.write()
    (site.folder / "engine.plan").unlink()
    assert "engine.plan cannot be read (No such file" in site.check("open", written=True)
    (site.folder / "engine.json").unlink()
    assert site.check("open", written=True).startswith(f"{BUNDLE} ")


def test_falling_sizes_are_refused(site: Site) -> None:
    site.change(profiles=(Profile("prefill", Range(1, 9, 8), RANGE),))
    site.refused(BUNDLE, 'width of profile "prefill" is 1, 9, 8; expected rising sizes')


def test_what_only_the_hosted_library_runs_is_refused(site: Site) -> None:
    site.case["batch"] = 4
    site.refused(UNSUPPORTED, "for 4 texts at once", "use the hosted library")
    site.case["batch"] = 1
    site.change(settings=(BuildSetting("stripped", "True"),))
    site.refused(UNSUPPORTED, "holds no weights", "use the hosted library")


def test_weights_are_streamed_where_that_was_asked_for(site: Site) -> None:
    site.change(settings=(BuildSetting("weight_streaming", "True"),))
    assert site.check("open").startswith("opened with TensorRT 10.3.0.26")
    site.machine |= {"fails": "setWeightStreamingBudgetV2", "said": "too many bytes"}
    site.refused(ENGINE, "cannot stream the weights", "4096 bytes", "too many bytes")


@pytest.mark.parametrize("call", ["createInferRuntime", "deserializeCudaEngine"])
def test_what_tensorrt_says_is_told(site: Site, call: str) -> None:
    site.machine |= {"fails": call, "said": "Error Code 1: Serialization"}
    site.refused(ENGINE, "Error Code 1: Serialization")
    site.machine["said"] = "out of memory"
    site.refused(ENGINE, "out of memory")


def test_rtx_says_what_is_wrong_with_a_plan(site: Site) -> None:
    site.as_rtx()
    site.machine |= {"fails": "deserializeCudaEngine", "said": "no"}
    site.refused(ENGINE, "no (it was not built for this GPU's compute capability)")


@pytest.mark.parametrize("call", ["setOptimizationProfileAsync", "setTensorAddress"])
def test_contexts_that_refuse_are_told(site: Site, call: str) -> None:
    site.machine |= {"fails": call, "said": "not now"}
    site.refused(ENGINE, "profile 0 of", "not now")
