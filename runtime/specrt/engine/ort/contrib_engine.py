"""ONNX Runtime's own operators, where the CPU kernels are missing: one row after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specrt.engine.engine_spec import EngineSpec
from specrt.engine.ort.ort_engine import (
    RowScores,
    bind_input,
    bind_output,
    check_copy,
    check_feeds,
    check_hidden,
    head_memory,
    keep_features,
    run_bound,
    widths,
)
from specrt.engine.protocol import CLOSED, EngineTraits, Feed, pass_size
from specrt.engine.state_bases import StateBases
from specrt.errors import EngineError
from specrt.geometry import LAG, TAKEN_BACK

MOST_BINDINGS = 64
"""Passes that stay bound."""


class ContribEngine:
    """A saved graph for one row, over the KV buffers of one or more.

    A row has the same bits next to any others, as it has a pass of its own, and at every width:
    graphs of targets pad their tokens to an even number, and have a position more for it.

    Shapes: the KV buffers of a row are [1, heads, P, width], P being `max_length` or one
        more.
    Threads: forward passes of one engine must not overlap.
    """

    def __init__(self, session: Any, weights: tuple[Any, ...], spec: EngineSpec) -> None:
        self.geometry = spec.geometry
        self.batch = batch = spec.batch
        self.max_length = max_length = spec.max_length
        width = min(spec.max_width, TAKEN_BACK) if self.geometry.recurs else spec.max_width
        self.max_width = max_width = width  # of states no pass adds more than a window holds
        self._session, self._weights = session, weights
        self.max_rows = max_width
        self._caches = self._allocate()
        self._tokens, self._rows = np.zeros((2, max_width), np.int64)
        self._start = np.zeros(1, np.int64)
        self._bases = StateBases(batch, 0 if spec.target is None else LAG)
        self._told = {name: np.zeros(1, np.int64) for name in self.geometry.bases}
        self.features, self._passed, self._hidden = head_memory(
            session, batch, max_length, max_width
        )
        scored = widths(session.get_outputs())["logits"]
        self.traits = EngineTraits(scored=scored, features=self.features, rewind=self._bases.least)
        self._scores: list[dict[str, NDArray[Any]]] = [{} for _ in range(batch)]
        self._bindings: dict[tuple[int, int, int], Any] = {}

    def _allocate(self) -> dict[str, NDArray[Any]]:
        """Allocate the KV buffers; the pages of a zeroed array cost memory only once written."""
        there = {i.name: tuple(i.shape) for i in self._session.get_inputs()}
        caches = {}
        for name, one in self.geometry.buffers.items():
            positions = [self.geometry.positions(name, self.max_length + more) for more in (0, 1)]
            shapes = [(1, one.heads, length, one.width) for length in positions]
            shape = there.get(name)
            if shape not in shapes:
                raise EngineError(
                    f"the engine's {name} has shape {shape}, and the manifest says {shapes[0]}; "
                    "they do not belong together: build the bundle again"
                )
            caches[name] = np.zeros((self.batch, *shape[1:]), np.float32)
        return caches

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> RowScores:
        """Run one pass of every row; see `Engine.forward`."""
        batch = np.asarray(tokens, np.int64)
        _, scored = pass_size(self, batch, rows)
        starts = np.broadcast_to(np.asarray(start, np.int64), (self.batch,)).tolist()
        fed = enumerate(zip(batch, starts, strict=True))
        outputs = self.forward_rows([Feed(row, own, at, scored) for row, (own, at) in fed])
        if self.batch == 1:
            return outputs[0]
        parts = [o.confidence for o in outputs if o.confidence is not None]
        return RowScores(
            np.concatenate([output.argmax for output in outputs]),
            np.concatenate([output.logits for output in outputs]),
            np.concatenate(parts) if parts else None,
        )

    def forward_rows(self, feeds: Sequence[Feed]) -> tuple[RowScores, ...]:
        """Run a pass of each of some rows; see `PackedEngine.forward_rows`."""
        check_feeds(self, feeds)
        return tuple([self._run(feed) for feed in feeds])

    def _run(self, feed: Feed) -> RowScores:
        width = len(feed.tokens)
        key = feed.row, width, feed.rows
        binding = self._bindings.get(key) or self._bind(*key)
        self._tokens[:width] = feed.tokens
        self._start[0] = feed.start
        self._rows[: feed.rows] = range(width - feed.rows, width)
        if self._hidden is not None:
            self._hidden[0, :width] = check_hidden(feed)
        if self._told:
            self._bases.advance(feed.row, feed.start, width)
            for told, known in zip(
                self._told.values(), (self._bases.base, self._bases.next), strict=True
            ):
                told[0] = known[feed.row]
        try:
            run_bound(self._session, binding, width)
        except BaseException:
            self._bases.lose(feed.row)
            raise
        if self.features is not None and self._passed is not None:
            keep_features(self.features, feed, self._passed[0, :width])
        views = {name: memory[None, : feed.rows] for name, memory in self._scores[feed.row].items()}
        return RowScores(
            views["argmax"], views["logits"], views.get("confidence"), views.get("state")
        )

    def _bind(self, row: int, width: int, scored: int) -> Any:
        """Bind a pass of a row; done once, then reused."""
        if self._session is None:
            raise EngineError(CLOSED)
        if len(self._scores[row].get("argmax", ())) < scored:
            self._reserve_scores(row, scored)
        elif len(self._bindings) >= MOST_BINDINGS:
            self._bindings.clear()
        binding = self._session.io_binding()
        bind_input(binding, "input_ids", self._tokens[None, :width])
        bind_input(binding, "start", self._start)
        bind_input(binding, "rows", self._rows[:scored])
        for name, told in self._told.items():
            bind_input(binding, name, told)
        if self._hidden is not None:
            bind_input(binding, "hidden", self._hidden[:, :width])
        if self._passed is not None:
            bind_output(binding, "feature", self._passed[:, :width])
        for name, cache in self._caches.items():
            bind_input(binding, name, cache[row : row + 1])
            bind_output(binding, f"present_{name}", cache[row : row + 1])
        for name, memory in self._scores[row].items():
            bind_output(binding, name, memory[None, :scored])
        self._bindings[row, width, scored] = binding
        return binding

    def _reserve_scores(self, row: int, rows: int) -> None:
        """Allocate scores of so many rows; bindings of smaller memory end."""
        scores: dict[str, NDArray[Any]] = {
            "argmax": np.zeros(rows, np.int64),
        }
        for output in self._session.get_outputs():
            if output.name in ("logits", "state"):  # a trimmed draft scores fewer than it knows
                scores[output.name] = np.zeros((rows, output.shape[-1]), np.float32)
            elif output.name == "confidence":
                scores["confidence"] = np.zeros(rows, np.float32)
        self._scores[row] = scores
        self._bindings.clear()

    def copy_row(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of a row to another; see `PackedEngine.copy_row`."""
        check_copy(self, source, to, length)
        if source != to:
            for name, cache in self._caches.items():
                until = length if name in self.geometry.in_place else None
                cache[to, :, :until] = cache[source, :, :until]
            self._bases.copy(source, to)
            if self.features is not None:
                self.features[to, :length] = self.features[source, :length]

    def close(self) -> None:
        """Drop the session, the bindings and the KV buffers."""
        self._bindings.clear()
        self._caches.clear()
        self._session = None
        self._weights = ()
