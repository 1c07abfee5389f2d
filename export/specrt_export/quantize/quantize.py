"""Writes a portable graph's weights in another precision, beside a graph that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from specrt_export.portable.graph import PRECISION, external_tensors, location, read_graph
from specrt_export.quantize.codes import StoredTensor
from specrt_export.quantize.precision import SCALED, Precision, choose
from specrt_export.quantize.store import DataFile, Store, Stored


def graft(model: onnx.ModelProto, stored: Iterable[Stored]) -> None:
    """Let each use of a chosen weight read its stored form; drop what nothing reads any more.

        codes, scales ── DequantizeLinear ─┐
        fp16 or bf16 ─── Cast ─────────────┴─ (Transpose) ── Transpose, Gemm or Gather

    The transposition in brackets is there for a weight that was turned to be stored.
    """
    nodes = {node.name: node for node in model.graph.node}
    added: list[onnx.NodeProto] = []
    for one in stored:
        model.graph.initializer.extend(one.tensors)
        made = _restore(one)
        added.extend(made)
        for use in one.choice.uses:
            nodes[use.node].input[use.input] = made[-1].output[0]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*added, *rest])
    prune(model)


def _restore(one: Stored) -> list[onnx.NodeProto]:
    """Return the nodes that make fp32 weights of stored ones."""
    choice, names = one.choice, [tensor.name for tensor in one.tensors]
    if choice.precision in SCALED:
        made = [_node("DequantizeLinear", choice.name, names, axis=1, block_size=choice.block)]
    else:
        made = [_node("Cast", choice.name, names, to=TensorProto.FLOAT)]
    if choice.turned:
        made.append(_node("Transpose", choice.name, made[0].output, perm=[1, 0]))
    return made


def _node(op_type: str, name: str, inputs: Iterable[str], **attributes: Any) -> onnx.NodeProto:
    full = f"{name}/{op_type}"
    return helper.make_node(op_type, list(inputs), [full], full, **attributes)


def prune(model: onnx.ModelProto) -> None:
    """Drop nodes and initializers that no output is made from."""
    graph = model.graph
    maker = {output: node for node in graph.node for output in node.output}
    needed, wanted = set[str](), [output.name for output in graph.output]
    while wanted:
        name = wanted.pop()
        if name not in needed:
            needed.add(name)
            node = maker.get(name)
            wanted.extend(node.input if node is not None else ())
    kept = [node for node in graph.node if needed.intersection(node.output)]
    used = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(used)


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
