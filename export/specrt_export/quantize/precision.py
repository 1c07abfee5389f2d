"""What the weights of one model are stored as, and which weights that is about."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from specrt_export.portable.graph import external_tensors

STORAGE = ("fp32", "fp16", "bf16")

SCALED = ("int8", "int4", "fp8")
"""Those whose weights share scales."""

PRECISIONS = (*STORAGE, *SCALED)

BLOCKS = (32, 64, 128)
"""Weights along the inner axis that share a scale: what a recipe may ask for."""

SMALLEST_BLOCK = 16
"""Of a weight that no asked block divides; TensorRT and MatMulNBits take no smaller ones."""

PER_ROW = ("int8", "fp8")
"""What TensorRT multiplies fast with one scale for each row only."""

_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "fp8": 8}

_SCALE_BITS = 32


@dataclass(frozen=True)
class Precision:
    """One model's weights: the layers', the embedding table's and the last projection's.

    With int4 layers, embedding and head are int8 unless told otherwise. KL divergence of codelet's
    target in nats: int4 throughout 0.032, int8 ends 0.022, fp32 ends 0.022. A head of 16384 x 1024
    takes 12 % longer in int8 for 5 tokens on one core, about 4 % of the pass of its 222 M model.
    """

    layers: str = "fp32"
    embedding: str = "fp32"
    head: str = "fp32"
    block: int = 0
    """Weights that share a scale; 0 where none do."""
    per_row: bool = False
    """Whether weights of 8 bits share one scale for each row, whatever `block` says."""

    @classmethod
    def of(
        cls, layers: str, embedding: str = "", head: str = "", block: int = 0,
        *, per_row: bool = False,
    ) -> Precision:  # fmt: skip
        """Fill in what was left out; with `per_row` blocks are those of int4 alone."""
        ends = "int8" if layers == "int4" else layers
        made = (layers, embedding or ends, head or ends)
        shared = {name for name in made if name in SCALED}
        if per_row:
            blocked = "int4" in shared
            return cls(
                *made, block=(block or BLOCKS[-1]) if blocked else 0,
                per_row=bool(shared & set(PER_ROW)),
            )  # fmt: skip
        return cls(*made, block=(block or BLOCKS[0]) if shared else 0)

    def block_of(self, name: str, inner: int) -> int:
        """Return how many weights of a row of `inner` share a scale in one of the precisions."""
        return inner if self.per_row and name in PER_ROW else self.block

    @property
    def names(self) -> tuple[str, str, str]:
        """The three precisions."""
        return self.layers, self.embedding, self.head

    @property
    def rewrites(self) -> bool:
        """Whether any weight is stored otherwise than as fp32."""
        return set(self.names) != {"fp32"}

    @property
    def quantizes(self) -> bool:
        """Whether any weights share scales."""
        return bool(set(self.names) & set(SCALED))

    def disk_bytes(self, end: bool) -> float:
        """Return the bytes that a weight takes on disk while an engine is built.

        Codes and their scales lie in the quantized graph's folder and in the engine; what
        is stored as fp16 or bf16 is also fp32 in between. `end` is for a table of vocabulary size,
        which may be stored twice.
        """
        if not self.rewrites:
            return 4
        bits = 0.0
        for name in {self.embedding, self.head} if end else {self.layers}:
            if name in SCALED:
                bits += 2 * (_BITS[name] + _SCALE_BITS / (self.block or BLOCKS[0]))
            else:
                bits += 2 * _BITS[name] + _BITS["fp32"]
        return bits / 8


_BLOCKS = (*reversed(BLOCKS), SMALLEST_BLOCK)


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


@dataclass(frozen=True)
class Choice:
    """A weight [N, K], what it is stored as, and who reads it in that form."""

    weight: str
    precision: str
    block: int
    """0 for fp32, fp16 and bf16."""
    uses: tuple[Use, ...]
    turned: bool

    @property
    def name(self) -> str:
        """Name of the tensor that is stored."""
        return f"{self.weight}.{self.precision}"

    @property
    def group(self) -> str:
        """The part of the model it belongs to: `layer 3`, `embedding`, `head`."""
        number = re.search(r"\.(\d+)\.", self.weight)
        roles = sorted({use.role for use in self.uses})
        if roles == ["layers"] and number:
            return f"layer {number[1]}"
        return self.weight if roles == ["layers"] else " and ".join(roles)


def choose(model: onnx.ModelProto, precision: Precision) -> list[Choice]:
    """Return every weight that is stored as its precision says, in the graph's order.

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
            by_precision[getattr(precision, use.role)].append(use)
        for name, found in by_precision.items():
            choice = _choice(tensor, name, precision, tuple(found))
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
        return Choice(tensor.name, name, block, uses, turned) if block else None
    return Choice(tensor.name, name, 0, uses, turned)


def fitting_block(inner: int, asked: int) -> int:
    """Return the largest block up to the asked one that divides an inner size; 0 if none does.

    A whole row is one that fits.
    """
    if asked == inner:
        return inner
    return next((b for b in _BLOCKS if b <= asked and inner % b == 0), 0)


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
                yield Use(node.name, index, role, turned=False)
        elif node.op_type in ("MatMul", "Gemm") and index == 1:
            turned = not any(a.name == "transB" and a.i for a in node.attribute)
            yield Use(node.name, index, "head" if node.name == head else "layers", turned)
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
