"""ONNX Runtime over several rows: their tokens side by side in one pass, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.ort import (
    NUMPY_TYPES,
    OrtEngine,
    Place,
    bind_input,
    bind_output,
    open_session,
    place,
    run_bound,
)
from specrt.engine.protocol import (
    Candidates,
    Confidence,
    Engine,
    Feed,
    Logits,
    Tokens,
    check_bounds,
)
from specrt.engine.rows import Packing, RowSlice, check_parts, pack
from specrt.errors import EngineError

_KNOWN, _SETS = 512, 16
"""Packings that are remembered, and sets of rows whose KV buffers stay bound."""


@dataclass(frozen=True)
class _Scores:
    """What a pass says about the rows of one part, as views of shared memory."""

    argmax: Tokens
    logits: Logits
    confidence: Confidence | None

    @property
    def candidates(self) -> Candidates | None:
        """None: these graphs do not look for them."""
        return None


@dataclass(frozen=True)
class _Pass:
    """A packing, where its parts' scores will be, and what to bind for it."""

    packing: Packing
    outputs: tuple[_Scores, ...]
    read: tuple[Place, ...]
    written: tuple[Place, ...]


@dataclass
class _Bound:
    """A binding with the KV buffers of some rows, and the pass that was bound last."""

    binding: Any
    latest: _Pass | None = None


class OrtPackedEngine:
    """A saved ONNX Runtime graph over the KV buffers of several rows.

    A pass costs what its tokens cost, whosever they are; only attention runs row by row. A row
    that is not fed does its attention in memory of nobody, and keeps its keys.

    With `spare`, a lone token of a row has attention for one more, whose key is overwritten before
    it is read, and a lone token of a pass one of nobody beside it; the last position is kept free
    for that: `max_length` is one less than was asked for. With `even`, tokens and rows scored are
    filled up to an even number. Why, and what `widens` does, is said of `OrtEngine`. `even` may be
    changed between passes.

    Shapes: the KV buffers of a row are [1, kv_heads, max_length, head_dim], one row after another.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(
        self, path: Path, geometry: Geometry, *, batch: int, max_length: int, max_width: int,
        threads: int, spare: bool = False, even: bool = False, widens: bool = False,
    ) -> None:  # fmt: skip
        self.spare = spare
        self.even = even
        self.geometry = geometry
        self.batch = batch
        self.max_length = max_length - spare
        self.max_width = max_width
        self._session = open_session(path, threads, widens)
        self._inputs = {i.name: i for i in self._session.get_inputs()}
        self._caches = self._allocate(max_length)
        self._nobodys = np.zeros_like(next(iter(self._caches.values()))[:1])
        self._is_confident = any(o.name == "confidence" for o in self._session.get_outputs())
        self._start = np.zeros(batch, np.int64)
        self._tokens = np.zeros(batch * max_width + 2, np.int64)
        self._positions = np.zeros_like(self._tokens)
        self._scores: dict[str, NDArray[Any]] = {}
        self._passes: dict[tuple[bool, tuple[RowSlice, ...]], _Pass] = {}
        self._bindings: dict[tuple[bool, ...], _Bound] = {}
        self._latest: _Pass | None = None

    def _allocate(self, positions: int) -> dict[str, NDArray[Any]]:
        """Allocate the KV buffers; the pages of a zeroed array cost memory only once written."""
        g = self.geometry
        shape = (1, g.kv_heads, positions, g.head_dim)
        caches = {}
        for name in [f"{kind}.{i}" for i in range(g.layers) for kind in ("key", "value")]:
            rows = [f"{name}.{row}" for row in range(self.batch)]
            found = [tuple(self._inputs[row].shape) for row in rows if row in self._inputs]
            if found != [shape] * self.batch or f"{name}.{self.batch}" in self._inputs:
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
        if batch.ndim != 2 or len(batch) != self.batch:
            raise EngineError(
                f"tokens of shape {list(batch.shape)} were fed to an engine of {self.batch} rows; "
                f"expected [{self.batch}, width], or feed some rows with `forward_rows`"
            )
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,)).tolist()
        scored = rows or batch.shape[1]
        fed = enumerate(zip(batch, starts, strict=True))
        self.forward_rows([Feed(row, own, at, scored) for row, (own, at) in fed])
        return self._scored(0, self.batch, scored)

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[_Scores, ...]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        parts = tuple([RowSlice(f.row, len(f.tokens), f.rows) for f in feeds])
        prepared = self._passes.get((self.even, parts)) or self._prepare(parts)
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
        """Work a pass out that is new, once for all that have the same parts."""
        check_parts(self, parts)
        packing = pack(self.batch, parts, places=1 + self.spare, even=self.even)
        self._make_room(len(packing.rows))
        if len(self._passes) >= _KNOWN:
            self._passes.clear()
        outputs, first = [], 0
        for part in parts:
            outputs.append(self._scored(first, 1, part.rows))
            first += part.rows
        prepared = _Pass(packing, tuple(outputs), *self._places(packing))
        self._passes[self.even, parts] = prepared
        return prepared

    def _places(self, packing: Packing) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
        """Return what a pass reads and writes besides KV buffers; a prefix of shared memory."""
        count, rows = len(packing.kept), len(packing.rows)
        read = {name: getattr(packing, name) for name in ("widths", "spread", "kept", "rows")}
        read["input_ids"] = self._tokens[None, :count]
        if "positions" in self._inputs:
            read["positions"] = self._positions[None, :count]
        written = {name: memory[None, :rows] for name, memory in self._scores.items()}
        both = (tuple(starmap(place, arrays.items())) for arrays in (read, written))
        return next(both), next(both)

    def _make_room(self, rows: int) -> None:
        """Let so many rows be scored; twice as many as before, so that it happens seldom."""
        before = len(self._scores["argmax"]) if self._scores else 0
        if rows <= before:
            return
        most = max(rows, 2 * before)
        made: dict[str, NDArray[Any]] = {
            "argmax": np.zeros(most, np.int64),
            "logits": np.zeros((most, self.geometry.vocab_size), np.float32),
        }
        if self._is_confident:
            made["confidence"] = np.zeros(most, np.float32)
        self._scores = made
        self._passes.clear()

    def _scored(self, first: int, batch: int, rows: int) -> _Scores:
        """Return the scores of some parts with the same number of rows each."""
        found = {
            name: memory[first : first + batch * rows].reshape(batch, rows, *memory.shape[1:])
            for name, memory in self._scores.items()
        }
        return _Scores(found["argmax"], found["logits"], found.get("confidence"))

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
            # What fills up was perhaps a token of a wider pass; its position may be beyond tables.
            count = len(prepared.packing.kept)
            self._tokens[:count] = self._positions[:count] = 0
            self._latest = prepared
        return bound.binding

    def _bind_caches(self, idle: tuple[bool, ...]) -> _Bound:
        """Bind the KV buffers of the rows that are fed, and the memory of nobody for the others."""
        if len(self._bindings) >= _SETS:
            self._bindings.clear()
        binding = self._session.io_binding()
        bind_input(binding, "start", self._start)
        for name, cache in self._caches.items():
            for row, rests in enumerate(idle):
                memory = self._nobodys if rests else cache[row : row + 1]
                bind_input(binding, f"{name}.{row}", memory)
                bind_output(binding, f"present_{name}.{row}", memory)
        bound = self._bindings[idle] = _Bound(binding)
        return bound

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
        self._caches.clear()
        self._latest = self._session = None


FILLED = 8
"""Positions before the first row that is compared."""

LAPS = 3
"""Rows compared."""

STEP = 7919
"""Between one token id and the next: a prime, so that all kinds of tokens come up."""


def settle_partners(target: Engine) -> bool:
    """Let a target run passes of odd widths as they are where that is exact; return whether not.

    A lone token has its partner either way.

    Kernels differ by processor, block and precision: with int8 blocks of 32 an AVX-512 VNNI kernel
    rounds a lone row like any other, with blocks of 128 it does not. What kernels do, they do to
    every row, so that a few dozen rows tell. Leaves the target even where they differ.
    """
    if not isinstance(target, OrtEngine | OrtPackedEngine) or not target.spare:
        return False
    widest = min(4, target.max_width, target.max_length - FILLED - LAPS)
    target.even = True
    if widest >= 2:
        target.even = not _alike(target, widest)
    return target.even


def _alike(target: OrtEngine | OrtPackedEngine, widest: int) -> bool:
    """Compare the last row of passes of every width, as they are, with that of a pair."""
    length = FILLED + LAPS
    ids = np.arange(length, dtype=np.int64) * STEP % target.geometry.vocab_size
    for begin in range(0, length, 2):
        _logits(target, ids[begin : begin + 2].tolist(), begin)
    # From the last end to the first: a partner overwrites what lies behind the end.
    for end in range(FILLED + LAPS, FILLED, -1):
        target.even = True
        pair = _logits(target, ids[end - 2 : end].tolist(), end - 2)[-1].copy()
        target.even = False
        for width in range(1, widest + 1):
            row = _logits(target, ids[end - width : end].tolist(), end - width)[-1]
            if not np.array_equal(row, pair):
                return False
    return True


def _logits(target: OrtEngine | OrtPackedEngine, tokens: list[int], start: int) -> Logits:
    """Feed tokens to the first row; return the logits [S, V] after each."""
    if isinstance(target, OrtPackedEngine):
        found = target.forward_rows([Feed(0, tokens, start, len(tokens))])[0].logits
    else:
        found = target.forward([tokens], start).logits
    logits: Logits = found[0]
    return logits
