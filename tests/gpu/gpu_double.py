"""A machine with a GPU, in NumPy: engines are tables of scores, plans run on a device in NumPy.

The one double of all tests here. It replaces what a step asks of its workbench and cannot have
without a GPU, and nothing else: steps, checks and measurements are the real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gpucheck.correctness import Ids, Scores
from gpucheck.evidence import Evidence, Facts
from gpucheck.inventory import TENSORRT
from gpucheck.workbench import Built, Workbench

from specrt.engine.protocol import CudaGraphs
from specrt.generator import Generator
from specrt.system.gpu import Gpu, Survey
from support.cuda_double import DoubleDevice
from support.tensorrt_double import PREFILL, draft_profiles, opened, target_profiles
from support.toy import TableEngine, near

VOCABULARY, LENGTH = 8192, 256


class TableReference:
    """A table of scores as what engines are compared with."""

    def __init__(self, table: TableEngine) -> None:
        self._engine = copy.copy(table)

    def reset(self, batch: int, length: int) -> None:
        self._engine.buffer = np.full_like(self._engine.buffer, -1)

    def __call__(
        self, tokens: Ids, start: Sequence[int], rows: Sequence[int]
    ) -> tuple[Scores, Ids]:
        output = self._engine.forward(tokens, start[0], len(rows))
        return np.array(output.logits), np.array(output.argmax)


class OrtTable(TableEngine):
    """A table that captures as the engine of ONNX Runtime does."""

    @classmethod
    def of(cls, table: TableEngine) -> OrtTable:
        made = cls.__new__(cls)
        made.__dict__.update(table.__dict__, buffer=table.buffer.copy(), calls=[], _outputs={})
        return made

    def captures(self, width: int, rows: int) -> bool:
        return width < 10

    @property
    def cuda_graphs(self) -> CudaGraphs:
        sizes = {(call.width, call.rows) for call in self.calls if call.width < 10}
        return CudaGraphs(len(sizes), ())


@cache
def tables() -> dict[str, TableEngine]:
    """Return the tables of every machine's models."""
    target = TableEngine(vocab=VOCABULARY, max_length=LENGTH, memory=8, max_width=64)
    return {"target": target, "draft": near(target, 2, 0.9)}


@dataclass
class GpuDouble(Workbench):
    """A workbench whose engines answer as tables; `damage` is done to each that is opened."""

    damage: Callable[[Any], None] = lambda engine: None
    devices: list[DoubleDevice] = field(default_factory=list)

    def survey(self) -> Survey:
        return Survey((Gpu(0, "Double", "8.9", 1 << 29),), "", (13, 0), "1.0")

    def library(self, backend: str) -> Facts:
        return {"version": "1.0"}

    def new_device(self) -> DoubleDevice:
        self.devices.append(DoubleDevice(1 << 26))
        return self.devices[-1]

    def codelet(self, backend: str, role: str, pair: str = "codelet") -> Built:
        table = tables()[role]
        width = PREFILL if backend in TENSORRT else table.max_width
        return Built(Path(role), backend, table.geometry, 10**9, "fp16", LENGTH, width)

    def target(self, size: str, precision: str, backend: str) -> Built:
        return self.codelet(backend, "target")

    def open(self, built: Built, device: Any = None, *, capture: bool = True) -> Any:
        role, table = built.path.name, tables()[built.path.name]
        if built.backend in TENSORRT:
            drafts = role == "draft"
            gammas = self.settings.gammas
            profiles = draft_profiles(PREFILL) if drafts else target_profiles(gammas, PREFILL)
            engine: Any = opened(
                device, table, profiles, capture=capture, confidence=drafts,
                backend=built.backend, compute="fp32",  # which holds every token
            )  # fmt: skip
        else:
            engine = OrtTable.of(table)
        self.damage(engine)
        return engine

    def reference(self, role: str) -> Any:
        return TableReference(tables()[role])

    @contextmanager
    def bundle(self, pair: str, backend: str) -> Iterator[Generator]:
        with self.pair(self.codelet(backend, "target"), self.codelet(backend, "draft")) as one:
            yield one

    @contextmanager
    def cpu_pair(self, pair: str = "codelet") -> Iterator[Generator]:
        with self.bundle("codelet", "ort-cuda") as generator:
            yield generator

    def build_probe(self, backend: str, way: str, evidence: Evidence) -> Built:
        evidence.add(build_seconds=1.0)
        return self.codelet(backend, "draft")

    def build_bundle(self, pair: str, backend: str, evidence: Evidence) -> None:
        evidence.add(build_seconds=1.0)

    def build_target(self, size: str, precision: str, backend: str, evidence: Evidence) -> None:
        evidence.add(read_bytes=10**9)

    def export_grown(self, size: str, evidence: Evidence) -> None:
        evidence.add(graph_bytes=1)

    def grow(self, size: str, evidence: Evidence) -> None:
        evidence.add(parameters=1)
