"""A compiled model: one verb over fixed KV buffers, and adapters for some rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.errors import EngineError
from specrt.geometry import Geometry

Tokens = NDArray[np.int64]

Logits = NDArray[np.float32]

Confidence = NDArray[np.float32]

Candidates = tuple[NDArray[np.float32], NDArray[np.int64]]

Source = NDArray[np.int64] | NDArray[np.float32]
"""What an encoder reads: token ids [E], or features [channels, frames]."""


class Output(Protocol):
    """The result of a forward pass; views that the next pass may overwrite."""

    @property
    def argmax(self) -> Tokens:
        """The most likely next token after each row, [B, R] int64.

        -1 where a logit is NaN or the best one infinite: no token may be chosen there. Engines of
        earlier versions give -1 for a NaN only.
        """

    @property
    def logits(self) -> Logits:
        """Unnormalised scores of the next token after each row, [B, R, V] f32."""

    @property
    def confidence(self) -> Confidence | None:
        """Probability of each row's likeliest token, [B, R] f32; None where not computed."""

    @property
    def candidates(self) -> Candidates | None:
        """The K best tokens of each row; None where not computed.

        Shapes: logits [B, R, K] f32, falling, and their ids [B, R, K] int64. Which of the tokens
            that tie with the last are there is not specified.
        """


MOST_OF_BLOCK = 64
"""Positions of a block, at most."""


class BlockShape(NamedTuple):
    """What an engine is fed that drafts a block in one pass, and what it drafts: its `block`."""

    block_size: int
    """Positions of a block: the last committed token, and mask tokens after it."""
    mask_token_id: int
    drafts: int
    """Tokens that a pass drafts, at most."""
    chained: bool = False
    """Whether the scores of a token depend on the one before it: all but the first are asked for by
    recursive feeds of that one."""


@dataclass(frozen=True)
class RowSnapshot:
    """What a row's layers remember that a longer text changes; the row can go back to it later."""

    least: int
    most: int
    """From which positions the row can go on, as far as its text is the same."""
    parts: Sequence[tuple[str, tuple[Any, ...], NDArray[Any]]]
    """Of each cache of the engine, where in a row what lies."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(array.nbytes for _, _, array in self.parts)


class Snapshots(Protocol):
    """Takes and restores snapshots of an engine's rows."""

    def take(self, row: int) -> RowSnapshot:
        """Copy what a row has."""

    def restore(self, row: int, snapshot: RowSnapshot) -> None:
        """Let a row, whose keys are of the same text, go on from a snapshot."""


@dataclass(frozen=True)
class EngineTraits:
    """What an engine has besides its passes."""

    scored: int | None = None
    """Entries of the vocabulary that logits are of; all of them when None."""
    padded: bool = False
    """Whether a pass over some rows costs what the widest of them costs for all."""
    features: NDArray[np.float32] | None = None
    """What a target leaves at each position for a head, [batch, max_length, H], where the host can
    read it."""
    block: BlockShape | None = None
    """What is drafted in one pass; None where the tokens that are fed are scored."""
    buffers: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """What the layers of a target remember, by name, where a head can read it in place."""
    remembers: bool = True
    """Whether it keeps what it is fed; a head that reads its target's keys keeps nothing."""
    rewind: Callable[[int], int] = lambda row: 0
    """Return the least position that a row can go on from, but for 0, from which every text can:
    layers that see the latest positions only have forgotten what they no longer see."""
    snapshots: Snapshots | None = None
    """What takes snapshots of rows; None where they would hold nothing that rows lose."""


class Engine(Protocol):
    """One compiled model over fixed KV buffers of `batch` rows and `max_length` positions.

    An engine is stateless about length: the caller says where the new keys go, so going back is
    feeding again from a smaller start. Stale keys beyond it are overwritten before they are read.
    """

    geometry: Geometry
    batch: int
    max_length: int
    max_width: int

    @property
    def max_rows(self) -> int:
        """Most positions that a pass scores."""

    @property
    def traits(self) -> EngineTraits:
        """What it has besides its passes."""

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """Write keys at `start .. start + S`, attend to all before and within, score the rows.

        Shapes: tokens [B, S] int; start [B] int; rows asks for the last so many of the S
            positions, all of them when None.
        Raises: EngineError when the pass is wider than built, would write past the buffers, or has
            another shape; nothing is written then.
        """

    def close(self) -> None:
        """Give the memory back; a second time is nothing, and every pass is refused from now on."""


class Feed(NamedTuple):
    """The tokens that one row of an engine is fed in a pass."""

    row: int
    tokens: Sequence[int]
    start: int
    rows: int
    """How many of the last positions are scored; 1 or more."""
    recursive: bool = False
    """Whether a head goes on from what its own last pass left, not from the target's features."""
    hidden: NDArray[np.float32] | None = None
    """What a head's graph reads next to each token, [S, H]; `HeadEngine` fills it in."""


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


@runtime_checkable
class ConditionedEngine(PackedEngine, Protocol):
    """The decoder of an encoder-decoder: each row's text is of a source, which is read once."""

    max_source: int
    """Most positions of hidden states that a source may come to."""

    def condition(self, row: int, source: Source) -> None:
        """Read a source for a row; its text begins anew.

        A draft that shares its target's encoder reads what that left for the row, so the target is
        conditioned first.
        Raises: EngineError for a source that is empty, too long or of another kind; the row keeps
            the source that it had.
        """


def packs(engine: Engine) -> bool:
    """Tell whether a pass over some rows costs what their tokens cost, and none is padded."""
    return isinstance(engine, PackedEngine) and not engine.traits.padded


CLOSED = "the engine was closed; open the bundle again"


def pass_size(engine: Engine, tokens: Tokens, rows: int | None) -> tuple[int, int]:
    """Return the width of a pass and how many of its rows are scored.

    Raises: EngineError for tokens that are not [batch, width], or fewer than the rows asked for.
    """
    if tokens.ndim != 2 or len(tokens) != engine.batch:
        raise EngineError(
            f"tokens of shape {list(tokens.shape)} were fed to an engine of {engine.batch} rows; "
            f"expected [{engine.batch}, width]"
        )
    width = tokens.shape[1]
    scored = rows or width
    if not 0 <= scored <= width:
        raise EngineError(
            f"{scored} positions were to be scored in a pass of {width} tokens; expected 1 to "
            f"{width}"
        )
    return width, scored


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


@dataclass(frozen=True)
class CudaGraphs:
    """How passes are launched on a GPU."""

    captured: int
    """Passes, or whole rounds, that are one captured graph each."""
    refusals: tuple[str, ...]
    """A sentence on each that was to be one and runs kernel by kernel, and why."""


@runtime_checkable
class Capturing(Protocol):
    """An engine, or fused rounds, whose passes may be captured as CUDA graphs."""

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """What was captured so far; None where nothing is to be."""


def cuda_graphs(*parts: object) -> CudaGraphs | None:
    """Add up what engines and fused rounds captured; None where none of them captures."""
    captures = [part.cuda_graphs for part in parts if isinstance(part, Capturing)]
    found = [graphs for graphs in captures if graphs is not None]
    if not found:
        return None
    refusals = dict.fromkeys(refusal for graphs in found for refusal in graphs.refusals)
    return CudaGraphs(sum(graphs.captured for graphs in found), tuple(refusals))


class Drafted(NamedTuple):
    """The tokens that a round drafted, and the draft's confidence in each."""

    tokens: list[int]
    """-1 where a score of the draft is not a number; tokens after it mean nothing."""
    confidences: list[float]


class FusedRounds(Protocol):
    """Engines of a pair that draft and verify without the host in between."""

    def fits(self, gamma: int, pending: int, draft_start: int, target_start: int) -> bool:
        """Return whether a round can be run whole; its passes can always be run one by one."""

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        """Draft `gamma` tokens and let the target score them.

        `pending` are the tokens that the draft's cache lacks, the last committed one included;
        `last` is that one. The target's next pass over `last` and what was drafted has then run.
        Raises: EngineError where the device fails.
        """


class OffsetRounds:
    """Fused rounds over engines that begin at a later position."""

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


@runtime_checkable
class RowsEngine(Protocol):
    """Runs some rows of a batch in one pass; see `PackedEngine.forward_rows`."""

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """Run one pass; the outputs are in the order of the feeds, each with batch 1."""


def rows_of(engine: Engine) -> RowsEngine:
    """Return an engine's passes of some of its rows: its own, or padded to one width."""
    if isinstance(engine, RowsEngine):
        return engine
    return SingleRow(engine) if engine.batch == 1 else PaddedRows(engine)


def first_row(engine: Engine) -> Engine:
    """Return the first row of an engine, as an engine of one row."""
    return engine if engine.batch == 1 else FirstRow(engine)


class FirstRow:
    """The first row of an engine of several; all rows are fed the same where it takes no others."""

    batch = 1

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.geometry = engine.geometry
        self.max_length, self.max_width = engine.max_length, engine.max_width
        self.max_rows, self.traits = engine.max_rows, engine.traits
        self.close = engine.close

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Output:
        """See `Engine`."""
        engine, fed, at = self._engine, np.asarray(tokens), int(np.asarray(start).item())
        scored = rows or fed.shape[1]
        if isinstance(engine, RowsEngine):
            return engine.forward_rows((Feed(0, fed[0].tolist(), at, scored),))[0]
        output = engine.forward(np.repeat(fed, engine.batch, 0), [at] * engine.batch, scored)
        return RowOutput(output, 0, 0, scored)


class SingleRow:
    """The one row of an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """See `RowsEngine`."""
        (feed,) = feeds
        return (self._engine.forward((feed.tokens,), feed.start, feed.rows),)


class PaddedRows:
    """An engine of [B, S] passes, whose rows are padded to the widest.

    A row with fewer tokens begins earlier: it is fed the end of its prefix again, and the same
    keys are written again. Where its prefix is too short for that, pad tokens follow, whose keys
    are overwritten before they are read. Idle rows are fed like rows with no tokens.

    Short prefixes next to a wide pass have more rows scored than needed. Where that is more than
    the `max_rows` of the engine, the widest row has a pass of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._max_rows = engine.max_rows
        self._prefixes: list[list[int]] = [[] for _ in range(engine.batch)]

    def forward_rows(self, feeds: Sequence[Feed]) -> Sequence[Output]:
        """See `RowsEngine`."""
        prefixes = list(self._prefixes)
        for feed in feeds:
            prefixes[feed.row] = [*prefixes[feed.row][: feed.start], *feed.tokens]
        width = max(len(feed.tokens) for feed in feeds)
        begins = [max(0, len(prefix) - width) for prefix in prefixes]
        batch = [
            [*prefix[begin:], *[0] * (width - len(prefix))]
            for prefix, begin in zip(prefixes, begins, strict=True)
        ]
        ends = [len(prefixes[feed.row]) - begins[feed.row] for feed in feeds]
        rows = max(width - end + feed.rows for feed, end in zip(feeds, ends, strict=True))
        if rows > self._max_rows and len(feeds) > 1:
            return self._split(feeds, width)
        output = self._engine.forward(batch, begins, rows)
        self._prefixes = prefixes  # not before: a pass that failed has written nothing
        return [
            RowOutput(output, feed.row, end - feed.rows - (width - rows), feed.rows)
            for feed, end in zip(feeds, ends, strict=True)
        ]

    def clear(self, row: int) -> None:
        """Forget the prefix of a row: its text begins anew."""
        self._prefixes[row] = []

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Note that a row now holds the first `length` tokens of another."""
        self._prefixes[to] = self._prefixes[source][:length]

    def _split(self, feeds: Sequence[Feed], width: int) -> Sequence[Output]:
        """Run the first of the widest alone, after the others, whose outputs are copied."""
        at = next(i for i, feed in enumerate(feeds) if len(feed.tokens) == width)
        others = [*feeds[:at], *feeds[at + 1 :]]
        outputs: list[Output] = [CopiedOutput(output) for output in self.forward_rows(others)]
        outputs[at:at] = self.forward_rows([feeds[at]])
        return outputs


class CopiedOutput:
    """A copy of an output, which later passes leave alone."""

    def __init__(self, output: Output) -> None:
        self.argmax, self.logits = output.argmax.copy(), output.logits.copy()
        confidence, candidates = output.confidence, output.candidates
        self.confidence = None if confidence is None else confidence.copy()
        self.candidates = candidates and (candidates[0].copy(), candidates[1].copy())


class RowOutput:
    """The output of one row of several."""

    def __init__(self, output: Output, row: int, first: int, rows: int) -> None:
        self._output = output
        self._at = (slice(row, row + 1), slice(first, first + rows))

    @property
    def argmax(self) -> Tokens:
        """See `Output`."""
        return self._output.argmax[self._at]

    @property
    def logits(self) -> Logits:
        """See `Output`."""
        return self._output.logits[self._at]

    @property
    def confidence(self) -> Confidence | None:
        """See `Output`."""
        confidence = self._output.confidence
        return None if confidence is None else confidence[self._at]

    @property
    def candidates(self) -> Candidates | None:
        """See `Output`."""
        candidates = self._output.candidates
        return candidates and (candidates[0][self._at], candidates[1][self._at])
