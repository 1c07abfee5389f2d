"""A head on TensorRT: it reads its target's features, and its own states, where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.head_engine import feed_of, paired
from specrt.engine.protocol import (
    CudaGraphs,
    Feed,
    Output,
    check_bounds,
    rows_of,
)
from specrt.engine.tensorrt.engine import TensorRtEngine, open_tensorrt
from specrt.engine.tensorrt.engine_record import HIDDEN, STATE, PassShape
from specrt.engine.tensorrt.feature_buffer import FeatureBuffer
from specrt.engine.tensorrt.passes import PlanPass
from specrt.errors import EngineError


class HeadStates:
    """What the passes of a head read next to their tokens, and what the next ones may go on from.

    Both lie on the device: the features of the target, and of each row the state at the last
    position that it was fed.
    """

    def __init__(self, engine: TensorRtEngine, features: FeatureBuffer) -> None:
        memory = engine.model.memory
        self._features, self._device = features, memory.device
        self._address = memory.take(engine.batch * features.bytes, "states of a head")
        self.last: dict[int, int] = {}
        """Of the rows that are fed, the position of the last token."""

    def before(self, bound: PlanPass, starts: Sequence[int], width: int) -> None:
        """Copy the features at the positions of a pass to where it reads them."""
        self._features.read(bound.states[HIDDEN], starts, width)

    def after(self, bound: PlanPass, starts: Sequence[int], shape: PassShape) -> None:
        """Keep the states that a recursive feed may go on from."""
        size = self._features.bytes
        for row, position in self.last.items():
            place = position - (starts[row] + shape.width - shape.rows)
            if 0 <= place < shape.rows:
                source = bound.states[STATE] + (row * shape.rows + place) * size
                self._device.copy(self._address + row * size, source, size)

    def go_on(self, row: int, position: int) -> None:
        """Let the pass at a position read the state of the row in place of the target's feature."""
        self._features.write(row, position, self._address + row * self._features.bytes)


class TensorRtHead:
    """A head next to its target on one device; see `HeadEngine` for what it is fed.

    Rows are padded to one width as those of other plans are, and so may be fed the end of their
    prefix again: what they read then is still in the target's buffer. It is closed with the target.
    Threads: as for `TensorRtEngine`.
    """

    def __init__(self, engine: TensorRtEngine, target: TensorRtEngine) -> None:
        features = target.handover
        width = engine.model.record.hidden
        if not isinstance(features, FeatureBuffer) or features.width != width:
            raise _refused(width, features.width if isinstance(features, FeatureBuffer) else 0)
        self.geometry = engine.geometry
        self.batch = engine.batch
        self.max_length = engine.max_length
        self.max_width = engine.max_width
        self.max_rows = engine.max_rows
        self.traits = engine.traits
        self.captures = engine.captures
        self.close = engine.close
        self.engine = engine
        self._target = target
        self._rows = rows_of(engine)
        self._states = engine.handover = HeadStates(engine, features)
        target.attach(engine)

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """See `TensorRtEngine`."""
        return self.engine.cuda_graphs

    @property
    def memory_bytes(self) -> dict[str, int]:
        """See `TensorRtEngine`."""
        return self.engine.memory_bytes

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Run one pass of one row; see `Engine.forward`."""
        return self.forward_rows((feed_of(self, tokens, start, rows),))[0]

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        fed = [paired(feed) for feed in feeds]
        for feed in fed:
            check_bounds(self, len(feed.tokens), feed.start, feed.start)
        self.engine.require_sound()
        self._target.require_sound()
        self._states.last = {feed.row: feed.start + len(feed.tokens) - 1 for feed in fed}
        try:
            for feed in fed:
                if feed.recursive:
                    self._states.go_on(feed.row, feed.start)
        except EngineError as error:
            self.engine.end(error)
            raise
        return self._rows.forward_rows(fed)


def open_head(spec: EngineSpec) -> TensorRtHead:
    """Open a head over the features of its target.

    Raises: EngineError for a head whose target leaves nothing for it here; it is closed then.
    """
    engine = open_tensorrt(spec)
    try:
        if not isinstance(spec.target, TensorRtEngine):
            raise _refused(engine.model.record.hidden, 0)
        return TensorRtHead(engine, spec.target)
    except BaseException:
        engine.close()
        raise


def _refused(width: int, left: int) -> EngineError:
    there = f"features of width {left}" if left else "no features"
    return EngineError(
        f"the draft is a head that reads features of width {width}, and its target leaves {there} "
        "here; build both in one bundle, for one backend"
    )
