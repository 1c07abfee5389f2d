"""A plan that ONNX Runtime runs: the graph that TensorRT was handed, on the double's memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from specrt.bundle import Bundle, Geometry
from specrt.engine.ort.ort_engine import silent_options
from specrt.engine.tensorrt.engine_record import EngineRecord, read_engine_record
from specrt.engine.tensorrt.library import NATIVE
from specrt.engine.tensorrt.passes import cache_names
from support.cuda_double import CudaDouble, DoubleDevice
from support.tensorrt_double import EngineDouble, Log, library_double

RTX = "tensorrt-rtx"
TYPES = {"float32": np.float32, "int64": np.int64}


class GraphDouble(EngineDouble):
    """A plan in fp32 that computes what its graph means."""

    def __init__(
        self, cuda: CudaDouble, log: Log, record: EngineRecord, graph: Path, geometry: Geometry,
        batch: int, max_length: int,
    ) -> None:  # fmt: skip
        sizes = SimpleNamespace(batch=batch, max_length=max_length)
        super().__init__(cuda, log, record, sizes, geometry)
        options = silent_options()
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(str(graph), options, ["CPUExecutionProvider"])
        self.passes: list[tuple[int, int]] = []
        """Width and rows of each."""

    def run(self, addresses: Mapping[str, int], width: int, rows: int) -> None:
        """Do one pass on the bytes at the addresses."""
        self.passes.append((width, rows))
        inputs = [name for name, tensor in self.tensors.items() if tensor.is_input]
        for name in cache_names(self.geometry):
            same = addresses[name] == addresses[f"present_{name}"]
            assert same is (self.record.form == NATIVE), f"{name} is updated elsewhere"
        feed = {name: self._bytes(addresses, name, width, rows).copy() for name in inputs}
        names = [output.name for output in self._session.get_outputs()]
        for name, made in zip(names, self._session.run(names, feed), strict=True):
            self._bytes(addresses, name, width, rows)[:] = made

    def _bytes(self, addresses: Mapping[str, int], name: str, width: int, rows: int) -> Any:
        tensor = self.tensors[name]
        of_rows = name in ("rows", "logits", "argmax", "confidence", "state")
        size = rows if of_rows or name.startswith("candidates") else width
        shape = tuple(size if s == -1 else s for s in tensor.shape)
        return self.array(addresses[name], TYPES[tensor.type], shape)


class PartDouble(GraphDouble):
    """The same of what conditions a decoder, which has no KV buffers."""

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int]:
        """Return the positions of a source: those it was told, or all."""
        assert self.record.source is not None
        width = shapes.get("input_ids", (1, self.record.source.positions))[1]
        return width, width, 0

    def run(self, addresses: Mapping[str, int], width: int, rows: int) -> None:
        """Read one source from the bytes at the addresses."""
        self.passes.append((width, rows))
        inputs = [name for name, tensor in self.tensors.items() if tensor.is_input]
        feed = {name: self._bytes(addresses, name, width, rows).copy() for name in inputs}
        names = [output.name for output in self._session.get_outputs()]
        for name, made in zip(names, self._session.run(names, feed), strict=True):
            self._bytes(addresses, name, width, rows)[:] = made


class Gpu:
    """A machine whose plans are run by ONNX Runtime, on a device in NumPy."""

    def __init__(self, size: int = 1 << 24, graphs: str = "") -> None:
        self.graphs = graphs
        """Where lowered graphs lie, next to a bundle."""
        self.cuda = CudaDouble(size)
        self.devices: list[DoubleDevice] = []
        self.plans: dict[str, GraphDouble] = {}

    def device(self) -> DoubleDevice:
        self.devices.append(DoubleDevice(cuda=self.cuda))
        return self.devices[-1]

    def library(self, bundle: Path) -> Any:
        manifest = Bundle.open(bundle).manifest
        library = library_double(RTX, manifest.versions[RTX], cuda=self.cuda)
        for model in manifest.models:
            role = model.engine.partition("/")[0]
            for plan in (bundle / role).glob("*.plan"):
                made = partial(self.plan, plan, model.geometry, manifest)
                library.module.plans[plan.read_bytes()] = made
        return library

    def plan(self, plan: Path, geometry: Any, manifest: Any, log: Any) -> GraphDouble:
        """Open what a plan was made of: the lowered graph, next to the bundle."""
        role, part = plan.parent.name, plan.stem
        record = read_engine_record(plan.with_suffix(".json"))
        graph = plan.parents[2] / self.graphs / role / f"{part}.onnx"
        batch = 1 if record.part else manifest.batch
        kind = PartDouble if record.part else GraphDouble
        made = kind(self.cuda, log, record, graph, geometry, batch, manifest.max_length)
        self.plans[role if not record.part else f"{role} {part}"] = made
        return made

    def hold_closed(self) -> None:
        assert all(device.closed == 1 and not device.leaked for device in self.devices)
        assert (self.cuda.memory, self.cuda.graphs, self.cuda.streams) == ({}, {}, 0)
