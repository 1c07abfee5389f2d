"""A graph lowered for TensorRT, run by ONNX Runtime on the CPU: what a plan is held to."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import ArrayLike, NDArray

from specrt.engine import Candidates, Confidence, Logits, Tokens, check_bounds
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.compile.engine_file import ENGINE
from specrt_export.compile.halved import runnable
from specrt_export.lower.peak import CANDIDATES
from specrt_export.portable import repeated

_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class _Output:
    values: Mapping[str, NDArray[Any]]

    @property
    def argmax(self) -> Tokens:
        """The most likely next tokens, [B, R] int64."""
        return self.values["argmax"]

    @property
    def logits(self) -> Logits:
        """The scores, [B, R, V] f32."""
        return self.values["logits"]

    @property
    def confidence(self) -> Confidence | None:
        """Probability of each row's likeliest token, where the graph computes it."""
        return self.values.get("confidence")

    @property
    def candidates(self) -> Candidates | None:
        """The best scores of each row and their ids, where the graph cuts them out."""
        scores, ids = (self.values.get(name) for name in CANDIDATES)
        return None if scores is None or ids is None else (scores, ids)


class LoweredEngine:
    """An engine over a lowered graph of standard operators; slow, and exact about what it means.

    KV buffers are handed in and taken back in every pass, so both forms of caches run here.
    """

    def __init__(self, path: Path, geometry: Geometry, *, batch: int, max_length: int) -> None:
        self.geometry = geometry
        self.batch = batch
        self.max_length = self.max_width = max_length
        self._path = path
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 3
        # Only checks run here, beside other work: waiting threads must not take its cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with _blamed(path):
            self._session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]
        self._caches = {
            value.name: np.zeros(value.shape, _TYPES[value.type])
            for value in self._session.get_inputs()
            if value.name.partition(".")[0] in ("key", "value")
        }

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> _Output:
        """Run one pass; see `Engine.forward`.

        Raises: BuildError for a graph that does not run.
        """
        fed = np.asarray(tokens, np.int64)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,))
        width = fed.shape[1]
        check_bounds(self, width, int(starts.min()), int(starts.max()))
        feed = {
            "input_ids": fed,
            "start": starts,
            "rows": np.arange(width - (rows or width), width),
            **self._caches,
        }
        with _blamed(self._path):
            found = dict(zip(self._names, self._session.run(self._names, feed), strict=True))
        self._caches = {name: found[f"present_{name}"] for name in self._caches}
        return _Output(found)

    def repeat(self, filled: int) -> None:
        """Fill the KV buffers with copies of their first positions, whatever is there."""
        self._caches = {name: repeated(one, filled) for name, one in self._caches.items()}

    def close(self) -> None:
        """Drop the session and the KV buffers."""
        self._caches = {}
        self._session = None


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Say of a graph that ONNX Runtime refuses whose fault it is."""
    try:
        yield
    except Exception as error:  # the library's exceptions have no common class
        raise BuildError(
            f"ONNX Runtime {ort.__version__} does not run the lowered graph {path.name}: "
            f"{str(error).splitlines()[0][:300]}. This is a defect of the lowering: please report "
            "the architecture"
        ) from error


@contextmanager
def lowered_engine(
    folder: Path, geometry: Geometry, *, batch: int, max_length: int
) -> Iterator[LoweredEngine]:
    """Open the lowered graph of a folder; one in bf16, which has no CPU kernels, in fp32."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        place = runnable(folder, Path(scratch)) / ENGINE
        engine = LoweredEngine(place, geometry, batch=batch, max_length=max_length)
        try:
            yield engine
        finally:
            engine.close()
