"""The steps that need a GPU, from their beginning to their facts, with plans in NumPy."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpucheck import bandwidth, bench, codelet, models, probe, steps
from gpucheck.place import Place
from gpucheck.rehearsal import TableReference
from gpucheck.step import CheckError

from runtime.numpy_device import NumpyDevice
from runtime.tensorrt_double import PREFILL, draft_profiles, opened, target_profiles
from runtime.toy import TableEngine, near
from specrt.engine.ort_cuda import OrtCudaEngine
from specrt.engine.tensorrt.library import DECOMPOSED
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda

RTX = "tensorrt-rtx"
GAMMAS = (1, 2, 4)
VOCABULARY = 8192


class Device(NumpyDevice):
    """A device that tells how much of it is free, and that it was closed."""

    closed = False

    def available(self) -> tuple[int, int]:
        taken = sum(size for size, purpose in self.blocks.values() if purpose != "staging")
        return (1 << 28) - taken, 1 << 28

    def close(self) -> None:
        assert not [b for b in self.live if b != "graph"], self.live
        self.closed = True
        super().close()


@dataclass
class Model:
    """Opens engines over a table, as `Built` does over plans."""

    table: TableEngine
    role: str = "target"
    form: str = "native"
    backend: str = RTX
    precision: str = "fp16"
    read_bytes: int = 10**9
    max_length: int = 2048

    @property
    def geometry(self) -> Any:
        return self.table.geometry

    def open(self, device: Any, *, capture: bool = True) -> Any:
        drafts = self.role == "draft"
        profiles = draft_profiles(PREFILL) if drafts else target_profiles(GAMMAS, PREFILL)
        return opened(
            device, self.table, profiles, capture=capture, form=self.form,
            confidence=drafts,
            compute="fp32",  # which holds every token
        )  # fmt: skip


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Device]]:
    """Everything that asks for a GPU gets one in NumPy, and codelet is a table."""
    made: list[Device] = []

    def device() -> Device:
        made.append(Device(1 << 26))
        return made[-1]

    table = TableEngine(vocab=VOCABULARY, max_length=2048, memory=8)
    tables = {"target": table, "draft": near(table, 2, 0.9)}

    def model(*arguments: Any) -> Model:
        role = "draft" if "draft" in arguments else "target"
        return Model(tables[role], role)

    for module in (codelet, models, bandwidth):
        monkeypatch.setattr(module, "open_device", device)
    for module in (codelet, bench):
        monkeypatch.setattr(module, "require", lambda backend, found: None)
    monkeypatch.setattr("gpucheck.environment.require", lambda backend, found: None)
    monkeypatch.setattr(codelet, "model_of", model)
    monkeypatch.setattr(bench, "target_of", model)
    monkeypatch.setattr(models, "target_of", model)
    monkeypatch.setattr(models, "of_bundle", model)
    monkeypatch.setattr(codelet, "reference", lambda role: TableReference(tables[role]))
    monkeypatch.setattr(codelet, "build_tensorrt", lambda *given, form, **more: {"form": form})
    monkeypatch.setattr(bandwidth, "WANTED_BYTES", 1 << 16)
    decomposed = Model(tables["draft"], "draft", DECOMPOSED)
    monkeypatch.setattr(codelet, "read_built", lambda folder: decomposed)
    yield made
    assert all(device.closed for device in made)


@pytest.fixture
def codelet_bundle(request: pytest.FixtureRequest) -> Path:
    bundle: Path = request.getfixturevalue("codelet")
    return bundle


@pytest.fixture
def here(place: Place) -> Place:
    return replace(place, gammas=GAMMAS)


def test_checks_of_codelet_open_and_close_what_they_need(
    devices: list[Device], here: Place
) -> None:
    assert codelet.logits(here, RTX)["draft"]["largest_relative_error"] == 0
    found = codelet.engine(here, RTX)
    assert {name: facts["passed"] for name, facts in found.items()} == dict.fromkeys(
        ("rollback", "replays", "limit", "aliasing", "memory"), True
    )
    assert codelet.rounds(here, RTX)["rounds"] == 2 * 2 * len(GAMMAS)
    assert codelet.forms(here, RTX)["build"] == {"form": DECOMPOSED}
    assert len(devices) == 5


def test_what_fails_is_closed_too(
    devices: list[Device], here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = TableReference(TableEngine(seed=9, vocab=VOCABULARY, max_length=2048))
    monkeypatch.setattr(codelet, "reference", lambda role: wrong)
    with pytest.raises(CheckError, match="limit: scores near the limit") as failed:
        codelet.engine(here, RTX)
    assert not failed.value.facts["limit"]["passed"]
    assert failed.value.facts["memory"]["passed"]
    with pytest.raises(CheckError):
        steps.sized_logits(here, RTX, "1B", "fp16")


def test_passes_and_completions_of_a_pair(devices: list[Device], here: Place) -> None:
    passes = bench.passes(here, RTX, "1B", "fp16")
    assert passes["device_ms"].keys() == passes["host_ms"].keys() == {"1", "2", "3", "5"}
    assert passes["bound_ms"] > 0
    assert passes["decode_of_bound"] > 0
    found = bench.completions(here, RTX, "1B", "fp16")
    assert found["device_round_ms"].keys() == {"1", "2", "4"}
    assert {"0", "1", "2", "4", "auto"} <= found.keys()
    assert found["read_bytes"] == 10**9


def test_the_bandwidth_of_a_device(
    devices: list[Device], here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "WANTED_BYTES", 1 << 16)
    monkeypatch.setattr(bandwidth, "LEAST_BYTES", 1 << 10)
    found = bandwidth.bandwidth(here)
    assert found["copied_bytes"] == 1 << 16
    assert found["lowest"] <= found["bytes_per_second"] <= found["highest"]
    device, now = Device(1 << 20), iter(range(0, 10**9, 1000))
    rate = bandwidth.copy_rate(device, 1 << 10, lambda: next(now))
    assert rate["bytes_per_second"] == round(2 * 1024 * bandwidth.COPIES / 1e-6)


def test_the_probe_compares_real_numbers(tmp_path_factory: pytest.TempPathFactory) -> None:
    out, source = tmp_path_factory.mktemp("probe"), models.codelet_source("draft")
    made = compile_ort_cuda(source.graph, source.weights, out, 128, captured=9)
    with contextlib.closing(
        OrtCudaEngine(
            out / "engine.onnx", made.geometry, batch=1, max_length=128, max_width=64, device="cpu"
        )
    ) as engine:
        assert probe._pass(engine)["argmax"] >= 0
        assert 0 < probe._numbers(engine)["largest_relative_error"] < 1e-2
        forward = engine.forward

        def wrong(tokens: Any, start: Any, rows: int | None = None) -> Any:
            return forward(np.asarray(tokens) + 1, start, rows)

        engine.forward = wrong  # type: ignore[method-assign]
        with pytest.raises(CheckError, match="of their spread off"):
            probe._numbers(engine)


def test_a_probed_plan_is_what_its_record_says() -> None:
    pytest.importorskip("tensorrt_rtx", reason="the record names the library")
    record = probe.record(RTX)
    device: Any = Device(1 << 24)
    table = TableEngine(vocab=VOCABULARY, max_length=2048)
    engine = opened(device, table, record.profiles, confidence=True, candidates=64)
    assert probe._pass(engine)["argmax"] == int(table.row(np.array([1])).argmax())
    engine.close()


def test_a_bundle_is_verified_as_a_user_would(
    here: Place, codelet_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codelet, "require", lambda backend, found: None)
    monkeypatch.setattr(codelet, "bundle_of", lambda place, pair, backend: codelet_bundle)
    shutil.copytree(codelet_bundle, here.work / "codelet-ort-cpu")
    found = codelet.verify(here, "ort-cuda")
    assert (found["unexplained"], found["cpu"]["identical"], found["prompts"]) == (0, 1, 1)
    assert found["drafted"] > 0
    plain = codelet.beside_cpu
    monkeypatch.setattr(codelet, "beside_cpu", lambda *given: {**plain(*given), "unexplained": 1})
    with pytest.raises(CheckError, match="no ties"):
        codelet.verify(here, "ort-cuda")
