"""The backends: which library runs an engine, and how it is opened. Libraries load lazily."""

from __future__ import annotations

from pathlib import Path

from specrt.bundle import Geometry
from specrt.engine.protocol import Engine
from specrt.errors import EngineError

ONNXRUNTIME, TENSORRT = ("ort-cpu", "ort-cuda"), ("tensorrt", "tensorrt-rtx")
"""The backends, by the library that runs their engines."""


def open_engine(
    backend: str, path: Path, geometry: Geometry, *, batch: int, max_length: int, max_width: int,
    threads: int, spare: bool = False, even: bool = False, widens: bool = False,
    beside: Engine | None = None,
) -> Engine:  # fmt: skip
    """Open a compiled engine with the library of its backend.

    `spare` keeps the last position free for the partner of a lone token, `even` makes passes of an
    odd width one token wider, `widens` turns weights stored in half precision into fp32 now instead
    of in every pass; see `OrtEngine`. `beside` is the other engine of a pair, whose device may be
    shared.
    Raises: EngineError when the library is missing or refuses the engine.
    """
    if backend == "ort-cpu":
        from specrt.engine.ort import OrtEngine
        from specrt.engine.ort_packed import OrtPackedEngine

        opened = OrtEngine if batch == 1 else OrtPackedEngine
        return opened(
            path,
            geometry,
            batch=batch,
            max_length=max_length,
            max_width=max_width,
            threads=threads,
            spare=spare,
            even=even,
            widens=widens,
        )
    if backend == "ort-cuda":
        from specrt.engine.ort_cuda import OrtCudaEngine

        return OrtCudaEngine(
            path, geometry, batch=batch, max_length=max_length, max_width=max_width
        )
    if backend in TENSORRT:
        from specrt.engine.tensorrt.engine import open_tensorrt

        return open_tensorrt(
            path, geometry, backend=backend, batch=batch, max_length=max_length,
            max_width=max_width, beside=beside,
        )  # fmt: skip
    raise EngineError(
        f"backend {backend!r} is unknown to this version of specrt; known: "
        f"{', '.join((*ONNXRUNTIME, *TENSORRT))}"
    )


def share_threads(backend: str, threads: int) -> None:
    """Let all engines of this process share their threads, where the backend can."""
    if backend == "ort-cpu" and threads > 1:
        from specrt.engine.ort import share_pool

        share_pool(threads)
