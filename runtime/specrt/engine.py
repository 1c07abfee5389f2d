"""What the rest of specrt knows about a compiled model: one verb over fixed KV buffers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.errors import EngineError
from specrt.geometry import Geometry

ONNXRUNTIME, TENSORRT = ("ort-cpu", "ort-cuda"), ("tensorrt", "tensorrt-rtx")
"""The backends, by the library that runs their engines."""

Tokens = NDArray[np.int64]
Logits = NDArray[np.float32]
Confidence = NDArray[np.float32]
Candidates = tuple[NDArray[np.float32], NDArray[np.int64]]


class Output(Protocol):
    """What a forward pass left behind; views that the next pass of the same width overwrites."""

    @property
    def argmax(self) -> Tokens:
        """The most likely next token after each row, [B, R] int64.

        -1 where a logit is NaN or the best one infinite: no token may be chosen there. Engines
        lowered before infinities were told say -1 for a NaN only, and name a token for the rest.
        """

    @property
    def logits(self) -> Logits:
        """Unnormalised scores of the next token after each row, [B, R, V] f32."""

    @property
    def confidence(self) -> Confidence | None:
        """Probability of each row's likeliest token, [B, R] f32; None where not computed."""

    @property
    def candidates(self) -> Candidates | None:
        """The K best tokens of each row; None where not computed. Read by `candidates_of`.

        Shapes: logits [B, R, K] f32, falling, and their ids [B, R, K] int64. Which of the tokens
            that tie with the last are there is not specified.
        """


def candidates_of(output: Output) -> Candidates | None:
    """Return the candidates of an output, None from an engine that knows nothing of them."""
    found: Candidates | None = getattr(output, "candidates", None)
    return found


class Engine(Protocol):
    """One compiled model over fixed KV buffers of `batch` rows and `max_length` positions.

    An engine is stateless about length: the caller says where the new keys go, so going back is
    feeding again from a smaller start. Stale keys beyond it are overwritten before they are read.
    """

    geometry: Geometry
    batch: int
    max_length: int
    max_width: int

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Write keys at `start .. start + S`, attend to all before and within, score the rows.

        Shapes: tokens [B, S] int; start [B] int; rows asks for the last so many of the S
            positions, all of them when None.
        Raises: EngineError when the pass is wider than built, or would write past the buffers.
        """

    def close(self) -> None:
        """Give the memory back; the engine must not be used again."""


class Feed(NamedTuple):
    """What one row of an engine takes part in a pass with."""

    row: int
    tokens: Sequence[int]
    start: int
    rows: int
    """How many of the last positions are scored; 1 or more."""


@runtime_checkable
class PackedEngine(Engine, Protocol):
    """An engine that runs rows of different widths in one pass, without padding."""

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass over some of the rows, each at most once; keep what the others hold.

        Shapes: the outputs are in the order of the feeds, each with batch 1; views that the next
            pass overwrites.
        Raises: EngineError as `forward` does.
        """

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row's KV buffers to another row's."""


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
        from specrt.engines.ort import OrtEngine
        from specrt.engines.ort_packed import OrtPackedEngine

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
        from specrt.engines.ort_cuda import OrtCudaEngine

        return OrtCudaEngine(
            path, geometry, batch=batch, max_length=max_length, max_width=max_width
        )
    if backend in TENSORRT:
        from specrt.engines.tensorrt.opening import open_tensorrt

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
        from specrt.engines.ort import share_pool

        share_pool(threads)


def check_bounds(engine: Engine, width: int, first: int, last: int) -> None:
    """Refuse a pass that is too wide or would write outside the KV buffers.

    Raises: EngineError with the positions asked for and those there are.
    """
    if not 0 < width <= engine.max_width:
        raise EngineError(
            f"a pass of {width} tokens was asked of an engine built for widths 1 to "
            f"{engine.max_width}; rebuild with a larger prefill or gamma"
        )
    if first < 0 or last + width > engine.max_length:
        raise EngineError(
            f"a pass would write positions {first} to {last + width - 1} of a KV buffer that has "
            f"0 to {engine.max_length - 1}"
        )
