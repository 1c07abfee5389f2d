"""Weight-only quantization: a portable graph whose weights are stored in another precision."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specrt_export.checkpoint.checkpoint import Checkpoint
from specrt_export.checkpoint.codes import FP4_VALUES
from specrt_export.portable.external_data import DataFile, StoredTensor, external_tensors, location
from specrt_export.portable.graph import PRECISION, part_path, parts_beside, read_graph, whole_graph
from specrt_export.precision import STORED, Precision
from specrt_export.quantize.calibration import CalibratedCodes, CalibrationText, Progress, calibrate
from specrt_export.quantize.weight_choice import Choice, Formats, choose, choose_coded
from specrt_export.quantize.weight_store import Store, Stored

GRAPH, WEIGHTS = "graph.onnx", "weights.data"


@dataclass(frozen=True)
class Quantized:
    """A quantized portable graph on disk."""

    folder: Path
    precision: Precision
    stored: tuple[Stored, ...]
    parts: Mapping[str, tuple[Stored, ...]] = field(default_factory=dict)
    """Of an encoder-decoder, whose decoder's `stored` are: the same of the other graphs."""

    @property
    def graph(self) -> Path:
        """The graph; its weights are in the same folder."""
        return self.folder / GRAPH


def quantize(
    graph: Path,
    checkpoint: Path,
    folder: Path,
    precision: Precision,
    progress: Progress = lambda part, done: None,
    text: CalibrationText | None = None,
    formats: Formats | None = None,
    codes: CalibratedCodes | None = None,
) -> Quantized:
    """Write `graph.onnx` and `weights.data` into a new folder.

    Of an encoder-decoder the other graphs are written, too; one file holds the weights of all.
    The text is for precisions whose codes are found on one, where no `codes` are given. `formats`
    are of weights that are stored as something else than the precision says.
    What a precision is not about, such as norms and biases, is copied as fp32: a type that a
    quantized graph stores is the one that was asked for. No tensor is ever whole in memory, unless
    it has to be turned.
    Raises: ExportError, CheckpointError, BuildError.
    """
    folder.mkdir(parents=True)
    graphs = {"": graph, **parts_beside(graph)}
    stored: dict[str, tuple[Stored, ...]] = {}
    if codes is None and text is not None:
        whole = whole_graph(graph)
        choices = choose(whole, precision, formats or {})
        codes = find_codes(whole, checkpoint, precision, choices, text, progress)
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        for part, path in graphs.items():
            model = read_graph(path)
            choices = choose(model, precision, formats or {})
            there = [one for others in stored.values() for one in others]
            stored[part] = tuple(_write_chosen(model, checkpoint, choices, store, codes, there))
            graft(model, stored[part])
            keep_rest(model, checkpoint, store)
            model.metadata_props.add(key=PRECISION, value=json.dumps(asdict(precision)))
            place = part_path(folder / GRAPH, part) if part else folder / GRAPH
            place.write_bytes(model.SerializeToString(deterministic=True))
    return Quantized(folder, precision, stored.pop(""), stored)


def keep(graph: Path, checkpoint: Checkpoint, folder: Path) -> Quantized:
    """Write `graph.onnx` and `weights.data` of a checkpoint that is quantized already.

    Its codes and scales stay as they are, bit for bit; floats are copied as fp32. Of an
    encoder-decoder the other graphs are written, too.
    Raises: ExportError, CheckpointError.
    """
    folder.mkdir(parents=True)
    coded, stored = checkpoint.coded, dict[str, tuple[Stored, ...]]()
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        for part, path in {"": graph, **parts_beside(graph)}.items():
            model = read_graph(path)
            own = [store.write_codes(one, coded[one.weight]) for one in choose_coded(model, coded)]
            stored[part] = tuple(own)
            graft(model, own)
            _order_inputs(
                model, {p: coded[o.choice.weight].inputs for o in own for p in o.choice.products}
            )
            keep_rest(model, checkpoint.folder, store)
            place = part_path(folder / GRAPH, part) if part else folder / GRAPH
            place.write_bytes(model.SerializeToString(deterministic=True))
    return Quantized(folder, Precision.of(STORED), stored.pop(""), stored)


def _order_inputs(model: onnx.ModelProto, orders: Mapping[str, NDArray[Any] | None]) -> None:
    """Let products read their inputs in the order of their weights' columns.

    ```
    x ─────────────────────── MatMul          =>          x, order ─ Gather (axis -1) ─ MatMul
    ```
    Products that read one value in one order share it. `orders` are by the product's name.
    """
    ordered: dict[tuple[str, bytes], str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        order = orders.get(node.name)
        if order is not None:
            key = node.input[0], order.tobytes()
            if key not in ordered:
                name = f"{node.name}/inputs"
                model.graph.initializer.append(_constant(name, order))
                gather = helper.make_node(
                    "Gather", [node.input[0], name], [f"{name}/Gather"], axis=-1
                )
                gather.name = ordered[key] = gather.output[0]
                nodes.append(gather)
            node.input[0] = ordered[key]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def find_codes(
    model: onnx.ModelProto, checkpoint: Path, precision: Precision, choices: Sequence[Choice],
    text: CalibrationText, progress: Progress,
) -> CalibratedCodes | None:  # fmt: skip
    """Find the codes of those weights that depend on a text; None where none do.

    The model is a `whole_graph`, so that an encoder's are found on sources.
    Raises: CheckpointError, BuildError.
    """
    calibrated = [choice for choice in choices if precision.calibrated and _calibrates(choice)]
    return calibrate(model, checkpoint, calibrated, text, progress) if calibrated else None


def _write_chosen(
    model: onnx.ModelProto, checkpoint: Path, choices: Sequence[Choice], store: Store,
    codes: CalibratedCodes | None, there: Sequence[Stored],
) -> list[Stored]:  # fmt: skip
    """Write weights, but for those that lie `there` in the same form, as other graphs read them."""
    tensors = {tensor.name: tensor for tensor in external_tensors(model)}
    written = {_form(one.choice): one for one in there}
    stored = []
    for choice in choices:
        if _form(choice) in written:
            stored.append(replace(written[_form(choice)], choice=choice))
            continue
        found = codes.read(choice.name) if codes is not None and choice.name in codes else None
        stored.append(store.write(choice, StoredTensor(tensors[choice.weight], checkpoint), found))
    return stored


def _form(choice: Choice) -> Choice:
    """Return what of a choice decides the bytes that are stored."""
    return replace(choice, uses=())


def _calibrates(choice: Choice) -> bool:
    """Tell whether a weight's codes depend on what it is multiplied with.

    A table that is looked up in, too, is rounded for itself.
    """
    return choice.precision == "int4" and all(use.products for use in choice.uses)


def keep_rest(model: onnx.ModelProto, checkpoint: Path, store: Store) -> None:
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


def graft(model: onnx.ModelProto, stored: Iterable[Stored]) -> None:
    """Let each use of a chosen weight read its stored form; drop what nothing reads any more.

        codes, scales ── see `_decoded` ─┐
        fp16 or bf16 ─── Cast ───────────┴─ (Transpose) ── Transpose, Gemm or Gather

    The transposition in brackets is there for a weight that was turned to be stored.
    """
    nodes = {node.name: node for node in model.graph.node}
    added: list[onnx.NodeProto] = []
    for one in stored:
        model.graph.initializer.extend(one.tensors)
        nodes_of_weight, constants = _restore(one)
        model.graph.initializer.extend(constants)
        added.extend(nodes_of_weight)
        for use in one.choice.uses:
            nodes[use.node].input[use.input] = nodes_of_weight[-1].output[0]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*added, *rest])
    prune(model)


def _restore(one: Stored) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return the nodes that make fp32 weights of stored ones, and the constants they read."""
    choice, names = one.choice, [tensor.name for tensor in one.tensors]
    constants: list[onnx.TensorProto] = []
    if choice.block:
        nodes, constants = _decoded(one)
    else:
        nodes = [_node("Cast", choice.name, names, to=TensorProto.FLOAT)]
    if choice.turned:
        nodes.append(_node("Transpose", choice.name, nodes[-1].output, perm=[1, 0]))
    return nodes, constants


def _decoded(one: Stored) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return the nodes that make fp32 weights of codes, with the roundings that `Codes` has.

    ```
    codes, scales ─ DequantizeLinear                                                  symmetric
    zeros (8 bits) ─ Cast to the codes' type ─ DequantizeLinear, with codes and scales
    codes, scales ─ DequantizeLinear ─ Reshape [N, K / block, block] ─ Sub minimums ─ Reshape
    codes (uint4) ─ Cast to int32 ─ Gather from 16 values ─ Reshape ─ Mul scales ─ Reshape    fp4
    ```
    """
    choice, tensors = one.choice, one.tensors
    name, values = choice.name, tensors[0].name
    blocks = [tensors[0].dims[0], tensors[0].dims[1] // choice.block, choice.block]
    whole = [_constant(f"{name}.blocks", blocks), _constant(f"{name}.shape", tensors[0].dims)]

    def in_blocks(op_type: str, made: onnx.NodeProto, other: str) -> list[onnx.NodeProto]:
        """Return an operation of blocks with a number for each."""
        cut = _node("Reshape", f"{name}/blocks", [made.output[0], whole[0].name])
        done = _node(op_type, name, [cut.output[0], other])
        return [cut, done, _node("Reshape", name, [done.output[0], whole[1].name])]

    if choice.precision == "fp4":
        table = helper.make_tensor(f"{name}.values", TensorProto.FLOAT, [16], FP4_VALUES)
        index = _node("Cast", name, [values], to=TensorProto.INT32)
        found = _node("Gather", name, [table.name, index.output[0]], axis=0)
        nodes = [index, found, *in_blocks("Mul", found, tensors[1].name)]
        return nodes, [table, *whole]
    attributes = {"axis": 1, "block_size": choice.block}
    inputs = [values, tensors[1].name]
    if len(tensors) == 2:
        return [_node("DequantizeLinear", name, inputs, **attributes)], []
    if tensors[2].data_type == TensorProto.FLOAT:
        scaled = _node("DequantizeLinear", name, inputs, **attributes)
        return [scaled, *in_blocks("Sub", scaled, tensors[2].name)], whole
    if tensors[2].data_type == tensors[0].data_type:
        return [_node("DequantizeLinear", name, [*inputs, tensors[2].name], **attributes)], []
    zeros = _node("Cast", f"{name}.zero", [tensors[2].name], to=tensors[0].data_type)
    return [zeros, _node("DequantizeLinear", name, [*inputs, zeros.output[0]], **attributes)], []


def _constant(name: str, numbers: Iterable[int]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(list(numbers), np.int64), name)


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
    nodes = [node for node in graph.node if needed.intersection(node.output)]
    used = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(used)
