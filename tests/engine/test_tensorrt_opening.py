"""What is wrong with a plan, its record or the machine is one line, and nothing stays open."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specrt
from engine.numpy_device import NumpyDevice
from engine.tensorrt_double import PREFILL, draft_profiles, record_of, target_profiles
from engine.tensorrt_site import Site, make_site, pair
from engine.test_trt_plan import World, fake
from specrt.bundle import hash_file
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt import engine_record as fingerprint
from specrt.engine.tensorrt import library
from specrt.engine.tensorrt.engine import Lease
from specrt.engine.tensorrt.engine_record import (
    BuildSetting,
    Compiled,
    DeviceRecord,
    EngineRecord,
    Kernel,
    Profile,
    Range,
    difference,
    read_engine_record,
)
from specrt.engine.tensorrt.library import FLAVOURS, describe
from specrt.engine.tensorrt.plan import WHOLE, Wants, supply
from specrt.errors import EngineError, SpecrtError
from specrt.system import Gpu, Survey

RTX = ("tensorrt-rtx", "tensorrt-rtx")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = make_site(tmp_path, monkeypatch)
    yield made
    made.hold_closed()


def refusal(folder: Path) -> str:
    with pytest.raises(SpecrtError) as told:
        specrt.load(folder)
    said = str(told.value)
    assert "\n" not in said
    return said


def replaced(folder: Path, name: str, data: bytes) -> None:
    """Put other bytes in place of a file, and its hash into the manifest."""
    path = folder / name
    path.write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    found = hash_file(path)
    manifest["files"][name] = {"bytes": found.bytes, "sha256": found.sha256}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def forgotten(folder: Path, name: str) -> None:
    """Take a file away, and out of the manifest."""
    (folder / name).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))


# The machine


def test_without_a_gpu_the_driver_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site.bundle(*pair())
    none = Survey(problem="no NVIDIA driver: libcuda.so.1 is not there")
    monkeypatch.setattr(fingerprint, "survey", lambda: none)
    said = refusal(folder)
    assert "runs on an NVIDIA GPU only: no NVIDIA driver: libcuda.so.1 is not there" in said
    assert site.devices == []


@pytest.mark.parametrize("backend", sorted(FLAVOURS))
def test_without_the_library_its_source_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    folder = site.bundle(*pair(), backends=(backend, backend))
    monkeypatch.setattr(library, "is_installed", lambda name: False)
    monkeypatch.setattr(opening, "open_library", library.open_library.__wrapped__)
    said = refusal(folder)
    assert f"backend {backend} needs {FLAVOURS[backend].title}, which is not installed" in said
    assert FLAVOURS[backend].install in said


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        (Gpu(0, "Orin", "8.7", 1), "built on A GPU of compute capability 8.9, and Orin has 8.7"),
        (Gpu(0, "B GPU", "8.9", 1), "it was built on A GPU, and here is B GPU"),
    ],
)
def test_another_gpu_is_named_with_what_rebuilds(
    site: Site, monkeypatch: pytest.MonkeyPatch, gpu: Gpu, said: str
) -> None:
    folder = site.bundle(*pair())
    monkeypatch.setattr(fingerprint, "survey", lambda: Survey((gpu,), "", (13, 0)))
    found = refusal(folder)
    assert said in found
    assert found.endswith("build it here with `specrt build RECIPE --backend tensorrt`")
    assert site.devices == []


# The record


def text(**change: Any) -> bytes:
    record = record_of(target_profiles((2,), PREFILL))
    return json.dumps({**json.loads(record.to_json()), **change}).encode()


BAD_RECORDS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read"),
    "no JSON": (b"{", "cannot be read"),
    "no text": (b"\xff\xfe", "cannot be read"),
    "a list": (b"[]", "it holds []; expected an object"),
    "deep": (b"[" * 100_000, "cannot be read"),
    "nothing": (b"{}", "format is missing"),
    "newer": (text(format=7), "has format 7, and this specrt reads up to 1; upgrade specrt"),
    "older": (text(format=0), "format is 0; expected a whole number from 1 to 1"),
    "no number": (text(format="1"), "format is '1'"),
    "two lines": (text(backend="tensor\nrt"), "expected up to 255 printable characters"),
    "no profiles": (text(profiles=[]), "profiles is empty"),
    "a falling range": (
        text(profiles=[{"name": "decode", "width": {"least": 2, "best": 1, "most": 1},
                        "rows": {"least": 1, "best": 1, "most": 1}}]),
        "width of profile 'decode' is 2, 1, 1; expected rising sizes",
    ),
    "another backend": (
        text(backend="tensorrt-rtx", version="1.7.1.116"),
        "it is a plan of TensorRT for RTX 1.7.1.116, and TensorRT 10.15.1.29 was asked to run it",
    ),
    "no backend": (text(backend="cuda"), "it is a plan of cuda"),
}  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("name", sorted(BAD_RECORDS))
def test_a_record_that_is_none_is_refused(site: Site, name: str, role: str) -> None:
    folder = site.bundle(*pair())
    data, said = BAD_RECORDS[name]
    replaced(folder, f"{role}/engine.json", data)
    found = refusal(folder)
    assert said in found
    assert f"{role}/engine." in found
    assert "specrt build RECIPE" in found


def test_a_record_that_is_not_there_is_missed(site: Site) -> None:
    folder = site.bundle(*pair())
    forgotten(folder, "draft/engine.json")
    assert "draft/engine.json cannot be read" in refusal(folder)
    os.mkfifo(folder / "draft" / "engine.json")  # who reads it would wait for ever
    assert "it is no file" in refusal(folder)


def test_what_a_later_version_adds_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(text(later={"a": 1}))
    assert read_engine_record(path) == record_of(target_profiles((2,), PREFILL))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "has 9 profiles, and engine.json says 10"),
        (lambda p: (*p, p[1]), "has 11 profiles, and engine.json says 10"),
        (lambda p: (p[0], p[2], p[1], *p[3:]), "takes input_ids of 2, 2, 2 in profile 1, and"),
        (
            lambda p: (replace(p[0], rows=Range(1, 1, 5)), *p[1:]),
            "takes rows of 1, 1, 5 in profile 0, and engine.json says 1, 1, 9 ('prefill')",
        ),
    ],
)
def test_profiles_that_are_not_the_records_are_found_at_once(
    site: Site, change: Callable[[tuple[Profile, ...]], Any], said: str
) -> None:
    folder = site.bundle(*pair())
    site.sized = {"target": change(target_profiles(range(1, 9), PREFILL))}
    found = refusal(folder)
    assert said in found
    assert "build the bundle again" in found


def test_a_width_without_a_profile_names_the_nearest(site: Site) -> None:
    target, draft = pair()
    folder = site.bundle(target, draft, gammas=(0, 2, 8))
    lost = target_profiles((2, 8), 3)  # a prefill that does not take what is between
    sized = (replace(lost[0], rows=Range(1, 1, 3)), *lost[1:])
    record = replace(site.built[folder / "target" / "engine.plan"], profiles=sized)
    site.built[folder / "target" / "engine.plan"] = record
    replaced(folder, "target/engine.json", record.to_json().encode())
    with specrt.load(folder) as generator:
        said = r"width 6 with 6 scored rows \(gamma 5; the nearest built: 2 and 8\)"
        with pytest.raises(EngineError, match=said):
            generator.models.target.forward([[1] * 6], 0)


# What the builder wrote, read again


def built(backend: str, **settings: str) -> EngineRecord:
    gpu = {"gpu": "NVIDIA H200", "gpu_capability": "9.0", "driver": "580.65.06"}
    return EngineRecord(
        1, backend, "10.15.1.29" if backend == "tensorrt" else "1.7.1.116", "native", "fp16",
        draft_profiles(PREFILL), 40, True, 10, "0" * 64, 9,
        (Compiled("decode", 12, (Kernel("_gemv_mha", "kgen", 2),)),), ("7.5", "8.9"),
        **(gpu if backend == "tensorrt" else {}),
        settings=tuple(BuildSetting(*each) for each in settings.items()), messages=("a warning",),
    )  # fmt: skip


HERE = DeviceRecord("tensorrt", "10.15.1.29", "NVIDIA H200", ("9.0",), "580.65.06")
RTX_HERE = DeviceRecord("tensorrt-rtx", "1.7.1.116", "RTX 4090", ("8.9",), "580.65.06")


def wants(**given: bool) -> Wants:
    return Wants(**given)


@pytest.mark.parametrize(
    ("record", "opened", "here", "said"),
    [
        (built("tensorrt"), WHOLE, HERE, ""),
        (built("tensorrt"), WHOLE, replace(HERE, gpu="H100"), "built on NVIDIA H200, and here"),
        (
            built("tensorrt", hardware_compatible="same-capability"), WHOLE,
            replace(HERE, gpu="H100"), "",
        ),
        (
            built("tensorrt", hardware_compatible="ampere+"), WHOLE,
            replace(HERE, gpu="A100", capabilities=("8.0",)), "",
        ),
        (built("tensorrt"), WHOLE, replace(HERE, version="11.0.0.1"), "and here is 11.0.0.1"),
        (
            built("tensorrt", version_compatible="True"), wants(host_code=True),
            replace(HERE, version="11.0.0.1"), "",
        ),
        (built("tensorrt", version_compatible="False"), WHOLE, HERE, ""),
        (built("tensorrt", weight_streaming="True"), wants(streaming=True), HERE, ""),
        (built("tensorrt", stripped="True", aux_streams="0"), wants(stripped=True), HERE, ""),
        (built("tensorrt-rtx"), WHOLE, RTX_HERE, ""),
        (built("tensorrt-rtx", capabilities="8.9, 12.0"), WHOLE, RTX_HERE, ""),
        (
            built("tensorrt-rtx", capabilities="8.6, 12.0"), WHOLE, RTX_HERE,
            "it is for compute capability 8.6, 12.0, and RTX 4090 has 8.9",
        ),
        (
            built("tensorrt-rtx"), WHOLE, replace(RTX_HERE, gpu="T4", capabilities=("7.5",)),
            "it is for compute capability 8.0 and later, and T4 has 7.5",
        ),
    ],
)  # fmt: skip
def test_what_was_asked_of_the_builder_decides_where_a_plan_runs(
    tmp_path: Path, record: EngineRecord, opened: Wants, here: DeviceRecord, said: str
) -> None:
    path = tmp_path / "engine.json"
    path.write_text(record.to_json(), encoding="utf-8")
    found = read_engine_record(path)
    assert found == record
    assert found.wants == opened
    differs = difference(found.device, here)
    assert bool(differs) is bool(said)
    assert said in differs


# The plan


class Streamed:
    """An engine whose weights may be streamed, if it lets them."""

    def __init__(self, takes: bool = True) -> None:
        self._takes, self._budget = takes, -1

    def get_weight_streaming_automatic_budget(self) -> int:
        return 1 << 20

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        self._budget = budget if self._takes else self._budget


def library_of(world: World, refits: bool = True, parses: bool = True) -> Any:
    module = fake(world, rtx=False)
    found = describe(FLAVOURS["tensorrt"], module)
    world.logger = found.logger
    if not refits:
        world.refuse.add("refit")
    if not parses:
        world.refuse.add("parse")
    module.Refitter = lambda engine, logger: SimpleNamespace(
        refit_cuda_engine=lambda: world.answer("refit")
    )
    module.OnnxParserRefitter = lambda refitter, logger: SimpleNamespace(
        refit_from_file=lambda path: world.answer("parse", path)
    )
    return found


def test_streamed_weights_get_what_the_library_finds_right(tmp_path: Path) -> None:
    engine, found = Streamed(), library_of(World())
    supply(engine, tmp_path / "engine.plan", found, Wants(streaming=True))
    assert engine.weight_streaming_budget_v2 == 1 << 20
    with pytest.raises(EngineError, match=r"cannot stream the weights of .*engine\.plan with 104"):
        supply(Streamed(False), tmp_path / "engine.plan", found, Wants(streaming=True))


def test_a_stripped_plan_is_filled_from_the_graph_beside_it(tmp_path: Path) -> None:
    world = World()
    plan, graph = tmp_path / "engine.plan", tmp_path / "engine.onnx"
    with pytest.raises(EngineError, match=r"engine\.onnx is missing, and the plan beside it holds"):
        supply(None, plan, library_of(world), Wants(stripped=True))
    assert world.calls == []
    graph.write_bytes(b"a graph")
    supply(None, plan, library_of(world), Wants(stripped=True))
    assert world.calls == [("parse", str(graph)), ("refit",)]
    for refused in ("refits", "parses"):
        with pytest.raises(EngineError, match=r"cannot fill the plan from .*: Error Code 1: some"):
            supply(None, plan, library_of(World(), **{refused: False}), Wants(stripped=True))


@pytest.mark.parametrize("setting", ["weight_streaming", "stripped", "version_compatible"])
def test_plans_are_opened_as_they_were_built(site: Site, setting: str) -> None:
    folder = site.bundle(*pair(), settings=(BuildSetting(setting, "True"),))
    with specrt.load(folder) as generator:  # the site holds `wants` to the record
        assert generator.generate([1, 2, 3], gamma=0).token_ids


# Who closes the device


def test_a_device_is_closed_with_its_last_holder_and_once() -> None:
    device = NumpyDevice()
    lease, holders = Lease(device), [object(), object()]
    for holder in holders:
        lease.take(holder)
    lease.drop(object())  # of somebody who never held it
    lease.drop(holders[1])
    lease.drop(holders[1])
    assert device.closed == 0
    lease.drop(holders[0])
    lease.drop(holders[0])
    assert device.closed == 1
