"""Running a portable graph over texts in segments, with no more weights at once than one has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import starmap, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specrt.engine.protocol import Source
from specrt.geometry import BASE
from specrt_export.portable.external_data import Floats
from specrt_export.portable.graph import (
    SOURCE_IDS,
    Tokens,
    geometry_of,
    open_session,
    source_of,
)

Array = NDArray[np.generic]

Values = Array | list[Array]
"""Of a tensor for each piece: one array [P, ...] where all have one shape."""

SOURCES = (SOURCE_IDS, "input_features", "hidden")
"""What a source is called that a graph reads."""


def weight_name(product: str) -> str:
    """Return the name under which a product of a segmented graph is given its weight [K, N]."""
    return f"{product}.given"


class SegmentedRun:
    """All pieces of a text, taken through a graph from one tensor to the next.

        input_ids ─ segment ─┬─ tensor 0 ─ segment ─┬─ tensor 1 ─ segment ─ ...
                             └─ what else is read later: the residual stream, ...

    What does not depend on the text (positions, masks, rotations) is computed in each segment
    again; what does and is read later is kept, for all pieces. Weights of products are given to
    each segment, so that none lies in memory longer than its own. Of an encoder-decoder, whose
    graph is a `whole_graph`, segments begin in the encoder, and each piece is a text of a source.
    """

    def __init__(
        self, model: onnx.ModelProto, folder: Path, products: Iterable[str],
        pieces: Sequence[Tokens] | Tokens, sources: Sequence[Source] = (),
    ) -> None:  # fmt: skip
        """Take pieces of a text, and the source of each where they have one.

        `products` are the nodes whose weights will be given.
        """
        self._model, self._folder = model, folder
        self._pieces = [*starmap(partial(_inputs, model), zip_longest(pieces, sources))]
        _give_weights(model.graph, set(products))
        _cast_after_lookup(model.graph)
        self._nodes = list(model.graph.node)
        self._makers = {name: at for at, node in enumerate(self._nodes) for name in node.output}
        self._varies = _text_dependent(model.graph)
        self._done: set[int] = set()
        self.kept: dict[str, Values] = {}
        """Of each tensor that is read later, its values for each piece."""
        self._ahead: list[str] = []
        self._wanted: set[int] = set()

    def plan(self, tensors: Iterable[str]) -> None:
        """Say which tensors will be asked for, in their order: nothing else is computed."""
        self._ahead = list(tensors)
        self._wanted = self._ancestors(self._ahead, set())

    def skip(self, tensor: str) -> None:
        """Count a tensor as reached, its segment's results being `kept` from an earlier run."""
        self._ahead.remove(tensor)
        self._done |= {at for at in self._ancestors([tensor], self._done) if self._of_text(at)}

    def products(self, tensor: str) -> list[str]:
        """Return the products of the segment that ends at a tensor: those that need weights."""
        nodes = self._ancestors([tensor], self._done)
        return [n.name for n in (self._nodes[at] for at in sorted(nodes)) if _is_given(n)]

    def advance(self, tensor: str, weights: Mapping[str, Floats]) -> Floats:
        """Run the segment that ends at a tensor; return its values of all pieces [N, K].

        `weights` are those of its products, by `weight_name`.
        """
        segment = self.segment(tensor)
        self.kept = segment.run(self.kept, weights)
        if tensor in self._pieces[0]:  # what a text or a source begins with
            return rows_of([piece[tensor] for piece in self._pieces])
        return rows_of(self.kept[tensor])

    def segment(self, tensor: str) -> Segment:
        """Open the segment that ends at a tensor, and count the tensor as reached.

        It can be run more than once, such as with other weights; `kept` is left to the caller.
        """
        places = self._ancestors([tensor], self._done)
        self._done |= {at for at in places if self._of_text(at)}
        self._ahead.remove(tensor)
        read_later = {tensor, *self._ahead} | {
            name
            for at in self._wanted - self._done
            for name in self._nodes[at].input
            if name in self._varies  # also where only its shape is read
        }
        nodes = [self._nodes[at] for at in sorted(places)]
        made = [name for node in nodes for name in node.output]
        outputs = [name for name in made if name in self._varies and name in read_later]
        return Segment(self._segment(nodes, outputs), self._folder, self._pieces, read_later)

    def _of_text(self, at: int) -> bool:
        return any(name in self._varies for name in self._nodes[at].output)

    def _ancestors(self, tensors: Iterable[str], done: set[int]) -> set[int]:
        """Return the nodes that tensors are made by, as far back as what is done."""
        found: set[int] = set()
        names = list(tensors)
        while names:
            at = self._makers.get(names.pop())
            if at is not None and at not in found and at not in done:
                found.add(at)
                names += self._nodes[at].input
        return found

    def _segment(self, nodes: Sequence[onnx.NodeProto], outputs: list[str]) -> onnx.ModelProto:
        """Return the graph of some nodes, and of what they read."""
        made = {name for node in nodes for name in node.output}
        read = {name for node in nodes for name in node.input} - made
        graph = onnx.GraphProto(name="segment", node=nodes)
        graph.initializer.extend(t for t in self._model.graph.initializer if t.name in read)
        graph.input.extend(v for v in self._model.graph.input if v.name in read)
        given = {weight_name(node.name) for node in nodes if _is_given(node)}
        for name in sorted(given):
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]))
        for name in sorted(read & self.kept.keys()):
            values = self.kept[name]
            kind = helper.np_dtype_to_tensor_dtype(values[0].dtype)
            same = isinstance(values, np.ndarray)
            shape = values[0].shape if same else (None,) * values[0].ndim
            graph.input.append(helper.make_tensor_value_info(name, kind, shape))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        model.graph.CopyFrom(graph)
        return model


class Segment:
    """Some nodes of a graph, open to be run; see `SegmentedRun`."""

    def __init__(
        self, model: onnx.ModelProto, folder: Path, pieces: Sequence[Mapping[str, Array]],
        read_later: set[str],
    ) -> None:  # fmt: skip
        self._pieces, self._read_later = pieces, read_later
        self._outputs = [value.name for value in model.graph.output]
        if not self._outputs:
            return
        self._session, self._held = open_session(model, folder)
        self._names = {value.name for value in self._session.get_inputs()}
        self._geometry = geometry_of(model)
        shapes = {tuple(array.shape for array in piece.values()) for piece in pieces}
        self._same = len(shapes) == 1

    def run(self, kept: Mapping[str, Values], weights: Mapping[str, Floats]) -> dict[str, Values]:
        """Return what is read later, of what was kept before and of what the segment makes."""
        made: dict[str, Any] = {}
        for number, piece in enumerate(self._pieces if self._outputs else ()):
            fixed = self._beginning(piece["input_ids"].shape[1]) | dict(weights) | dict(piece)
            given = fixed | {name: kept[name][number] for name in kept if name in self._names}
            feed = {name: array for name, array in given.items() if name in self._names}
            results = self._session.run(self._outputs, feed)
            for name, value in zip(self._outputs, results, strict=True):
                if not self._same:
                    made.setdefault(name, []).append(value)
                    continue
                if name not in made:
                    made[name] = np.empty((len(self._pieces), *value.shape), value.dtype)
                made[name][number] = value
        return {n: a for n, a in (dict(kept) | made).items() if n in self._read_later}

    def _beginning(self, length: int) -> dict[str, Any]:
        """Return what a piece begins with: position 0, and empty buffers."""
        buffers = self._geometry.filled(1, length)
        held = {name: buffer for name, buffer in buffers.items() if name in self._names}
        none = np.array([0])
        return {"start": none, BASE: none, "rows": np.arange(length), **held}


def rows_of(values: Values) -> Floats:
    """Return the values of all pieces as rows [N, K]."""
    if isinstance(values, np.ndarray):
        return values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False)
    rows = [value.reshape(-1, value.shape[-1]) for value in values]
    return np.concatenate(rows).astype(np.float32, copy=False)


def _inputs(model: onnx.ModelProto, piece: Tokens, source: Source | None) -> dict[str, Array]:
    """Return what a graph reads of one text [S], and of its source."""
    tokens: dict[str, Array] = {"input_ids": piece[None]}
    if source is None:
        return tokens
    own = {value.name for value in model.graph.input}
    name = next(name for name in SOURCES if name in own)
    sizes = source_of(model)
    assert sizes is not None, "a graph that reads a source has its sizes"
    length = sizes.max_source if name == "input_features" else len(source)
    return {**tokens, name: source[None], "source_length": np.array([length])}


def _is_given(node: onnx.NodeProto) -> bool:
    return len(node.input) > 1 and node.input[1] == weight_name(node.name)


def _give_weights(graph: onnx.GraphProto, products: set[str]) -> None:
    """Let products read weights [K, N] that are handed in, in the place of the graph's own."""
    for node in graph.node:
        if node.name in products:
            node.input[1] = weight_name(node.name)
            for attribute in node.attribute:
                if attribute.name == "transB":
                    attribute.i = 0


def _cast_after_lookup(graph: onnx.GraphProto) -> None:
    """Widen the rows of a table that were looked up, not the table.

    table ── Cast ── Gather      becomes      table ── Gather ── Cast
    """
    casts = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Cast"}
    tables = {tensor.name for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Gather" and casts.get(node.input[0]) in tables:
            node.input[0] = casts[node.input[0]]
            rows = f"{node.output[0]}.stored"
            nodes.append(helper.make_node("Cast", [rows], [node.output[0]], to=TensorProto.FLOAT))
            node.output[0] = rows
    graph.ClearField("node")
    graph.node.extend(nodes)


def _text_dependent(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that another text would give other values."""
    names = {"input_ids", *SOURCES}
    for node in graph.node:
        if node.op_type != "Shape" and not names.isdisjoint(node.input):
            names.update(node.output)
    return names
