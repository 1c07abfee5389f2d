"""A machine with a GPU in NumPy, and bundles of plans that `specrt.load` opens there."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specrt.bundle import FORMAT, Manifest, ModelRecord, hash_file
from specrt.engine import ort
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
VOCABULARY = 270
"""As many as the tokenizer knows, and some more."""
GAMMAS = tuple(range(9))
BACKENDS = ("tensorrt", "tensorrt")
Change = Callable[[EngineDouble], object]


def plan_bytes(backend: str, name: str = "") -> bytes:
    """Return a plan that begins as those of its library do."""
    body = bytes(40) + name.encode()
    magic = FLAVOURS[backend].magics[0]
    return magic + bytes(12) + (24 + len(body)).to_bytes(8, "little") + body


@dataclass
class Site:
    """What is installed and what was opened."""

    folder: Path
    tokenizer: Path
    cuda: CudaDouble = field(default_factory=lambda: CudaDouble(1 << 24))
    devices: list[DoubleDevice] = field(default_factory=list)
    toys: dict[Path, TableEngine] = field(default_factory=dict)
    tables: list[TableEngine] = field(default_factory=list)
    changes: dict[str, Change] = field(default_factory=dict)
    """What is done to a plan when it is opened, by role."""

    def __post_init__(self) -> None:
        self.libraries = {name: library_double(name, cuda=self.cuda) for name in VERSIONS}

    def bundle(
        self, target: TableEngine, draft: TableEngine | None, *,
        backends: Sequence[str] = BACKENDS, gammas: Sequence[int] = GAMMAS, name: str = "pair",
        **options: Any,
    ) -> Path:  # fmt: skip
        """Write a bundle; `options` are those of the records of its plans."""
        folder = self.folder / name
        folder.mkdir()
        shutil.copyfile(self.tokenizer, folder / "tokenizer.json")
        built = [g for g in gammas if g]
        roles = {"target": (target, target_profiles(built, PREFILL), backends[0])}
        if draft is not None:
            roles["draft"] = (draft, draft_profiles(PREFILL), backends[1])
        models: dict[str, ModelRecord | None] = {"draft": None}
        for role, (toy, profiles, backend) in roles.items():
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
            versions={}, device={"machine": platform.machine()}, source="0" * 64,
            files={str(path.relative_to(folder)): hash_file(path) for path in files},
        )  # fmt: skip
        (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        return folder

    def _model(self, folder: Path, toy: TableEngine, record: EngineRecord) -> ModelRecord:
        folder.mkdir()
        engine, data = folder / "engine.onnx", b"a graph of tables"
        if record.backend in FLAVOURS:
            engine = folder / PLAN
            (folder / FILE_NAME).write_text(record.to_json(), encoding="utf-8")
            data = plan_bytes(record.backend, str(folder))
            plans = self.libraries[record.backend].module.plans
            plans[data] = partial(self._plan, folder.name, record, toy)
        engine.write_bytes(data)
        self.toys[engine] = toy
        return ModelRecord(
            f"{folder.name}/{engine.name}", geometry_of(toy), "llama", 1000, 4000, 2, {},
            backend=record.backend,
        )  # fmt: skip

    def _plan(self, role: str, record: EngineRecord, toy: TableEngine, log: Any) -> EngineDouble:
        made = EngineDouble(self.cuda, log, record, toy)
        self.changes.get(role, lambda engine: None)(made)
        return made

    def device(self) -> DoubleDevice:
        self.devices.append(DoubleDevice(cuda=self.cuda))
        return self.devices[-1]

    def table(self, path: Path, geometry: Any, **_: Any) -> TableEngine:
        self.tables.append(self.toys[path])
        return self.toys[path]

    def hold_closed(self) -> None:
        """Say that nothing is open, and all was given back."""
        assert [device.closed for device in self.devices] == [1] * len(self.devices)
        assert [device.leaked for device in self.devices] == [[]] * len(self.devices)
        assert (self.cuda.memory, self.cuda.graphs, self.cuda.streams) == ({}, {}, 0)
        assert all(table.closed for table in self.tables)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A machine whose libraries are doubles, on which nothing is left open."""
    made = Site(tmp_path, byte_level(tmp_path))
    monkeypatch.setattr(opening, "CudaDevice", made.device)
    monkeypatch.setattr(opening, "open_library", made.libraries.__getitem__)
    for module in (engine_record, library):
        monkeypatch.setattr(module, "survey", lambda: MACHINE)
    opened = type("Opened", (), {"__new__": lambda _, *given, **how: made.table(*given, **how)})
    monkeypatch.setattr(ort, "OrtEngine", opened)
    yield made
    made.hold_closed()


def pair(closeness: float = 0.7, seed: int = 3, **options: Any) -> tuple[TableEngine, TableEngine]:
    """Return the tables of a target, and of a draft that is more or less like it."""
    target = TableEngine(seed, vocab=VOCABULARY, max_length=LENGTH, max_width=PREFILL, **options)
    return target, near(target, seed + 1, closeness)
