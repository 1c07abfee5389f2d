"""Write a portable graph's weights in another precision, beside a graph that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from specrt_export.mapped import external_tensors, location
from specrt_export.portable import PRECISION, read_graph
from specrt_export.quantize.datafile import DataFile
from specrt_export.quantize.graft import graft, prune
from specrt_export.quantize.precision import Precision
from specrt_export.quantize.select import choose
from specrt_export.quantize.source import StoredTensor
from specrt_export.quantize.store import Store, Stored

GRAPH, WEIGHTS = "graph.onnx", "weights.data"


@dataclass(frozen=True)
class Quantized:
    """A quantized portable graph on disk."""

    folder: Path
    precision: Precision
    stored: tuple[Stored, ...]

    @property
    def graph(self) -> Path:
        """The graph; its weights are in the same folder."""
        return self.folder / GRAPH


def quantize(
    graph: Path,
    checkpoint: Path,
    folder: Path,
    precision: Precision,
    progress: Callable[[float], None] = lambda done: None,
) -> Quantized:
    """Write `graph.onnx` and `weights.data` into a new folder.

    What a precision is not about, such as norms and biases, is copied as fp32: a type that a
    quantized graph stores is the one that was asked for. No tensor is ever whole in memory, unless
    it has to be turned.
    Raises: ExportError, CheckpointError, BuildError.
    """
    model = read_graph(graph)
    folder.mkdir(parents=True)
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        stored = _write_chosen(model, checkpoint, precision, store, progress)
        graft(model, stored)
        _keep_rest(model, checkpoint, store)
    model.metadata_props.add(key=PRECISION, value=json.dumps(asdict(precision)))
    data = model.SerializeToString(deterministic=True)
    (folder / GRAPH).write_bytes(data)
    return Quantized(folder, precision, tuple(stored))


def _write_chosen(
    model: onnx.ModelProto,
    checkpoint: Path,
    precision: Precision,
    store: Store,
    progress: Callable[[float], None],
) -> list[Stored]:
    tensors = {tensor.name: tensor for tensor in external_tensors(model)}
    choices = choose(model, precision)
    stored = []
    for number, choice in enumerate(choices):
        progress(number / len(choices))
        stored.append(store.write(choice, StoredTensor(tensors[choice.weight], checkpoint)))
    return stored


def _keep_rest(model: onnx.ModelProto, checkpoint: Path, store: Store) -> None:
    """Copy the weights still in the checkpoint as fp32, without the casts that followed them."""
    left = {t.name: t for t in external_tensors(model) if location(t) != WEIGHTS}
    for tensor in left.values():
        tensor.CopyFrom(store.keep(StoredTensor(tensor, checkpoint)))
    cast = {n.output[0]: n.input[0] for n in model.graph.node if n.op_type == "Cast"}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if cast.get(name) in left:
                node.input[index] = cast[name]
    prune(model)
