"""ONNX Runtime over the rows of a batch: their tokens packed into one pass, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.ort import (
    NUMPY_TYPES,
    MemoryBinding,
    OrtEngine,
    bind_input,
    memory_binding,
    open_session,
    run_bound,
)
from specrt.engine.protocol import (
    CLOSED,
    Candidates,
    Confidence,
    Engine,
    Feed,
    Logits,
    Tokens,
    check_bounds,
    pass_size,
)
from specrt.errors import EngineError
from specrt.held_file import HeldFile

MOST_PACKINGS, MOST_BINDINGS = 512, 8
"""Packings that are remembered, and sets of rows whose KV buffers stay bound."""

RowMemory = tuple[tuple[MemoryBinding, MemoryBinding], ...]
"""Of each KV buffer of a row what a pass reads and what it writes."""


class RowSlice(NamedTuple):
    """One row's share of a pass: how many tokens, and how many of the last are scored."""

    row: int
    width: int
    rows: int


@dataclass(frozen=True)
class Packing:
    """How the tokens of one pass are laid out; the same for every pass of the same parts.

    The arrays are inputs of the graph. Shapes: T tokens with padding; A places of attention; R
    rows scored.
    """

    parts: tuple[RowSlice, ...]
    begins: tuple[int, ...]
    """The first token of each part."""
    widths: Tokens
    """Places of attention of each row, [B]."""
    spread: Tokens
    """The token that each place of attention reads, [A]; row by row."""
    kept: Tokens
    """The place of attention that each token takes, [T]."""
    idle: tuple[bool, ...]
    """Whether each row has no part."""
    rows: Tokens
    """The tokens scored, [R]; part by part, then perhaps a pad."""


def pack(batch: int, parts: tuple[RowSlice, ...], places: int, pad_to_even: bool) -> Packing:
    """Lay the tokens of some rows side by side, in the order of the parts; pads come last.

    Every row has at least `places` places of attention, and a pass as many tokens; `pad_to_even`
    makes the number of tokens even, and that of the rows scored. Places beyond a row's tokens read
    its last token again, those of an idle row token 0.
    """
    begins = (0, *accumulate(part.width for part in parts))
    tokens = max(begins[-1], places)
    tokens += pad_to_even and tokens % 2
    read: list[list[int]] = [[0] * places for _ in range(batch)]
    for part, begin in zip(parts, begins, strict=False):
        own = [*range(begin, begin + part.width)]
        read[part.row] = own + own[-1:] * (places - part.width)
    kept = np.zeros(tokens, np.int64)
    first = (0, *accumulate(map(len, read)))
    for part, begin in zip(parts, begins, strict=False):
        kept[begin : begin + part.width] = first[part.row] + np.arange(part.width)
    ends = [begin + part.width for part, begin in zip(parts, begins, strict=False)]
    rows = [t for part, end in zip(parts, ends, strict=True) for t in range(end - part.rows, end)]
    return Packing(
        parts,
        begins[:-1],
        widths=np.array([len(own) for own in read], np.int64),
        spread=np.array([t for own in read for t in own], np.int64),
        kept=kept,
        idle=tuple(row not in {part.row for part in parts} for row in range(batch)),
        rows=np.array(rows + [0] * (pad_to_even and len(rows) % 2), np.int64),
    )


def check_parts(engine: Engine, parts: tuple[RowSlice, ...]) -> None:
    """Refuse parts that no pass can have.

    Raises: EngineError.
    """
    rows = [part.row for part in parts]
    if not rows or len(set(rows)) < len(rows) or not set(rows) <= {*range(engine.batch)}:
        raise EngineError(
            f"a pass was asked of rows {rows}; expected some of 0 to {engine.batch - 1}, each once"
        )
    for part in parts:
        check_bounds(engine, part.width, 0, 0)
        if not 1 <= part.rows <= part.width:
            raise EngineError(
                f"{part.rows} positions of row {part.row} were to be scored in a pass of "
                f"{part.width} tokens; expected 1 to {part.width}"
            )


@dataclass(frozen=True)
class _Scores:
    """The scores of one part of a pass, as views of shared memory."""

    argmax: Tokens
    logits: Logits
    confidence: Confidence | None

    @property
    def candidates(self) -> Candidates | None:
        """None: these graphs compute none."""
        return None


@dataclass(frozen=True)
class _Pass:
    """A packing, where its parts' scores will be, and what to bind for it."""

    packing: Packing
    outputs: tuple[_Scores, ...]
    read: tuple[MemoryBinding, ...]
    written: tuple[MemoryBinding, ...]


@dataclass
class _Bound:
    """A binding with the KV buffers of some rows, and the pass that was bound last."""

    binding: Any
    latest: _Pass | None = None


class OrtPackedEngine:
    """A saved ONNX Runtime graph over the KV buffers of several rows.

    A pass costs what its tokens cost, of whichever rows; only attention runs row by row. A row
    that is not fed attends in scratch memory, so that its KV buffers stay as they are.

    The options are those of `OrtEngine`. `pad_single_token` pads the attention of a row with one
    token, and a pass of one token; `pad_to_even` pads the tokens of a pass, and the rows scored.

    Shapes: the KV buffers of a row are [1, kv_heads, max_length, head_dim], one row after another.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(
        self, path: Path, geometry: Geometry, *, batch: int, max_length: int, max_width: int,
        threads: int, pad_single_token: bool = False, pad_to_even: bool = False,
        upcast_weights: bool = False, files: Mapping[str, HeldFile] | None = None,
    ) -> None:  # fmt: skip
        self.pad_single_token = pad_single_token
        self.pad_to_even = pad_to_even
        self.geometry = geometry
        self.batch = batch
        self.max_length = max_length - pad_single_token
        self.max_width = max_width
        self._session, self._weights = open_session(path, files, threads, upcast_weights)
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._caches = self._allocate(max_length)
        self._scratch_kv = np.zeros_like(next(iter(self._caches.values()))[:1])
        self._is_confident = any(o.name == "confidence" for o in self._session.get_outputs())
        self._start = np.zeros(batch, np.int64)
        self._tokens = np.zeros(batch * max_width + 2, np.int64)
        self._positions = np.zeros_like(self._tokens)
        self._scores: dict[str, NDArray[Any]] = {}
        self._passes: dict[tuple[bool, tuple[RowSlice, ...]], _Pass] = {}
        self._bindings: dict[tuple[bool, ...], _Bound] = {}
        self._rows: dict[tuple[int, bool], RowMemory] = {}
        self._rebound = 0
        """Rows bound again since a binding was made."""
        self._latest: _Pass | None = None

    def _allocate(self, positions: int) -> dict[str, NDArray[Any]]:
        """Allocate the KV buffers; the pages of a zeroed array cost memory only once written."""
        g = self.geometry
        shape = (1, g.kv_heads, positions, g.head_dim)
        caches = {}
        for name in [f"{kind}.{i}" for i in range(g.layers) for kind in ("key", "value")]:
            rows = [f"{name}.{row}" for row in range(self.batch)]
            shapes = [tuple(self._inputs[row].shape) for row in rows if row in self._inputs]
            if shapes != [shape] * self.batch or f"{name}.{self.batch}" in self._inputs:
                raise EngineError(
                    f"the engine does not have the buffers {name!r} of {self.batch} rows, "
                    f"{list(shape)} each, that its manifest describes: it was built by an earlier "
                    "version, or belongs to another bundle. Build the bundle again"
                )
            kind: Any = NUMPY_TYPES[self._inputs[rows[0]].type]
            caches[name] = np.zeros((self.batch, *shape[1:]), kind)
        return caches

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> _Scores:
        """Run one pass of every row; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        _, scored = pass_size(self, batch, rows)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,)).tolist()
        fed = enumerate(zip(batch, starts, strict=True))
        self.forward_rows([Feed(row, own, at, scored) for row, (own, at) in fed])
        return self._scored(0, self.batch, scored)

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[_Scores, ...]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        parts = tuple([RowSlice(f.row, len(f.tokens), f.rows) for f in feeds])
        prepared = self._passes.get((self.pad_to_even, parts)) or self._prepare(parts)
        for feed in feeds:
            check_bounds(self, len(feed.tokens), feed.start, feed.start)
        binding = self._bind(prepared)
        self._start[:] = 0
        for feed, begin in zip(feeds, prepared.packing.begins, strict=True):
            width = len(feed.tokens)
            self._start[feed.row] = feed.start
            self._tokens[begin : begin + width] = feed.tokens
            self._positions[begin : begin + width] = range(feed.start, feed.start + width)
        run_bound(self._session, binding, len(prepared.packing.kept))
        return prepared.outputs

    def _prepare(self, parts: tuple[RowSlice, ...]) -> _Pass:
        """Lay out a pass, once for all that have the same parts."""
        if self._session is None:
            raise EngineError(CLOSED)
        check_parts(self, parts)
        packing = pack(
            self.batch, parts, places=1 + self.pad_single_token, pad_to_even=self.pad_to_even
        )
        self._reserve_scores(len(packing.rows))
        if len(self._passes) >= MOST_PACKINGS:
            self._passes.clear()
        outputs, first = [], 0
        for part in parts:
            outputs.append(self._scored(first, 1, part.rows))
            first += part.rows
        prepared = _Pass(packing, tuple(outputs), *self._memory_of(packing))
        self._passes[self.pad_to_even, parts] = prepared
        return prepared

    def _memory_of(self, packing: Packing) -> Iterator[tuple[MemoryBinding, ...]]:
        """Yield the inputs and the outputs of a pass besides KV buffers; prefixes of memory."""
        count, rows = len(packing.kept), len(packing.rows)
        read = {name: getattr(packing, name) for name in ("widths", "spread", "kept", "rows")}
        read["input_ids"] = self._tokens[None, :count]
        if "positions" in self._inputs:
            read["positions"] = self._positions[None, :count]
        written = {name: memory[None, :rows] for name, memory in self._scores.items()}
        for arrays in (read, written):
            yield tuple(starmap(memory_binding, arrays.items()))

    def _reserve_scores(self, rows: int) -> None:
        """Allocate scores of so many rows; at least twice as many as before."""
        before = len(self._scores["argmax"]) if self._scores else 0
        if rows <= before:
            return
        most = max(rows, 2 * before)
        scores: dict[str, NDArray[Any]] = {
            "argmax": np.zeros(most, np.int64),
            "logits": np.zeros((most, self.geometry.vocab_size), np.float32),
        }
        if self._is_confident:
            scores["confidence"] = np.zeros(most, np.float32)
        self._scores = scores
        self._passes.clear()

    def _scored(self, first: int, batch: int, rows: int) -> _Scores:
        """Return the scores of some parts with the same number of rows each."""
        views = {
            name: memory[first : first + batch * rows].reshape(batch, rows, *memory.shape[1:])
            for name, memory in self._scores.items()
        }
        return _Scores(views["argmax"], views["logits"], views.get("confidence"))

    def _bind(self, prepared: _Pass) -> Any:
        """Bind what has another size than in the pass before; return the binding."""
        idle = prepared.packing.idle
        bound = self._bindings.get(idle) or self._bind_caches(idle)
        if bound.latest is not prepared:
            bound.latest = None  # an interruption leaves it half bound
            for one in prepared.read:
                bound.binding.bind_input(*one)
            for one in prepared.written:
                bound.binding.bind_output(*one)
            bound.latest = prepared
        if self._latest is not prepared:
            # Pads were perhaps tokens of a wider pass; their positions may lie beyond tables.
            count = len(prepared.packing.kept)
            self._tokens[:count] = self._positions[:count] = 0
            self._latest = prepared
        return bound.binding

    def _bind_caches(self, idle: tuple[bool, ...]) -> _Bound:
        """Bind the KV buffers of the rows that are fed, and scratch memory for the others.

        In the binding with the fewest rows to change these alone are bound. Another binding is made
        once changes have cost as much as that.
        """
        changes = {
            other: [row for row in range(self.batch) if other[row] != idle[row]]
            for other in self._bindings
        }
        nearest = min(changes, key=lambda other: len(changes[other]), default=None)
        self._rebound += 0 if nearest is None else len(changes[nearest])
        grows = self._rebound > self.batch and len(self._bindings) < MOST_BINDINGS
        rows: Sequence[int] = range(self.batch)
        if nearest is None or grows:
            bound, self._rebound = _Bound(self._session.io_binding()), 0
            bind_input(bound.binding, "start", self._start)
        else:
            bound, rows = self._bindings.pop(nearest), changes[nearest]
        for row in rows:
            for read, written in self._memory_of_row(row, idle[row]):
                bound.binding.bind_input(*read)
                bound.binding.bind_output(*written)
        self._bindings[idle] = bound
        return bound

    def _memory_of_row(self, row: int, idle: bool) -> RowMemory:
        """Return what each KV buffer of a row reads and writes; describing it takes long."""
        known = self._rows.get((row, idle))
        if known is None:
            memories = [
                (f"{name}.{row}", self._scratch_kv if idle else cache[row : row + 1])
                for name, cache in self._caches.items()
            ]
            known = self._rows[row, idle] = tuple(
                (memory_binding(name, memory), memory_binding(f"present_{name}", memory))
                for name, memory in memories
            )
        return known

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row to another; see `PackedEngine.copy_row`."""
        if not {source, to} <= {*range(self.batch)} or not 0 <= length <= self.max_length:
            raise EngineError(
                f"{length} positions of row {source} were to be copied to row {to}; expected rows "
                f"from 0 to {self.batch - 1}, and up to {self.max_length} positions"
            )
        if source != to:
            for cache in self._caches.values():
                cache[to, :, :length] = cache[source, :, :length]

    def close(self) -> None:
        """Drop the session, the bindings and the KV buffers."""
        self._passes.clear()
        self._bindings.clear()
        self._rows.clear()
        self._caches.clear()
        self._latest = self._session = None
        self._weights = ()


PREFIX = 8
"""Positions before the first row that is compared."""

COMPARED_ROWS = 3

STEP = 7919
"""Between one token id and the next: a prime, so that all kinds of tokens come up."""


def settle_padding(target: Engine) -> bool:
    """Measure whether a target needs `pad_to_even`, and leave it set so; return whether it does.

    Kernels differ by processor, block and precision: with int8 blocks of 32 an AVX-512 VNNI kernel
    rounds a single row like any other, with blocks of 128 it does not. Kernels treat all rows
    alike, so that a few dozen of them tell.
    """
    if not isinstance(target, OrtEngine | OrtPackedEngine) or not target.pad_single_token:
        return False
    widest = min(4, target.max_width, target.max_length - PREFIX - COMPARED_ROWS)
    target.pad_to_even = True
    if widest >= 2:
        target.pad_to_even = not _has_equal_rows(target, widest)
    return target.pad_to_even


def _has_equal_rows(target: OrtEngine | OrtPackedEngine, widest: int) -> bool:
    """Compare the last row of unpadded passes of every width with that of a pass of two tokens."""
    length = PREFIX + COMPARED_ROWS
    ids = np.arange(length, dtype=np.int64) * STEP % target.geometry.vocab_size
    for begin in range(0, length, 2):
        _logits(target, ids[begin : begin + 2].tolist(), begin)
    # From the last end to the first: a pad token overwrites what lies behind the end.
    for end in range(length, PREFIX, -1):
        target.pad_to_even = True
        pair = _logits(target, ids[end - 2 : end].tolist(), end - 2)[-1].copy()
        target.pad_to_even = False
        for width in range(1, widest + 1):
            row = _logits(target, ids[end - width : end].tolist(), end - width)[-1]
            if not np.array_equal(row, pair):
                return False
    return True


def _logits(target: OrtEngine | OrtPackedEngine, tokens: list[int], start: int) -> Logits:
    """Feed tokens to the first row; return the logits [S, V] after each."""
    if isinstance(target, OrtPackedEngine):
        logits = target.forward_rows([Feed(0, tokens, start, len(tokens))])[0].logits
    else:
        logits = target.forward([tokens], start).logits
    row: Logits = logits[0]
    return row
