"""A machine with a GPU in NumPy for the steps of gpu-check: its engines are tables of scores."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpucheck import correctness
from gpucheck.correctness import Ids, Scores
from gpucheck.inventory import TENSORRT
from gpucheck.settings import RunSettings
from gpucheck.workbench import Built, Workbench

from specrt.engine.protocol import CudaGraphs
from specrt.generator import Generator
from specrt.system.gpu import Gpu, Survey
from support.gpu_double import PREFILL, DoubleDevice, draft_profiles, opened, target_profiles
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

    def __init__(self, table: TableEngine) -> None:
        self.__dict__.update(table.__dict__, buffer=table.buffer.copy(), calls=[], _outputs={})

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
class BenchDouble(Workbench):
    """A workbench whose engines answer as tables; `damage` is done to each that is opened."""

    damage: Callable[[Any], None] = lambda engine: None
    devices: list[DoubleDevice] = field(default_factory=list)

    def survey(self) -> Survey:
        return Survey((Gpu(0, "Double", "8.9", 1 << 29),), "", (13, 0), "1.0")

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
            drafts, gammas = role == "draft", self.settings.gammas
            profiles = draft_profiles(PREFILL) if drafts else target_profiles(gammas, PREFILL)
            engine: Any = opened(
                device, table, profiles, capture=capture, confidence=drafts,
                backend=built.backend, compute="fp32",  # which holds every token
            )  # fmt: skip
        else:
            engine = OrtTable(table)
        self.damage(engine)
        return engine

    def reference(self, role: str) -> Any:
        return TableReference(tables()[role])

    def bundle(self, pair: str, backend: str) -> AbstractContextManager[Generator]:
        return self.pair(self.codelet(backend, "target"), self.codelet(backend, "draft"))

    def loaded(self, bundle: Path) -> AbstractContextManager[Generator]:
        return self.bundle("codelet", "ort-cuda")


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchDouble]:
    """A machine with little to do; at the end every device was closed and emptied."""
    machine = BenchDouble(
        RunSettings(
            work=tmp_path, sizes=("1B",), precisions=("fp16",), gammas=(1, 4), prompts=1,
            tokens=12, laps=1, copied_bytes=1 << 16,
        )
    )  # fmt: skip
    built = lambda bench, backend, *_: bench.codelet(backend, "draft")  # noqa: E731
    monkeypatch.setattr(correctness, "probe", built)
    monkeypatch.setattr(correctness, "cpu_bundle", lambda *_: Path("cpu"))
    monkeypatch.setattr(correctness, "library_facts", lambda _: {"version": "1.0"})
    yield machine
    assert all(device.closed == 1 and not device.leaked for device in machine.devices)
