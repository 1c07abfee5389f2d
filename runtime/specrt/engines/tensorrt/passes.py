"""Passes of one width and so many rows: captured once and launched, or enqueued each time."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from specrt.engine import Tokens
from specrt.engines.tensorrt.device import Graph
from specrt.engines.tensorrt.layout import Field, Layout
from specrt.engines.tensorrt.model import Model
from specrt.engines.tensorrt.plan import Context
from specrt.engines.tensorrt.results import Rows, Scores, result_fields


class Pass(Protocol):
    """One shape of pass; its feed is written before it runs, and its scores are there after."""

    tokens: Tokens
    start: Tokens
    scores: Scores

    def run(self, parity: int) -> None:
        """Run the pass and wait for its results; `parity` says which KV buffers it reads."""

    def close(self) -> None:
        """Give captured graphs back, and let go of contexts."""


class Ports:
    """Where passes of up to some width and rows have their feed, results and scores."""

    def __init__(self, model: Model, width: int, rows: int, scores: Rows) -> None:
        batch, memory = model.batch, model.memory
        self.scores = scores
        self._fed = Layout(
            [
                Field("input_ids", np.int64, (batch, width)),
                Field("start", np.int64, (batch,)),
                Field("rows", np.int64, (rows,)),
            ]
        )
        self._found = Layout(result_fields(model.record, batch, rows))
        self.feed = memory.stage(self._fed.size, "feeds")
        self.results = memory.stage(self._found.size, "results")
        self._batch = batch

    def addresses(self) -> dict[str, int]:
        """Return where every tensor lies but the KV buffers."""
        return {
            **self._fed.addresses(self.feed),
            **self._found.addresses(self.results),
            "logits": self.scores.address,
        }

    def fed(self, name: str, *shape: int) -> Any:
        """Return an input on the host, or its beginning."""
        return self._fed.view(self.feed, name, shape or None)

    def found(self, rows: int) -> Scores:
        """Return the outputs of a pass of so many rows."""
        return Scores(self._found, self.results, self.scores, self._batch, rows)


class FixedPass:
    """The pass of a profile that has one size, with a context and a graph for each parity.

    Its first run is launched kernel by kernel, because TensorRT may allocate then, and captured
    afterwards; where the library says that it cannot be captured, all runs are like the first.
    """

    def __init__(
        self, model: Model, profile: int, width: int, rows: int, scores: Rows, captures: bool
    ) -> None:
        self._ports = ports = Ports(model, width, rows, scores)
        self.tokens: Tokens = ports.fed("input_ids")
        self.start: Tokens = ports.fed("start")
        ports.fed("rows")[:] = np.arange(width - rows, width)
        self.scores = ports.found(rows)
        self._device = model.device
        self._captures = captures
        addresses = ports.addresses()
        self._contexts = [
            model.context(profile, width, rows, addresses, parity)
            for parity in range(model.caches.sets)
        ]
        self._graphs: list[Graph | None] = [None] * model.caches.sets

    def run(self, parity: int) -> None:
        """Launch what was captured; see `Pass.run`."""
        self.scores.forget()
        graph = self._graphs[parity]
        if graph is None:
            self._first(parity)
        else:
            graph.launch()
            self._device.wait()

    def _first(self, parity: int) -> None:
        self._put(parity)
        self._device.wait()
        if self._captures and self._contexts[parity].capturable():
            with self._device.capture() as recording:
                self._put(parity)
            self._graphs[parity] = recording.graph

    def _put(self, parity: int) -> None:
        self._ports.feed.send()
        self._contexts[parity].enqueue()
        self._ports.results.fetch()

    def close(self) -> None:
        """Give captured graphs back; see `Pass.close`."""
        for graph in self._graphs:
            if graph is not None:
                graph.free()
        self._graphs = [None] * len(self._graphs)
        self._contexts.clear()


class WideProfile:
    """A profile of many sizes: one context, told its shapes whenever they change."""

    def __init__(self, model: Model, profile: int, width: int, rows: int) -> None:
        sizes = model.record.profiles[profile]
        most = sizes.rows.most
        scores = Rows(model.memory, model.batch, most, model.geometry.vocab_size)
        self.ports = Ports(model, sizes.width.most, most, scores)
        self._model = model
        self._sizes = (width, rows)
        self._parity = 0
        self._context: Context | None = model.context(profile, width, rows, self.ports.addresses())

    def run(self, width: int, rows: int, parity: int) -> None:
        """Enqueue one pass, and wait for its results."""
        context, model = self._context, self._model
        assert context is not None, "the profile was closed"
        if (width, rows) != self._sizes:
            model.shape(context, width, rows)
            self._sizes = (width, rows)
        if parity != self._parity:
            model.caches.bind(context, parity)
            self._parity = parity
        self.ports.feed.send()
        context.enqueue()
        self.ports.results.fetch()
        model.device.wait()

    def close(self) -> None:
        """Let go of the context."""
        self._context = None


class WidePass:
    """One size of a profile that takes many, such as a chunk of a prompt."""

    def __init__(self, profile: WideProfile, batch: int, width: int, rows: int) -> None:
        ports = profile.ports
        self.tokens: Tokens = ports.fed("input_ids", batch, width)
        self.start: Tokens = ports.fed("start")
        self.scores = ports.found(rows)
        self._wanted: Tokens = ports.fed("rows", rows)
        self._profile = profile
        self._width, self._rows = width, rows

    def run(self, parity: int) -> None:
        """Enqueue the pass; see `Pass.run`."""
        self.scores.forget()
        self._wanted[:] = range(self._width - self._rows, self._width)
        self._profile.run(self._width, self._rows, parity)

    def close(self) -> None:
        """Let the profile go; see `Pass.close`."""
        self._profile.close()
