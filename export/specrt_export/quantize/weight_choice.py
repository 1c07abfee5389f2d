"""Which weights are stored in which precision: chosen by who reads them in a portable graph."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import onnx

from specrt.errors import CheckpointError
from specrt_export.checkpoint.codes import CodedWeight
from specrt_export.portable.experts_function import EXPERTS
from specrt_export.portable.external_data import external_tensors, location
from specrt_export.portable.graph import CODED, SOURCE_IDS
from specrt_export.precision import BITS, SCALED, Precision, fitting_block


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
        """The part of the model: `layer 3`, `encoder layer 3`, `embedding`, `head`."""
        number = re.search(r"\.(\d+)\.", self.weight)
        roles = sorted({use.role for use in self.uses})
        if roles == ["layers"] and number:
            encodes = "encoder" in self.weight.split(".")
            return f"{'encoder ' * encodes}layer {number[1]}"
        return self.weight if roles == ["layers"] else " and ".join(roles)


Formats = Mapping[str, str]
"""Of weights, what each is stored as."""


def choose(
    model: onnx.ModelProto, precision: Precision, formats: Formats = MappingProxyType({})
) -> list[Choice]:
    """Return every weight that is stored as its precision says, in the graph's order.

    `formats` are of weights that are stored as something else.

    A weight whose inner size no block divides stays as it is, and so does one that chooses
    experts: it is small, and decides more than a rounding. One that is read in two roles of
    different precisions is stored once for each.
    """
    readers = _readers(model.graph)
    head, routers = _head(model.graph), _routers(model.graph)
    choices = []
    for tensor in external_tensors(model):
        if len(tensor.dims) != 2:
            continue
        uses = [
            use for use in _uses(tensor.name, readers, head) if routers.isdisjoint(use.products)
        ]
        by_precision: dict[str, list[Use]] = defaultdict(list)
        for use in uses:
            name = formats.get(tensor.name) or getattr(precision, use.role)
            by_precision[name].append(use)
        for name, readers_of_one in by_precision.items():
            choice = _choice(tensor, name, precision, tuple(readers_of_one))
            if choice is not None:
                choices.append(choice)
    return choices


def choose_coded(model: onnx.ModelProto, coded: Mapping[str, CodedWeight]) -> list[Choice]:
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
     ├─ (Concat) ─ the weights of experts
                     └─ Gather, by input_ids or by the ids of the best clusters
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
        elif any(map(_of_experts, [(node, index), *readers[node.output[0]]])):
            yield Use(node.name, index, "layers", turned=False)


def _of_experts(reader: tuple[onnx.NodeProto, int]) -> bool:
    node, index = reader
    return node.op_type in EXPERTS.values() and index > 2


_OF_TOKENS = {("Cast", 0), ("Reshape", 0), ("Identity", 0), ("Gather", 1)}
"""What makes ids of ids, and by which of its inputs."""


def _by_token(gather: onnx.NodeProto, readers: Readers) -> bool:
    """Tell whether the indices of a Gather are tokens, fed or chosen, whatever their shape."""
    chosen = [node for nodes in readers.values() for node, _ in nodes if node.op_type == "TopK"]
    names = ["input_ids", SOURCE_IDS, *(node.output[1] for node in chosen)]
    while names:
        name = names.pop()
        if name == gather.input[1]:
            return True
        names += [
            node.output[0] for node, index in readers[name] if (node.op_type, index) in _OF_TOKENS
        ]
    return False


def _head(graph: onnx.GraphProto) -> str:
    """Return the name of the last projection: the product that the logits are made from."""
    maker = {output: node for node in graph.node for output in node.output}
    node = maker.get("logits")
    while node is not None and node.op_type not in ("MatMul", "Gemm"):
        node = next((maker[name] for name in node.input if name in maker), None)
    return node.name if node is not None else ""


def _routers(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the products by which tokens choose experts."""
    maker = {output: node for node in graph.node for output in node.output}
    names = [node.input[1] for node in graph.node if node.op_type in EXPERTS.values()]
    found, seen = set[str](), set[str]()
    while names:
        node = maker.get(names.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        if node.op_type in ("MatMul", "Gemm"):
            found.add(node.name)
        else:
            names.extend(node.input)
    return found
