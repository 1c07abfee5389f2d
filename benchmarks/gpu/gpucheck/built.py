"""Engines on disk, and what is known of each without opening it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpucheck.step import NotRunError
from specrt.bundle import Geometry, Manifest, read_manifest
from specrt.engine.backends import open_engine
from specrt.engine.protocol import Engine
from specrt.engine.tensorrt.engine_record import FILE_NAME, EngineRecord, read_engine_record

FACTS = "built.json"
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
TENSORRT = ("tensorrt", "tensorrt-rtx")


@dataclass(frozen=True)
class Built:
    """One compiled model."""

    path: Path
    """The plan, or the graph of ort-cuda."""
    backend: str
    geometry: Geometry
    max_length: int
    max_width: int
    read_bytes: int
    """Of weights: what a pass has to read at least, each once."""
    precision: str = "fp16"

    @property
    def record(self) -> EngineRecord:
        """What is known of a plan."""
        return read_engine_record(self.path.with_name(FILE_NAME))

    def open(self, device: Any = None, *, capture: bool = True) -> Engine:
        """Open it; a plan on a device that the caller closes."""
        if self.backend in TENSORRT:
            return self._plan(device, capture)
        if self.backend == "ort-cuda":
            from specrt.engine.ort_cuda import OrtCudaEngine

            return OrtCudaEngine(
                self.path, self.geometry, batch=1, max_length=self.max_length,
                max_width=self.max_width, capture=capture,
            )  # fmt: skip
        return open_engine(
            self.backend, self.path, self.geometry, batch=1, max_length=self.max_length,
            max_width=self.max_width, threads=1,
        )  # fmt: skip

    def _plan(self, device: Any, capture: bool) -> Engine:
        """Open a plan without asking whether the library lists this GPU."""
        from specrt.engine.tensorrt.engine import TensorRtEngine
        from specrt.engine.tensorrt.library import open_library
        from specrt.engine.tensorrt.plan import open_plan

        record = self.record
        plan = open_plan(self.path, open_library(self.backend), device, record.wants)
        return TensorRtEngine(
            plan, device, record, self.geometry, batch=1, max_length=self.max_length,
            max_width=self.max_width, capture=capture,
        )  # fmt: skip

    def write(self) -> None:
        """Leave what is known beside the engine."""
        said = {**asdict(self), "path": self.path.name, "geometry": self.geometry.to_json()}
        self.path.with_name(FACTS).write_text(json.dumps(said), encoding="utf-8")


def read_built(folder: Path) -> Built:
    """Return the engine of a folder.

    Raises: NotRunError where it was not built.
    """
    facts = folder / FACTS
    if not facts.is_file():
        raise NotRunError(f"{folder.name} was not built: its build step comes first")
    said = json.loads(facts.read_text(encoding="utf-8"))
    said["geometry"] = Geometry.from_json(said["geometry"])
    said["path"] = folder / said["path"]
    return Built(**said)


def of_bundle(bundle: Path, role: str) -> Built:
    """Return a model of a bundle.

    Raises: NotRunError where it was not built.
    """
    if not (bundle / "manifest.json").is_file():
        raise NotRunError(f"{bundle.name} was not built: its build step comes first")
    manifest: Manifest = read_manifest(bundle)
    model = manifest.target if role == "target" else manifest.draft
    assert model is not None, "codelet has a draft"
    return Built(
        bundle / model.engine, manifest.backend_of(model), model.geometry, manifest.max_length,
        manifest.max_width, model.parameters * ITEM_BYTES.get(model.precision, 2), model.precision,
    )  # fmt: skip
