"""A machine with a GPU in NumPy, and bundles of plans that `specrt.load` opens there."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specrt.bundle import FORMAT, Manifest, ModelRecord, hash_file
from specrt.engine.backends import BACKENDS
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.kernels import LAYOUT
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt import engine_record, library
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, EngineRecord
from specrt.engine.tensorrt.library import FLAVOURS
from support.cuda_double import MACHINE, CudaDouble, DoubleDevice
from support.tensorrt_double import (
    PREFILL,
    VERSIONS,
    EngineDouble,
    draft_profiles,
    geometry_of,
    library_double,
    record_of,
    target_profiles,
)
from support.toy import TableEngine, byte_level, near

LENGTH = 160


def plan_bytes(backend: str, name: str = "") -> bytes:
    """Return a plan that begins as those of its library do."""
    body = bytes(40) + name.encode()
    magic = FLAVOURS[backend].magics[0]
    return magic + bytes(12) + (24 + len(body)).to_bytes(8, "little") + body


class Site:
    """What is installed and what was opened."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, byte_level(folder)
        self.cuda = CudaDouble(1 << 24)
        self.libraries = {name: library_double(name, cuda=self.cuda) for name in VERSIONS}
        self.devices: list[DoubleDevice] = []
        self.toys: dict[Path, TableEngine] = {}
        self.tables: list[TableEngine] = []
        self.changes: dict[str, Callable[[EngineDouble], object]] = {}
        """What is done to a plan when it is opened, by role."""

    def bundle(
        self, target: TableEngine, draft: TableEngine | None, *,
        backends: Sequence[str] = ("tensorrt", "tensorrt"), gammas: Sequence[int] = range(9),
        name: str = "pair", kv_lengths: Sequence[int] = (), **options: Any,
    ) -> Path:  # fmt: skip
        """Write a bundle; `options` are those of the records of its plans."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copyfile(self.tokenizer, folder / "tokenizer.json")
        models: dict[str, ModelRecord | None] = {"draft": None}
        for role, toy, profiles, backend in (
            ("target", target, target_profiles(gammas, PREFILL, kv_lengths), backends[0]),
            ("draft", draft, draft_profiles(PREFILL, kv_lengths), backends[1]),
        ):
            if toy is not None:
                record = record_of(
                    profiles, backend=backend, version=VERSIONS.get(backend, ""), gpu="A GPU",
                    gpu_capability="8.9", confidence=role == "draft", **options,
                )  # fmt: skip
                models[role] = self._model(folder / role, toy, record)
        files = [path for path in folder.rglob("*") if path.is_file()]
        manifest = Manifest(
            format=FORMAT, name="pair", backend=backends[0], precision="fp16", batch=1,
            max_length=target.max_length, prefill=PREFILL, gammas=tuple(gammas), gamma=None,
            eos_token_ids=(), bos_token_id=None, **models,  # type: ignore[arg-type]
            versions={"kernels": LAYOUT}, device={"machine": platform.machine()}, source="0" * 64,
            files={str(path.relative_to(folder)): hash_file(path) for path in files},
        )  # fmt: skip
        (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        return folder

    def _model(self, folder: Path, toy: TableEngine, record: EngineRecord) -> ModelRecord:
        def plan(log: Any) -> EngineDouble:
            made = EngineDouble(self.cuda, log, record, toy)
            self.changes.get(folder.name, lambda engine: None)(made)
            return made

        folder.mkdir()
        engine, data = folder / "engine.onnx", b"a graph of tables"
        if record.backend in FLAVOURS:
            engine, data = folder / PLAN, plan_bytes(record.backend, str(folder))
            (folder / FILE_NAME).write_text(record.to_json(), encoding="utf-8")
            self.libraries[record.backend].module.plans[data] = plan
        engine.write_bytes(data)
        self.toys[engine] = toy
        return ModelRecord(
            f"{folder.name}/{engine.name}", geometry_of(toy), "llama", 1000, 4000, 2, {},
            backend=record.backend,
        )  # fmt: skip

    def device(self) -> DoubleDevice:
        self.devices.append(DoubleDevice(cuda=self.cuda))
        return self.devices[-1]

    def table(self, spec: EngineSpec) -> TableEngine:
        self.tables.append(self.toys[spec.path])
        return self.toys[spec.path]

    def hold_closed(self) -> None:
        """Say that nothing is open, and all was given back."""
        assert all(device.closed == 1 and not device.leaked for device in self.devices)
        assert (self.cuda.memory, self.cuda.graphs, self.cuda.streams) == ({}, {}, 0)
        assert all(table.closed for table in self.tables)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A machine whose libraries are doubles, on which nothing is left open."""
    made = Site(tmp_path)
    monkeypatch.setattr(opening, "CudaDevice", made.device)
    monkeypatch.setattr(opening, "open_library", made.libraries.__getitem__)
    for module in (engine_record, library):
        monkeypatch.setattr(module, "survey", lambda: MACHINE)
    cpu = replace(BACKENDS["ort-cpu"], runs={"decoder": made.table})
    monkeypatch.setitem(BACKENDS, "ort-cpu", cpu)
    yield made
    made.hold_closed()


def pair(closeness: float = 0.7, seed: int = 3, **options: Any) -> tuple[TableEngine, TableEngine]:
    """Return the tables of a target, and of a draft that is more or less like it.

    Their vocabulary is what the tokenizer knows, and some more.
    """
    target = TableEngine(seed, vocab=270, max_length=LENGTH, max_width=PREFILL, **options)
    return target, near(target, seed + 1, closeness)
