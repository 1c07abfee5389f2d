"""Hold a compiled engine to the portable graph it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from specrt.engine import open_engine
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.compile.ort_cpu import ENGINE
from specrt_export.mapped import map_weights

TOLERANCE = 2e-4
"""Largest error of a logit over the spread of its row; fp32 sums in another order give 1e-6."""


def reference_runs() -> bool:
    """Tell whether the ONNX Runtime installed here can run a portable graph (opset 24)."""
    major, minor = (int(part) for part in ort.__version__.split(".")[:2])
    return (major, minor) >= (1, 25)


class PortableGraph:
    """A portable graph in ONNX Runtime, its weights mapped: the reference for what it becomes.

    Shapes: KV buffers are [1, kv_heads, max_length, head_dim].
    """

    def __init__(self, graph: Path, checkpoint: Path, geometry: Geometry, max_length: int) -> None:
        weights = map_weights(onnx.load(graph, load_external_data=False), checkpoint)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        values = [
            ort.OrtValue.ortvalue_from_numpy_with_onnx_type(w.array, w.onnx_type) for w in weights
        ]
        options.add_external_initializers([w.name for w in weights], values)
        self._session: Any = ort.InferenceSession(
            graph.read_bytes(), options, ["CPUExecutionProvider"]
        )
        shape = (1, geometry.kv_heads, max_length, geometry.head_dim)
        self._names = [f"{kind}.{i}" for i in range(geometry.layers) for kind in ("key", "value")]
        self._caches = {name: np.zeros(shape, np.float32) for name in self._names}

    def forward(self, tokens: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Return the logits of every position, [S, V] f32."""
        feeds = {
            "input_ids": tokens[None],
            "start": np.array([start], np.int64),
            "rows": np.arange(len(tokens), dtype=np.int64),
            **self._caches,
        }
        wanted = ["logits", *(f"present_{name}" for name in self._names)]
        logits, *caches = self._session.run(wanted, feeds)
        self._caches = dict(zip(self._names, caches, strict=True))
        result: NDArray[np.float32] = logits[0]
        return result


def check_equal(
    graph: Path, checkpoint: Path, engine: Path, geometry: Geometry, max_length: int,
    widths: list[int],
) -> float | None:  # fmt: skip
    """Run engine and portable graph on the same tokens; return the largest relative error.

    A prefill that reaches past every sliding window, then a pass of each width, then the same
    positions again over stale keys. Returns None where the ONNX Runtime installed is too old to
    run the portable graph.
    Raises: BuildError above the tolerance.
    """
    reach = max((w for w in geometry.windows if w <= 512), default=0)
    prefill = max(1, min(reach + 24, max_length - sum(widths)))
    tokens = np.random.default_rng(0).integers(0, geometry.vocab_size, max_length)
    plan = [(0, prefill)]
    for width in widths:
        plan += [(prefill, width), (prefill + width, width)]
    plan = [(start, width) for start, width in plan if start + width <= max_length]
    if not reference_runs():
        return None
    reference = PortableGraph(graph, checkpoint, geometry, max_length)
    compiled = open_engine(
        "ort-cpu", engine / ENGINE, geometry, batch=1, max_length=max_length,
        max_width=max(prefill, *widths), threads=1,
    )  # fmt: skip
    worst = 0.0
    for start, width in plan:
        piece = tokens[start : start + width]
        expected = reference.forward(piece, start)
        found = compiled.forward(piece[None], start).logits[0]
        spread = float(expected.max() - expected.min()) or 1.0
        worst = max(worst, float(np.abs(found - expected).max()) / spread)
        if not worst <= TOLERANCE:
            raise BuildError(
                f"the compiled engine differs from the portable graph by {worst:.1e} of the "
                f"spread of the logits at position {start}, width {width}; expected "
                f"below {TOLERANCE:.0e}. This is a defect of the lowering: please "
                "report the architecture"
            )
    compiled.close()
    return worst
