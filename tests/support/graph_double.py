"""A plan that ONNX Runtime runs: the graph that TensorRT was handed, on the double's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from specrt.bundle import Geometry
from specrt.engine.ort import silent_options
from specrt.engine.tensorrt.engine_record import EngineRecord
from specrt.engine.tensorrt.library import NATIVE
from specrt.engine.tensorrt.passes import cache_names
from support.cuda_double import CudaDouble
from support.tensorrt_double import EngineDouble, Log

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
