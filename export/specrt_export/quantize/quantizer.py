"""Weight-only quantization: a portable graph whose weights are stored in another precision."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specrt.errors import BuildError, CheckpointError
from specrt_export.checkpoint import Checkpoint
from specrt_export.portable.external_data import (
    DataFile,
    Floats,
    Region,
    StoredTensor,
    external_tensors,
    location,
    narrow,
    widen,
)
from specrt_export.portable.graph import CODED, PRECISION, read_graph
from specrt_export.precision import BITS, SCALED, STORED, Precision, fitting_block
from specrt_export.quantize.calibration import (
    CalibratedCodes,
    CalibrationText,
    PackedCodes,
    Progress,
    calibrate,
)
from specrt_export.quantize.codes import (
    FP4_VALUES,
    CodedWeight,
    Codes,
    encode_codes,
    pack,
    unpack,
)

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
    progress: Progress = lambda part, done: None,
    text: CalibrationText | None = None,
    formats: Formats | None = None,
    codes: CalibratedCodes | None = None,
) -> Quantized:
    """Write `graph.onnx` and `weights.data` into a new folder.

    The text is for precisions whose codes are found on one, where no `codes` are given. `formats`
    are of weights that are stored as something else than the precision says.
    What a precision is not about, such as norms and biases, is copied as fp32: a type that a
    quantized graph stores is the one that was asked for. No tensor is ever whole in memory, unless
    it has to be turned.
    Raises: ExportError, CheckpointError, BuildError.
    """
    model = read_graph(graph)
    folder.mkdir(parents=True)
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        choices = choose(model, precision, formats or {})
        if codes is None and text is not None:
            codes = find_codes(model, checkpoint, precision, choices, text, progress)
        stored = _write_chosen(model, checkpoint, choices, store, codes)
        graft(model, stored)
        keep_rest(model, checkpoint, store)
    model.metadata_props.add(key=PRECISION, value=json.dumps(asdict(precision)))
    data = model.SerializeToString(deterministic=True)
    (folder / GRAPH).write_bytes(data)
    return Quantized(folder, precision, tuple(stored))


def keep(graph: Path, checkpoint: Checkpoint, folder: Path) -> Quantized:
    """Write `graph.onnx` and `weights.data` of a checkpoint that is quantized already.

    Its codes and scales stay as they are, bit for bit; floats are copied as fp32.
    Raises: ExportError, CheckpointError.
    """
    model = read_graph(graph)
    folder.mkdir(parents=True)
    with closing(DataFile(folder / WEIGHTS, WEIGHTS)) as file, closing(Store(file)) as store:
        coded = checkpoint.coded
        stored = [store.write_codes(one, coded[one.weight]) for one in _coded(model, coded)]
        graft(model, stored)
        _order_inputs(
            model, {p: coded[o.choice.weight].inputs for o in stored for p in o.choice.products}
        )
        keep_rest(model, checkpoint.folder, store)
    (folder / GRAPH).write_bytes(model.SerializeToString(deterministic=True))
    return Quantized(folder, Precision.of(STORED), tuple(stored))


def _coded(model: onnx.ModelProto, coded: Mapping[str, CodedWeight]) -> list[Choice]:
    """Return the weights that a checkpoint holds in codes.

    Raises: CheckpointError for one that is read in another way than matrices are.
    """
    readers, head = _readers(model.graph), _head(model.graph)
    choices = []
    for tensor in external_tensors(model):
        if location(tensor) != CODED:
            continue
        one = coded[tensor.name]
        uses = tuple(_uses(tensor.name, readers, head))
        looked_up = one.inputs is not None and not all(use.products for use in uses)
        plain = len(uses) == len(readers[tensor.name]) and not any(use.turned for use in uses)
        if looked_up or not plain:
            raise CheckpointError(
                f"{one.origin.file}: {one.origin.tensor} is stored as {one.origin.format}, and the "
                "model does more than multiply with it; take a checkpoint that stores it in floats"
            )
        choices.append(Choice(tensor.name, one.precision, one.block, uses, False))
    return choices


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

    Raises: CheckpointError, BuildError.
    """
    calibrated = [choice for choice in choices if precision.calibrated and _calibrates(choice)]
    return calibrate(model, checkpoint, calibrated, text, progress) if calibrated else None


def _write_chosen(
    model: onnx.ModelProto, checkpoint: Path, choices: Sequence[Choice], store: Store,
    codes: CalibratedCodes | None,
) -> list[Stored]:  # fmt: skip
    tensors = {tensor.name: tensor for tensor in external_tensors(model)}
    stored = []
    for choice in choices:
        found = codes.read(choice.name) if codes is not None and choice.name in codes else None
        stored.append(store.write(choice, StoredTensor(tensors[choice.weight], checkpoint), found))
    return stored


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


@dataclass(frozen=True)
class Use:
    """One place where a graph reads a weight."""

    node: str
    """Name of the node; nodes of a portable graph have one each."""
    input: int
    role: str
    """`layers`, `embedding` or `head`."""
    turned: bool
    """Whether the weight is [K, N] here, rather than [N, K] followed by a transposition."""
    products: tuple[str, ...] = ()
    """The nodes that multiply with it; none of a table that is looked up in."""


@dataclass(frozen=True)
class Choice:
    """A weight [N, K], what it is stored as, and who reads it in that form."""

    weight: str
    precision: str
    block: int
    """0 for fp32, fp16 and bf16."""
    uses: tuple[Use, ...]
    turned: bool
    positive: bool = False
    """Whether its scales must be positive."""
    zeros: bool = False
    """Whether its blocks have zeros."""

    @property
    def name(self) -> str:
        """Name of the tensor that is stored."""
        return f"{self.weight}.{self.precision}"

    def stored_bytes(self, shape: Sequence[int]) -> int:
        """Return what its codes and scales in fp16 take, or its floats."""
        items = prod(shape)
        beside = (2.5 if self.zeros else 2) * (items // self.block) if self.block else 0
        return items * BITS[self.precision] // 8 + int(beside)

    @property
    def products(self) -> tuple[str, ...]:
        """The nodes that multiply with it."""
        return tuple(product for use in self.uses for product in use.products)

    @property
    def group(self) -> str:
        """The part of the model it belongs to: `layer 3`, `embedding`, `head`."""
        number = re.search(r"\.(\d+)\.", self.weight)
        roles = sorted({use.role for use in self.uses})
        if roles == ["layers"] and number:
            return f"layer {number[1]}"
        return self.weight if roles == ["layers"] else " and ".join(roles)


Formats = Mapping[str, str]
"""Of weights, what each is stored as."""


def choose(
    model: onnx.ModelProto, precision: Precision, formats: Formats = MappingProxyType({})
) -> list[Choice]:
    """Return every weight that is stored as its precision says, in the graph's order.

    `formats` are of weights that are stored as something else.

    A weight whose inner size no block divides stays as it is. One that is read in two roles of
    different precisions is stored once for each.
    """
    readers = _readers(model.graph)
    head = _head(model.graph)
    choices = []
    for tensor in external_tensors(model):
        if len(tensor.dims) != 2:
            continue
        uses = list(_uses(tensor.name, readers, head))
        by_precision: dict[str, list[Use]] = defaultdict(list)
        for use in uses:
            name = formats.get(tensor.name) or getattr(precision, use.role)
            by_precision[name].append(use)
        for name, readers_of_one in by_precision.items():
            choice = _choice(tensor, name, precision, tuple(readers_of_one))
            if choice is not None:
                choices.append(choice)
    return choices


def _choice(
    tensor: onnx.TensorProto, name: str, precision: Precision, uses: tuple[Use, ...]
) -> Choice | None:
    turned = uses[0].turned
    if name == "fp32" or any(use.turned != turned for use in uses):
        return None
    if name in SCALED:
        inner = tensor.dims[0 if turned else 1]
        block = fitting_block(inner, precision.block_of(name, inner))
        positive = precision.positive
        zeros = name == "int4" and not precision.symmetric
        return Choice(tensor.name, name, block, uses, turned, positive, zeros) if block else None
    return Choice(tensor.name, name, 0, uses, turned)


Readers = dict[str, list[tuple[onnx.NodeProto, int]]]


def _readers(graph: onnx.GraphProto) -> Readers:
    readers: Readers = defaultdict(list)
    for node in graph.node:
        for index, name in enumerate(node.input):
            readers[name].append((node, index))
    return readers


def _uses(weight: str, readers: Readers, head: str) -> Iterator[Use]:
    """Yield where a weight, cast to fp32 or not, is multiplied with or looked up in.

    weight ─ (Cast) ─┬─ Transpose ── MatMul
                     ├─ Gemm, MatMul
                     └─ Gather, by input_ids
    """
    for node, index in readers[weight]:
        if node.op_type == "Cast":
            yield from _uses(node.output[0], readers, head)
        elif node.op_type == "Transpose":
            products = [
                product.name
                for product, place in readers[node.output[0]]
                if product.op_type in ("MatMul", "Gemm") and place == 1
            ]
            if products:
                role = "head" if head in products else "layers"
                yield Use(node.name, index, role, turned=False, products=tuple(products))
        elif node.op_type in ("MatMul", "Gemm") and index == 1:
            turned = not any(a.name == "transB" and a.i for a in node.attribute)
            role = "head" if node.name == head else "layers"
            yield Use(node.name, index, role, turned, products=(node.name,))
        elif node.op_type == "Gather" and index == 0 and _by_token(node, readers):
            yield Use(node.name, index, "embedding", turned=False)


def _by_token(gather: onnx.NodeProto, readers: Readers) -> bool:
    """Tell whether the indices of a Gather are the input tokens, whatever their shape."""
    names = ["input_ids"]
    while names:
        name = names.pop()
        if name == gather.input[1]:
            return True
        names += [
            node.output[0]
            for node, index in readers[name]
            if index == 0 and node.op_type in ("Cast", "Reshape", "Identity")
        ]
    return False


def _head(graph: onnx.GraphProto) -> str:
    """Return the name of the last projection: the product that the logits are made from."""
    maker = {output: node for node in graph.node for output in node.output}
    node = maker.get("logits")
    while node is not None and node.op_type not in ("MatMul", "Gemm"):
        node = next((maker[name] for name in node.input if name in maker), None)
    return node.name if node is not None else ""


SLICE = 1 << 22
"""Weights that one thread holds at a time, in three or four forms."""


MOST_THREADS = 8


_TYPES = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT4,
    # As the numbers of its table: ONNX Runtime reads no FLOAT4E2M1 on a CPU.
    "fp4": TensorProto.UINT4,
    "fp8": TensorProto.FLOAT8E4M3FN,
}

_UNSIGNED = {"int8": TensorProto.UINT8, "int4": TensorProto.UINT4}


@dataclass(frozen=True)
class Stored:
    """A weight that was written, and what it lost."""

    choice: Choice
    tensors: tuple[onnx.TensorProto, ...]
    """The weight; in codes also its scales, and then its zeros or minimums if it has any."""
    error: float
    """Squared error over squared weights."""


class Store:
    """Writes weights into a data file, with a thread for each core."""

    def __init__(self, file: DataFile) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0))))

    def close(self) -> None:
        """End the threads; nothing that was not begun is written any more."""
        self._pool.shutdown(cancel_futures=True)

    def keep(self, source: StoredTensor) -> onnx.TensorProto:
        """Copy a tensor as fp32, whatever its shape."""
        region = self._file.reserve(
            source.name, _TYPES["fp32"], source.shape, source.rows, 4 * source.row_items
        )
        self._by_slices(
            lambda begin, end: region.write(begin, source.read(begin, end)),
            source.rows,
            source.row_items,
        )
        return region.tensor

    def write(
        self, choice: Choice, source: StoredTensor, found: PackedCodes | None = None
    ) -> Stored:
        """Write a weight [N, K] as chosen; one that is stored [K, N] is turned first.

        `found` are its packed codes, scales and zeros where they are known.
        """
        shape, read = source.shape, source.read
        if choice.turned:
            whole = _turned(source)
            shape, read = whole.shape, lambda begin, end: whole[begin:end]
        regions = _reserve(self._file, choice, shape)

        def work(begin: int, end: int) -> tuple[float, float]:
            weights = read(begin, end)
            if found is None:
                arrays, restored = _form(choice, weights)
            else:
                arrays = [np.ascontiguousarray(array[begin:end]) for array in found]
                restored = Codes("int4", unpack(arrays[0]), *arrays[1:]).floats()
            for region, array in zip(regions, arrays, strict=True):
                region.write(begin, array)
            restored -= weights
            return _squares(restored), _squares(weights)

        sums = self._by_slices(work, *shape)
        lost, there = sum(part[0] for part in sums), sum(part[1] for part in sums)
        tensors = tuple(region.tensor for region in regions)
        return Stored(choice, tensors, lost / there if there else 0.0)

    def write_codes(self, choice: Choice, weight: CodedWeight) -> Stored:
        """Copy the codes, scales, zeros and minimums of a weight [N, K] as they are."""
        regions = _reserve_codes(self._file, choice, weight.shape, weight.codes(0, 1))

        def work(begin: int, end: int) -> None:
            for region, array in zip(regions, _arrays(weight.codes(begin, end)), strict=True):
                region.write(begin, array)

        self._by_slices(work, *weight.shape)
        return Stored(choice, tuple(region.tensor for region in regions), 0.0)

    def _by_slices(self, work: Callable[[int, int], Any], rows: int, items: int) -> list[Any]:
        """Do some work for all rows; as many slices are in memory as there are threads."""
        step = max(1, SLICE // max(items, 1))
        begins = range(0, rows, step)
        return list(self._pool.map(lambda b: work(b, min(b + step, rows)), begins))


def _turned(source: StoredTensor) -> Floats:
    """Return a tensor [K, N] as [N, K]."""
    rows, items = source.shape
    whole = np.empty((items, rows), np.float32)
    step = max(1, SLICE // items)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        whole[:, begin:end] = source.read(begin, end).T
    return whole


def _reserve(file: DataFile, choice: Choice, shape: tuple[int, ...]) -> list[Region]:
    """Take the places of a weight [N, K], and of its scales [N, K / block] if it has any."""
    rows, items = shape
    if choice.precision not in SCALED:
        return [file.reserve(choice.name, _TYPES[choice.precision], shape, rows, 2 * items)]
    zeros = np.empty(0, np.int8) if choice.zeros else None
    sample = Codes(choice.precision, np.empty(0, np.int8), np.empty(0, np.float32), zeros)
    return _reserve_codes(file, choice, shape, sample)


def _reserve_codes(
    file: DataFile, choice: Choice, shape: tuple[int, ...], sample: Codes
) -> list[Region]:
    """Take the places of a weight [N, K] in codes, and of what belongs to them."""
    rows, items = shape
    name, blocks = choice.name, items // choice.block
    is_unsigned = sample.codes.dtype == np.uint8
    types = _TYPES | _UNSIGNED if is_unsigned else _TYPES
    halved = choice.precision in ("int4", "fp4")

    def beside(suffix: str, kind: int, size: int, *inner: int) -> Region:
        return file.reserve(f"{name}.{suffix}", kind, (rows, blocks, *inner), rows, blocks * size)

    regions = [
        file.reserve(name, types[choice.precision], shape, rows, items // 2 if halved else items),
        # A factor of blocks [N, K / block, block] for fp4; see `_decoded`.
        beside("scale", TensorProto.FLOAT, 4, *([1] if choice.precision == "fp4" else [])),
    ]
    if sample.zeros is not None:
        regions.append(beside("zero", TensorProto.UINT8 if is_unsigned else TensorProto.INT8, 1))
    if sample.minimums is not None:
        regions.append(beside("minimum", TensorProto.FLOAT, 4, 1))
    return regions


def _arrays(rows: Codes) -> list[NDArray[Any]]:
    """Return what is written of some rows of codes, in the order of their places."""
    halved = rows.format in ("int4", "fp4")
    beside = (rows.scales, rows.zeros, rows.minimums)
    return [
        pack(rows.codes) if halved else rows.codes,
        *(array for array in beside if array is not None),
    ]


def _form(choice: Choice, weights: Floats) -> tuple[Sequence[NDArray[Any]], Floats]:
    """Return what is written of some rows, and the fp32 weights that it stands for."""
    if choice.precision in SCALED:
        rows = encode_codes(
            weights, choice.precision, choice.block, positive=choice.positive, zeros=choice.zeros
        )
        return _arrays(rows), rows.floats()
    bits = narrow(weights, choice.precision)
    restored = widen(bits, _TYPES[choice.precision])
    if not np.isfinite(restored).all():
        raise BuildError(
            f"{choice.weight} holds {np.abs(weights).max():.3g}, too large for "
            f"{choice.precision}; store it as bf16, int8 or fp32"
        )
    return (bits,), restored


def _squares(values: Floats) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))
