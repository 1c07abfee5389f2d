"""What the rest of specrt knows about a compiled model: one verb over fixed KV buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.errors import EngineError

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


class Drafted(NamedTuple):
    """What a round drafted, and what the draft thought of each token."""

    tokens: list[int]
    """-1 where the draft had no number to choose by, and nothing good after."""
    confidences: list[float]


class FusedRounds(Protocol):
    """Engines of a pair that draft and verify without the host in between."""

    def fits(self, gamma: int, pending: int, draft_start: int, target_start: int) -> bool:
        """Tell whether a round can be run; if not, its passes can be, one by one."""

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Draft `gamma` tokens and let the target score them.

        `pending` are the tokens that the draft's cache lacks, the last committed one included;
        `last` is that one. The target's next pass over `last` and what was drafted has then run.
        Raises: EngineError where the device fails.
        """


class OffsetRounds:
    """Whole rounds whose first position is a later one of the engines'."""

    def __init__(self, rounds: FusedRounds, offset: int) -> None:
        self._rounds = rounds
        self._offset = offset

    def fits(self, gamma: int, pending: int, draft_start: int, target_start: int) -> bool:
        """See `FusedRounds`."""
        by = self._offset
        return self._rounds.fits(gamma, pending, draft_start + by, target_start + by)

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """See `FusedRounds`."""
        by = self._offset
        return self._rounds.run(pending, draft_start + by, last, target_start + by, gamma)
