"""A machine with a GPU in NumPy, and bundles of plans in NumPy that `specrt.load` opens there."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.cuda_double import MACHINE
from engine.numpy_device import NumpyDevice
from engine.tensorrt_double import (
    PREFILL,
    NumpyPlan,
    draft_profiles,
    geometry_of,
    record_of,
    target_profiles,
)
from engine.test_trt_library import module_like
from runtime.toy import TableEngine, byte_level, near
from specrt.bundle import FORMAT, Manifest, ModelRecord, hash_file
from specrt.engine import ort
from specrt.engine.tensorrt import engine as opening
from specrt.engine.tensorrt import engine_record as fingerprint
from specrt.engine.tensorrt.engine_record import FILE_NAME, PLAN, EngineRecord
from specrt.engine.tensorrt.library import FLAVOURS, Library, describe
from specrt.engine.tensorrt.plan import Wants

LENGTH = 160
VOCABULARY = 270
"""As many as the tokenizer knows, and some more."""
VERSIONS = {"tensorrt": "10.15.1.29", "tensorrt-rtx": "1.7.1.116"}
GAMMAS = tuple(range(9))
BACKENDS = ("tensorrt", "tensorrt")


@dataclass
class Site:
    """What is installed, what was opened, and what it does when it is asked."""

    folder: Path
    tokenizer: Path
    toys: dict[Path, TableEngine] = field(default_factory=dict)
    built: dict[Path, EngineRecord] = field(default_factory=dict)
    """What plans were built as, whatever lies beside them now."""
    devices: list[NumpyDevice] = field(default_factory=list)
    plans: list[NumpyPlan] = field(default_factory=list)
    tables: list[TableEngine] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    """Of devices that are opened from now on."""
    broken_at: dict[str, Collection[int]] = field(default_factory=dict)
    """Positions whose scores are no numbers, by role."""
    refuse: dict[str, Exception] = field(default_factory=dict)
    """What opening a plan raises, by role."""
    sized: dict[str, Any] = field(default_factory=dict)
    """Profiles that a plan has, whatever its record says, by role."""

    def bundle(
        self, target: TableEngine, draft: TableEngine | None, *,
        backends: Sequence[str] = BACKENDS, gammas: Sequence[int] = GAMMAS,
        gamma: int | None = None, eos: Sequence[int] = (), name: str = "pair",
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
            max_length=target.max_length, prefill=PREFILL, gammas=tuple(gammas), gamma=gamma,
            eos_token_ids=tuple(eos), bos_token_id=None, **models,  # type: ignore[arg-type]
            versions={}, device={"machine": platform.machine()}, source="0" * 64,
            files={str(path.relative_to(folder)): hash_file(path) for path in files},
        )  # fmt: skip
        (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
        return folder

    def _model(self, folder: Path, toy: TableEngine, record: EngineRecord) -> ModelRecord:
        folder.mkdir()
        tensorrt = record.backend in FLAVOURS
        engine = folder / (PLAN if tensorrt else "engine.onnx")
        engine.write_bytes(b"a plan of tables")
        self.toys[engine], self.built[engine] = toy, record
        if tensorrt:
            (folder / FILE_NAME).write_text(record.to_json(), encoding="utf-8")
        return ModelRecord(
            f"{folder.name}/{engine.name}", geometry_of(toy), "llama", 1000, 4000, 2, {},
            backend=record.backend,
        )  # fmt: skip

    def device(self) -> NumpyDevice:
        self.devices.append(NumpyDevice(**{"size": 1 << 22, **self.options}))
        return self.devices[-1]

    def plan(self, path: Path, library: Library, device: NumpyDevice, wants: Wants) -> NumpyPlan:
        role = path.parent.name
        if role in self.refuse:
            raise self.refuse[role]
        record, toy = self.built[path], self.toys[path]
        assert library.backend == record.backend
        assert wants == record.wants
        broken = self.broken_at.get(role, ())
        plan = NumpyPlan(device, record, toy, geometry_of(toy), broken_at=broken)
        plan.sized = self.sized.get(role, plan.sized)
        self.plans.append(plan)
        return plan

    def table(self, path: Path, geometry: Any, **_: Any) -> TableEngine:
        made = self.toys[path]
        self.tables.append(made)
        return made

    def hold_closed(self) -> None:
        """Say that nothing is open, and all was given back."""
        assert [plan.closed for plan in self.plans] == [1] * len(self.plans)
        assert [device.closed for device in self.devices] == [1] * len(self.devices)
        assert [device.leaked for device in self.devices] == [[]] * len(self.devices)
        assert all(table.closed for table in self.tables)


def make_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Return a site whose lowest layer is NumPy; all above it is the runtime's own."""
    made = Site(folder, byte_level(folder))
    libraries = {
        name: describe(FLAVOURS[name], module_like(version)) for name, version in VERSIONS.items()
    }
    monkeypatch.setattr(opening, "CudaDevice", made.device)
    monkeypatch.setattr(opening, "open_plan", made.plan)
    monkeypatch.setattr(opening, "open_library", libraries.__getitem__)
    monkeypatch.setattr(fingerprint, "survey", lambda: MACHINE)
    opened = type("Opened", (), {"__new__": lambda _, *given, **how: made.table(*given, **how)})
    monkeypatch.setattr(ort, "OrtEngine", opened)
    return made


def pair(closeness: float = 0.7, seed: int = 3, **options: Any) -> tuple[TableEngine, TableEngine]:
    """Return the tables of a target, and of a draft that is more or less like it."""
    target = TableEngine(seed, vocab=VOCABULARY, max_length=LENGTH, max_width=PREFILL, **options)
    return target, near(target, seed + 1, closeness)
