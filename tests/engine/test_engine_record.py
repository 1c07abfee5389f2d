"""`engine.json`, and what keeps a plan from running on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import specrt
from specrt.bundle import hash_file
from specrt.engine.tensorrt import engine_record
from specrt.engine.tensorrt.engine_record import (
    BuildSetting,
    Compiled,
    DeviceRecord,
    EngineRecord,
    Kernel,
    Range,
    difference,
)
from specrt.errors import SpecrtError
from specrt.system.gpu import Gpu, Survey
from support.gpu_double import PREFILL, Site, draft_profiles, record_of, table_pair

TRT = DeviceRecord("tensorrt", "10.13.3.9", "NVIDIA H200", ("9.0",))
RTX = DeviceRecord("tensorrt-rtx", "1.7.1.116", "NVIDIA RTX 4090", ("8.9",))
AHEAD = replace(RTX, gpu="", capabilities=())
T4 = {"gpu": "T4", "capabilities": ("7.5",)}
LATER = replace(TRT, newer_versions=True)
B200 = replace(TRT, gpu="B200", capabilities=("10.0",))


def refusal(folder: Path) -> str:
    with pytest.raises(SpecrtError) as told:
        specrt.load(folder)
    return str(told.value)


# The machine


@pytest.mark.parametrize(
    ("built", "here", "said"),
    [
        (TRT, TRT, ""),
        (TRT, replace(TRT, version="10.13.3.10"), "by TensorRT 10.13.3.9, and here is 10.13.3.10"),
        (LATER, replace(TRT, version="10.12.0.1"), "and here is 10.12"),
        (TRT, B200, "built on NVIDIA H200 of compute capability 9.0, and B200 has 10.0"),
        (TRT, replace(TRT, gpu="NVIDIA H100"), "built on NVIDIA H200, and here is NVIDIA H100"),
        (TRT, RTX, "a plan of TensorRT 10.13.3.9, and TensorRT for RTX 1.7.1.116 was asked"),
        (AHEAD, replace(RTX, version="1.8.0.1"), "by TensorRT for RTX 1.7.1.116, and here is 1.8"),
        (AHEAD, replace(RTX, **T4), "for compute capability 8.0 and later, and T4 has 7.5"),
        (replace(AHEAD, capabilities=("7.5", "12.0")), RTX, "7.5, 12.0, and NVIDIA RTX 4090 has 8"),
    ],
)
def test_what_differs_is_said_with_the_command_that_rebuilds(
    built: DeviceRecord, here: DeviceRecord, said: str
) -> None:
    found = difference(built, here)
    assert bool(found) is bool(said)
    assert said in found
    if said:
        assert found.endswith(f"`specrt build RECIPE --backend {here.backend}`")


def test_on_another_machine_nothing_is_opened(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = site.bundle(*table_pair())
    monkeypatch.setattr(engine_record, "survey", lambda: Survey((Gpu(0, "Orin", "8.7", 1),)))
    assert "8.9, and Orin has 8.7: build it here with `specrt build" in refusal(folder)
    assert site.devices == []


# The record


ONE = {"least": 1, "best": 1, "most": 1}
FALLING = {"name": "decode", "width": {**ONE, "least": 2}, "rows": ONE}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "it holds []; expected an object"),
        ({"format": 7}, "has format 7, and this specrt reads up to 1; upgrade specrt"),
        ({"profiles": []}, "profiles is empty"),
        ({"profiles": [FALLING]}, "width of profile 'decode' is 2, 1, 1; expected rising sizes"),
        ({"backend": "cuda"}, "it is a plan of cuda"),
    ],
    ids=["missing", "deep", "a list", "newer", "no profiles", "falling range", "another backend"],
)
def test_a_record_that_is_none_is_refused(site: Site, data: Any, said: str) -> None:
    folder = site.bundle(*table_pair())
    path, place = folder / "draft" / "engine.json", folder / "manifest.json"
    manifest = json.loads(place.read_text())
    if isinstance(data, dict):
        data = json.dumps({**json.loads(path.read_text()), **data}).encode()
    if data is None:
        path.unlink()
        del manifest["files"]["draft/engine.json"]
    else:
        path.write_bytes(data)
        manifest["files"]["draft/engine.json"] = asdict(hash_file(path))
    place.write_text(json.dumps(manifest))
    found = refusal(folder)
    assert said in found
    assert "draft/engine." in found
    assert "specrt build RECIPE" in found


def test_profiles_that_are_not_the_records_are_found_at_once(site: Site) -> None:
    def changed(plan: Any) -> None:
        plan.profiles = (replace(plan.profiles[0], rows=Range(1, 1, 5)), *plan.profiles[1:])

    site.changes["target"] = changed
    found = refusal(site.bundle(*table_pair()))
    assert "takes rows of 1, 1, 5 in profile 0, and engine.json says 1, 1, 9 ('prefill')" in found
    assert "build the bundle again" in found


def built(here: DeviceRecord, **settings: str) -> EngineRecord:
    """Return the record of a plan that was built on a machine."""
    return record_of(
        draft_profiles(PREFILL), backend=here.backend, version=here.version, gpu=here.gpu,
        gpu_capability="".join(here.capabilities), driver="580.65.06", messages=("a warning",),
        compiled=(Compiled("decode", 12, (Kernel("_gemv_mha", "kgen", 2),)),),
        settings=tuple(BuildSetting(*each) for each in settings.items()),
    )  # fmt: skip
