"""Hold an ort-cuda engine to the portable graph it came from, on a machine without a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx

from specrt.engine import Engine
from specrt.engines.ort_cuda import OrtCudaEngine
from specrt.errors import BuildError
from specrt.geometry import Geometry
from specrt_export.compile.engine_file import ENGINE, write_engine
from specrt_export.compile.ort_cpu import CompiledModel
from specrt_export.compile.ort_cuda import compile_ort_cuda, compute_type
from specrt_export.equal import past_windows
from specrt_export.lower.stored import Stored, as_float, stored_weights
from specrt_export.portable import GraphRun, runs_here

TOLERANCES = {"fp32": 2e-4, "fp16": 1e-2, "bf16": 5e-2}
"""Largest error of a logit over the spread of its row. fp32 only sums in another order; fp16 rounds
by up to 5e-4, bf16 by up to 4e-3; a pass rounds a few times a layer, in all directions. Seen: 8e-4
and 1e-3 on codelet's eight layers, 2e-3 and 1.4e-2 on random models whose scores hang on every bit.
A wrong rotation, length or scale moves logits by a tenth of the spread and more."""

_FLOAT, _BF16 = onnx.TensorProto.FLOAT, onnx.TensorProto.BFLOAT16


def build_ort_cuda(
    graph: Path, weights: Path, out: Path, *, max_length: int, gammas: Sequence[int],
    precision: str, batch: int = 1, confidence: bool = False,
) -> CompiledModel:  # fmt: skip
    """Compile a portable graph for ort-cuda, and hold the engine to it; no GPU is needed.

    Every width up to the widest verify pass is captured on the device. `precision` is what the
    weights of the layers are stored as.
    Raises: BuildError, CheckpointError, ExportError.
    """
    widest = max(gammas, default=0) + 1
    compiled = compile_ort_cuda(
        graph, weights, out, max_length, compute=compute_type(precision), captured=widest,
        batch=batch, confidence=confidence,
    )  # fmt: skip
    check_halved(graph, weights, out, compiled.geometry, max_length, sorted({1, widest}))
    return compiled


def check_halved(
    graph: Path, weights: Path, engine: Path, geometry: Geometry, max_length: int,
    widths: Sequence[int],
) -> float | None:  # fmt: skip
    """Run engine and portable graph on the same tokens; return the largest relative error.

    The CPU provider runs an fp16 engine as it is, computing in fp32 where it has no kernel, and a
    bf16 one with its weights widened. Returns None where the ONNX Runtime installed is too old to
    run the portable graph.
    Raises: BuildError above the tolerance.
    """
    if not runs_here():
        return None
    plan = passes(geometry, max_length, widths)
    widest = max(width for _, width in plan)
    with on_cpu(engine, geometry, max_length, widest) as halved:
        return _hold(GraphRun(graph, weights), halved, plan, compute_type_of(engine))


def _hold(
    reference: GraphRun, engine: Engine, plan: Sequence[tuple[int, int]], compute: str
) -> float:
    """Run engine and portable graph through (start, width) passes; return the largest error.

    Raises: BuildError above the tolerance of what the engine computes in.
    """
    reach = max(start + width for start, width in plan)
    reference.reset(batch=1, length=reach)
    tokens = np.random.default_rng(0).integers(0, engine.geometry.vocab_size, (1, reach))
    tolerance, worst = TOLERANCES[compute], 0.0
    for start, width in plan:
        piece = tokens[:, start : start + width]
        expected = reference(piece, [start], range(width))[0]
        found = engine.forward(piece, start).logits
        error = float(np.abs(found - expected).max()) / (float(np.ptp(expected)) or 1.0)
        if not error <= tolerance:  # also when either is not a number
            raise BuildError(
                f"the ort-cuda engine differs from the portable graph by {error:.1e} of the "
                f"spread of the logits at position {start}, width {width}; expected below "
                f"{tolerance:.0e}. In fp16 the model may overflow: build with precision bf16"
            )
        worst = max(worst, error)
    return worst


@contextmanager
def on_cpu(engine: Path, geometry: Geometry, max_length: int, max_width: int) -> Iterator[Engine]:
    """Open the ort-cuda engine of a folder on the CPU provider."""
    with tempfile.TemporaryDirectory(dir=engine.parent) as scratch:
        folder = runnable(engine, Path(scratch))
        opened = OrtCudaEngine(
            folder / ENGINE, geometry, batch=1, max_length=max_length, max_width=max_width,
            device="cpu",
        )  # fmt: skip
        try:
            yield opened
        finally:
            opened.close()


def runnable(engine: Path, scratch: Path) -> Path:
    """Return the engine's folder, or one with a copy in fp32: bf16 has no CPU kernels."""
    if compute_type_of(engine) != "bf16":
        return engine
    model = onnx.load(engine / ENGINE, load_external_data=False)
    widened = {
        name: as_float(weight) if weight.onnx_type == _BF16 else weight
        for name, weight in stored_weights(model, engine).items()
    }
    write_engine(_widened(model, widened), widened, scratch)
    return scratch


def compute_type_of(engine: Path) -> str:
    """Return what the engine of a folder computes in: the type of its KV buffers."""
    model = onnx.load(engine / ENGINE, load_external_data=False)
    kinds = {i.type.tensor_type.elem_type for i in model.graph.input if i.name.startswith("key.")}
    return {_BF16: "bf16", _FLOAT: "fp32"}.get(kinds.pop(), "fp16")


def _widened(model: onnx.ModelProto, weights: dict[str, Stored]) -> onnx.ModelProto:
    for value in [*model.graph.input, *model.graph.output]:
        if value.type.tensor_type.elem_type == _BF16:
            value.type.tensor_type.elem_type = _FLOAT
    for tensor in model.graph.initializer:
        if tensor.data_type == _BF16 and tensor.name not in weights:
            upper = np.frombuffer(tensor.raw_data, np.uint16).astype(np.uint32)
            tensor.raw_data = (upper << 16).tobytes()
        if tensor.data_type == _BF16:
            tensor.data_type = _FLOAT
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == _BF16:
                attribute.i = _FLOAT
    return model


def passes(geometry: Geometry, max_length: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, width) of each pass: past the windows, then each width twice.

    The second time goes back to the positions of the first, over stale keys.
    """
    prefill = max(1, min(past_windows(geometry), max_length - max(widths)))
    starts = {width: min(prefill, max_length - width) for width in widths}
    passes = [(starts[width], width) for width in widths for _ in range(2)]
    return [(0, prefill), *passes]
