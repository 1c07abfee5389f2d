"""Codelet's draft compiled for ONNX Runtime, once for all workers, and engines over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shared import locked, shared_folder
from specrt.engine.backends import open_engine
from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.cuda_engine import OrtCudaEngine
from specrt.engine.protocol import Engine
from specrt.geometry import Geometry
from specrt_export.compile.ort_cpu_compiler import compile_ort_cpu
from specrt_export.compile.ort_cuda_compiler import compile_ort_cuda
from specrt_export.portable.graph import geometry_of, read_graph
from specrt_export.precision import Precision
from specrt_export.quantize.quantizer import quantize
from support.gpu_double import site as site
from support.kernels import without_kernels

BATCH, MAX_LENGTH, MAX_WIDTH, CAPTURES = 3, 96, 24, 9
Opener = Callable[..., Any]


def alone(engine: Engine, text: Sequence[int]) -> NDArray[np.float32]:
    """Return the scores [S, V] of a text that an engine of one row reads from its beginning."""
    parts = []
    for at in range(0, len(text), engine.max_width):
        parts.append(engine.forward([text[at : at + engine.max_width]], at).logits[0].copy())
    return np.concatenate(parts)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, engines: Path) -> Callable[[str], Path]:
    """Compile codelet's draft: `fp32 1`, `int8 3` and the like for the CPU, `cuda` for a GPU.

    With `contrib` after it for a CPU without our kernels.
    """
    root, pair = shared_folder(tmp_path_factory) / "draft", engines / "codelet"
    root.mkdir(exist_ok=True)
    graph, weights = pair / "portable" / "draft.onnx", pair / "checkpoint" / "draft"

    def once(name: str) -> Path:
        out, done = root / name, root / f"{name}.done"
        with locked(root / f"{name}.lock"):
            if done.exists():
                return out / "engine.onnx"
            precision, batch, *kernels = f"{name} 1".split()
            source = graph, weights
            if precision in ("int8", "int4"):
                small = quantize(*source, out / "small", Precision.of(precision, block=128))
                source = small.graph, small.folder
            if precision == "cuda":
                compile_ort_cuda(*source, out, MAX_LENGTH, captured=CAPTURES)
            else:
                with without_kernels() if "contrib" in kernels else nullcontext():
                    compile_ort_cpu(*source, out, MAX_LENGTH, batch=int(batch), confidence=True)
            done.touch()
        return out / "engine.onnx"

    return once


@pytest.fixture(scope="session")
def geometry(engines: Path) -> Geometry:
    """The shape of codelet's draft."""
    return geometry_of(read_graph(engines / "codelet" / "portable" / "draft.onnx"))


@pytest.fixture
def opener(compiled: Callable[[str], Path], geometry: Geometry) -> Iterator[Opener]:
    """Opens an engine of one precision and number of rows, or `cuda` on the CPU provider."""
    made: list[Engine] = []

    def opened(name: str = f"fp32 {BATCH}", **options: Any) -> Engine:
        batch = 1 if name == "cuda" else int(name.split()[1])
        sizes = {"batch": batch, "max_length": MAX_LENGTH, "max_width": MAX_WIDTH}
        sizes |= {key: options.pop(key) for key in sizes.keys() & options.keys()}
        spec = EngineSpec("ort-cpu", compiled(name), geometry, **sizes)
        options = {"device": "cpu", **options}
        engine = OrtCudaEngine(spec, **options) if name == "cuda" else open_engine(spec)
        made.append(engine)
        return engine

    yield opened
    for engine in made:
        engine.close()
