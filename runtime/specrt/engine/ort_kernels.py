"""ONNX Runtime with the CPU kernels: the tokens of all rows in one pass, KV buffers in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.bundle import Geometry
from specrt.engine.ort import bind_input, bind_output, run_bound
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

TILE = 16
"""Positions of a group of keys, and lanes of a vector of values."""

_MOST_BINDINGS = 64


@dataclass(frozen=True)
class Scores:
    """The scores of some rows of a pass, as views of memory that the next pass overwrites."""

    argmax: Tokens
    logits: Logits
    confidence: Confidence | None

    @property
    def candidates(self) -> Candidates | None:
        """None: these graphs compute none."""
        return None


class OrtKernelsEngine:
    """A saved graph of the CPU kernels, over the KV buffers of one or more rows.

    A pass costs what its tokens cost, of whichever rows. A row has the same bits beside any others
    and at every width.

    Shapes: the KV buffers of a layer are [batch, kv_heads, P / 16, head_dim, 16] for keys and
        [batch, kv_heads, P, head_dim] for values, P being `max_length` in whole groups of 16.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(
        self, session: Any, weights: tuple[Any, ...], geometry: Geometry, *, batch: int,
        max_length: int, max_width: int,
    ) -> None:  # fmt: skip
        self.geometry = geometry
        self.batch = batch
        self.max_length = max_length
        self.max_width = max_width
        self._session, self._weights = session, weights
        self._caches = self._allocate()
        tokens = batch * max_width
        self._tokens, self._slots, self._positions, self._rows = np.zeros((4, tokens), np.int64)
        self._scores: dict[str, NDArray[Any]] = {}
        self._bindings: dict[tuple[int, int], Any] = {}

    def _allocate(self) -> dict[str, NDArray[Any]]:
        """Allocate the KV buffers; the pages of a zeroed array cost memory only once written."""
        g, groups = self.geometry, -(-self.max_length // TILE)
        shapes = {
            "key": (self.batch, g.kv_heads, groups, g.head_dim, TILE),
            "value": (self.batch, g.kv_heads, groups * TILE, -(-g.head_dim // TILE) * TILE),
        }
        there = {i.name: tuple(i.shape) for i in self._session.get_inputs()}
        caches = {}
        for kind, shape in shapes.items():
            for name in (f"{kind}.{i}" for i in range(g.layers)):
                if there.get(name) != shape:
                    raise EngineError(
                        f"the engine's {name} has shape {there.get(name)}, and the manifest says "
                        f"{shape}; they do not belong together: build the bundle again"
                    )
                caches[name] = np.zeros(shape, np.float32)
        return caches

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> Scores:
        """Run one pass of every row; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        _, scored = pass_size(self, batch, rows)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,)).tolist()
        fed = enumerate(zip(batch, starts, strict=True))
        self.forward_rows([Feed(row, own, at, scored) for row, (own, at) in fed])
        return self._scored(0, self.batch, scored)

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[Scores, ...]:
        """Run one pass over some of the rows; see `PackedEngine.forward_rows`."""
        check_feeds(self, feeds)
        count = scored = 0
        for feed in feeds:
            end, last = count + len(feed.tokens), scored + feed.rows
            self._tokens[count:end] = feed.tokens
            self._slots[count:end] = feed.row
            self._positions[count:end] = range(feed.start, feed.start + len(feed.tokens))
            self._rows[scored:last] = range(end - feed.rows, end)
            count, scored = end, last
        binding = self._bindings.get((count, scored)) or self._bind(count, scored)
        run_bound(self._session, binding, count)
        outputs, first = [], 0
        for feed in feeds:
            outputs.append(self._scored(first, 1, feed.rows))
            first += feed.rows
        return tuple(outputs)

    def _bind(self, count: int, scored: int) -> Any:
        """Bind a pass of so many tokens and scored rows; done once, then reused."""
        if self._session is None:
            raise EngineError(CLOSED)
        if not self._scores or len(self._scores["argmax"]) < scored:
            self._reserve_scores(scored)
        elif len(self._bindings) >= _MOST_BINDINGS:
            self._bindings.clear()
        binding = self._session.io_binding()
        bind_input(binding, "input_ids", self._tokens[None, :count])
        bind_input(binding, "slots", self._slots[:count])
        bind_input(binding, "positions", self._positions[:count])
        bind_input(binding, "rows", self._rows[:scored])
        for name, cache in self._caches.items():
            bind_input(binding, name, cache)
            bind_output(binding, f"present_{name}", cache)
        for name, memory in self._scores.items():
            bind_output(binding, name, memory[None, :scored])
        self._bindings[count, scored] = binding
        return binding

    def _reserve_scores(self, rows: int) -> None:
        """Allocate scores of so many rows; bindings of smaller memory end."""
        self._scores = {
            "argmax": np.zeros(rows, np.int64),
            "logits": np.zeros((rows, self.geometry.vocab_size), np.float32),
        }
        if any(o.name == "confidence" for o in self._session.get_outputs()):
            self._scores["confidence"] = np.zeros(rows, np.float32)
        self._bindings.clear()

    def _scored(self, first: int, batch: int, rows: int) -> Scores:
        """Return the scores of some rows that follow each other, as [batch, rows, ...]."""
        views = {
            name: memory[first : first + batch * rows].reshape(batch, rows, *memory.shape[1:])
            for name, memory in self._scores.items()
        }
        return Scores(views["argmax"], views["logits"], views.get("confidence"))

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row to another; see `PackedEngine.copy_row`."""
        if not {source, to} <= {*range(self.batch)} or not 0 <= length <= self.max_length:
            raise EngineError(
                f"{length} positions of row {source} were to be copied to row {to}; expected rows "
                f"from 0 to {self.batch - 1}, and up to {self.max_length} positions"
            )
        if source == to:
            return
        for name, cache in self._caches.items():
            count = length if name.startswith("value") else -(-length // TILE)
            cache[to, :, :count] = cache[source, :, :count]

    def close(self) -> None:
        """Drop the session, the bindings and the KV buffers."""
        self._bindings.clear()
        self._caches.clear()
        self._session = None
        self._weights = ()


def check_feeds(engine: Engine, feeds: Sequence[Feed]) -> None:
    """Refuse feeds that no pass can have.

    Raises: EngineError.
    """
    rows = [feed.row for feed in feeds]
    if not rows or len(set(rows)) < len(rows) or not set(rows) <= {*range(engine.batch)}:
        raise EngineError(
            f"a pass was asked of rows {rows}; expected some of 0 to {engine.batch - 1}, each once"
        )
    for feed in feeds:
        width = len(feed.tokens)
        check_bounds(engine, width, feed.start, feed.start)
        if not 1 <= feed.rows <= width:
            raise EngineError(
                f"{feed.rows} positions of row {feed.row} were to be scored in a pass of {width} "
                f"tokens; expected 1 to {width}"
            )
