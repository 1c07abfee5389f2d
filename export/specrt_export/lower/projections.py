"""Projections: recognised in whatever form they were exported, kept in one, emitted at the end.

Between recognition and emission a projection is one node of our own:

    x, W [N, K] (, bias [N]) ─ specrt.Projection(N) ─ x · Wᵀ + bias
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import BuildError
from specrt_export.checkpoint.codes import FP4_VALUES, Codes, pack, unpack, unpack_unsigned
from specrt_export.lower.lazy_tensor import (
    LazyTensor,
    joined,
    reshaped,
    taken,
    transposed,
    unsigned,
)
from specrt_export.lower.view import GraphView
from specrt_export.portable.external_data import HALVES
from specrt_export.precision import SMALLEST_BLOCK

PROJECTION, SPECRT, MICROSOFT = "Projection", "specrt", "com.microsoft"


_FORMATS: dict[int, str] = {
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.UINT8: "int8",
    onnx.TensorProto.INT4: "int4",
    onnx.TensorProto.UINT4: "int4",
    onnx.TensorProto.FLOAT8E4M3FN: "fp8",
}


@dataclass(frozen=True)
class WeightMatrix:
    """A weight [N, K] of stored tensors; scales [N, K / block] where it is quantized.

    What codes stand for: see `Codes`.
    """

    values: LazyTensor
    scales: LazyTensor | None = None
    block: int = 0
    zeros: LazyTensor | None = None
    """[N, K / block] in 8 bits, with a sign where the codes have one."""
    minimums: LazyTensor | None = None
    """[N, K / block]."""
    is_table: bool = False
    """Whether codes of 4 bits are fp4."""

    @property
    def outputs(self) -> int:
        """N, the width of what it projects to."""
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        """K, the width of what it reads."""
        return self.values.shape[1]

    @property
    def bits(self) -> int:
        """Bits of a quantized weight; 32 for fp32."""
        return {"int4": 4, "": 32}.get(self.format, 8) if not self.is_table else 4

    @property
    def format(self) -> str:
        """What its codes are; empty for fp32."""
        return "fp4" if self.is_table else _FORMATS.get(self.values.onnx_type, "")

    @property
    def is_symmetric(self) -> bool:
        """Tell whether weights are scales times codes with a sign, or fp32."""
        kinds = (onnx.TensorProto.UINT8, onnx.TensorProto.UINT4)
        bare = self.zeros is None and self.minimums is None and not self.is_table
        return bare and self.values.onnx_type not in kinds

    @property
    def is_in_blocks(self) -> bool:
        """Tell whether MatMulNBits takes its codes: blocks of a power of two, from 16 on.

        Raises: BuildError for codes that no operator of ONNX Runtime takes.
        """
        if self.is_table or self.minimums is not None:
            what = "is fp4" if self.is_table else "has a minimum for each block"
            raise BuildError(
                f"{self.values.name} {what}, which ONNX Runtime's operators do not multiply with; "
                "put a C++17 compiler on PATH and install specrt again, so that its CPU kernels do"
            )
        block = self.block
        is_whole = self.format in ("int4", "int8")
        return is_whole and block >= SMALLEST_BLOCK and block & (block - 1) == 0

    def fits(self, other: WeightMatrix) -> bool:
        """Tell whether rows of both can form one matrix."""
        kinds = [
            (m.values.onnx_type, m.is_table, m.zeros is None, m.minimums is None, m.block, m.inputs)
            for m in (self, other)
        ]
        return kinds[0] == kinds[1]

    def taken(self, begin: int, end: int) -> WeightMatrix:
        """Return some of its rows: a part of what it projects to."""
        return of_matrices([self], lambda parts, suffix: taken(parts[0], begin, end))

    def floats(self) -> LazyTensor:
        """Return the fp32 weights [N, K] that it stands for."""
        scales = self.scales
        if scales is None:
            return self.values

        def rows(begin: int, end: int) -> NDArray[Any]:
            codes = self.values.rows(begin, end)
            if self.values.onnx_type in HALVES:
                is_signed = self.values.onnx_type == onnx.TensorProto.INT4
                codes = unpack(codes) if is_signed else unpack_unsigned(codes)
            zeros, minimums = (
                None if one is None else one.rows(begin, end) for one in (self.zeros, self.minimums)
            )
            return Codes(self.format, codes, scales.rows(begin, end), zeros, minimums).floats()

        kind, shape = onnx.TensorProto.FLOAT, self.values.shape
        return LazyTensor(f"{self.values.name}/float", kind, shape, rows)

    def add_to(self, view: GraphView) -> str:
        """Make it a value of a graph, and return the value's name.

        Codes that DequantizeLinear does not take as they lie are one of our own, until they are
        part of another operator.
        """
        values = view.add_stored(self.values)
        if self.scales is None:
            return values
        inputs = [values, view.add_stored(self.scales)]
        if self.is_symmetric:
            return view.add("DequantizeLinear", inputs, axis=1, block_size=self.block)
        inputs += [view.add_stored(p) if p else "" for p in (self.zeros, self.minimums)]
        return view.add(
            "DequantizeLinear", inputs, domain=SPECRT, block_size=self.block, table=self.is_table
        )


def of_matrices(
    matrices: Sequence[WeightMatrix], make: Callable[[Sequence[LazyTensor], str], LazyTensor]
) -> WeightMatrix:
    """Return a matrix of others that fit each other, each of its tensors made of theirs.

    `make` is also given what the tensor's name ends with.
    """
    first = matrices[0]

    def made(name: str, suffix: str) -> LazyTensor | None:
        parts = [getattr(one, name) for one in matrices]
        return make(parts, suffix) if parts[0] is not None else None

    values = make([one.values for one in matrices], "")
    return WeightMatrix(
        values, made("scales", ".scale"), first.block, made("zeros", ".zero"),
        made("minimums", ".minimum"), first.is_table,
    )  # fmt: skip


def join_matrices(parts: Sequence[WeightMatrix], name: str | None = None) -> WeightMatrix:
    """Return matrices that fit each other, one below the other."""
    return of_matrices(parts, lambda some, suffix: joined(some, name and f"{name}{suffix}"))


def find_codes(view: GraphView) -> None:
    """Give weights in codes the form that `find_matrix` reads; see `quantizer.graft`."""
    for node in view.nodes("DequantizeLinear", "Reshape"):
        matrix = _in_codes(view, node)
        if matrix is not None:
            view.replace(node.output[0], matrix.add_to(view))
    view.tidy()


def _in_codes(view: GraphView, node: onnx.NodeProto) -> WeightMatrix | None:
    """Return the matrix that a node makes of codes, unless DequantizeLinear alone makes it.

    ```
    codes, scales, (zeros ─ Cast) ─ DequantizeLinear
    codes, scales ─ DequantizeLinear ─ Reshape ─ Sub minimums ─ Reshape
    codes ─ Cast ─ Gather from 16 values ─ Reshape ─ Mul scales ─ Reshape
    ```
    """
    if node.op_type == "DequantizeLinear":
        plain = _scaled(view, node)
        if plain is None or len(node.input) == 2:
            is_unsigned = plain is not None and not plain.is_symmetric
            return plain if is_unsigned and not _is_reshaped(view, node) else None
        cast = view.maker(node.input[2], "Cast")
        zeros = view.stored(cast.input[0] if cast is not None else node.input[2])
        if zeros is None or plain.scales is None or zeros.shape != plain.scales.shape:
            return None
        return replace(plain, zeros=zeros)
    done = view.maker(node.input[0])
    cut = view.maker(done.input[0], "Reshape") if done and done.op_type in ("Sub", "Mul") else None
    beside = view.stored(done.input[1]) if done is not None and cut is not None else None
    if done is None or cut is None or beside is None or len(beside.shape) != 3:
        return None
    flat = reshaped(beside, f"{beside.name}/flat", beside.shape[:2])
    inner = view.maker(cut.input[0])
    if inner is None:
        return None
    if done.op_type == "Sub" and inner.op_type == "DequantizeLinear" and len(inner.input) == 2:
        plain = _scaled(view, inner)
        whole = plain is not None and plain.scales is not None and plain.scales.shape == flat.shape
        return replace(plain, minimums=flat) if plain is not None and whole else None
    if done.op_type != "Mul" or inner.op_type != "Gather":
        return None
    table, index = view.constant(inner.input[0]), view.maker(inner.input[1], "Cast")
    codes = view.stored(index.input[0]) if index is not None else None
    if codes is None or table is None or not np.array_equal(table, FP4_VALUES):
        return None
    return WeightMatrix(codes, flat, codes.shape[1] // flat.shape[1], is_table=True)


def _is_reshaped(view: GraphView, node: onnx.NodeProto) -> bool:
    return view.only_reader(node.output[0], "Reshape") is not None


def _scaled(view: GraphView, node: onnx.NodeProto) -> WeightMatrix | None:
    """Return the codes and scales of a standard DequantizeLinear [N, K] in blocks."""
    codes, scales = view.stored(node.input[0]), view.stored(node.input[1])
    attributes = view.attributes(node)
    block = attributes.get("block_size", 0)
    if codes is None or scales is None or attributes.get("axis", 1) not in (1, -1) or not block:
        return None
    if codes.onnx_type not in _FORMATS or len(codes.shape) != 2:
        return None
    whole = scales.shape == (codes.shape[0], codes.shape[1] // block)
    return WeightMatrix(codes, scales, block) if whole and codes.shape[1] % block == 0 else None


def find_matrix(view: GraphView, name: str) -> WeightMatrix | None:
    """Return the matrix that a value is.

    ```
    w [N, K]                                                          fp32
    codes [N, K], scales [N, K / block] ─ DequantizeLinear            int8, int4
    either ─ Transpose                                                [K, N] the other way round
    ```
    """
    stored = view.stored(name)
    if stored is not None:
        dense = stored.onnx_type == onnx.TensorProto.FLOAT and len(stored.shape) == 2
        return WeightMatrix(stored) if dense else None
    node = view.maker(name, "DequantizeLinear")
    if node is None:
        return None
    if node.domain != SPECRT:
        return _scaled(view, node) if len(node.input) == 2 else None
    codes, scales, zeros, minimums = (view.stored(one) for one in node.input)
    assert codes is not None
    attributes = view.attributes(node)
    block, is_table = attributes["block_size"], bool(attributes["table"])
    return WeightMatrix(codes, scales, block, zeros, minimums, is_table)


def find_factor(view: GraphView, name: str) -> WeightMatrix | None:
    """Return the matrix [N, K] whose transpose [K, N] a value is."""
    transpose = view.maker(name, "Transpose")
    if transpose is not None and view.attributes(transpose).get("perm", [1, 0]) == [1, 0]:
        return find_matrix(view, transpose.input[0])
    stored = view.stored(name)
    if stored is None or stored.onnx_type != onnx.TensorProto.FLOAT or len(stored.shape) != 2:
        return None
    return WeightMatrix(transposed(stored))


def blocks(matrix: WeightMatrix) -> LazyTensor:
    """Return the codes as MatMulNBits reads them: bytes [N, K / block, block · bits / 8]."""
    bytes_ = unsigned(matrix.values)
    shape = (matrix.outputs, matrix.inputs // matrix.block, matrix.block * matrix.bits // 8)
    return reshaped(bytes_, f"{matrix.values.name}/blocks", shape)


def zero_points(view: GraphView, matrix: WeightMatrix) -> list[str]:
    """Return the zeros as MatMulNBits reads them, none where they are in the middle.

    Of 4 bits two to a byte, [N, (blocks + 1) / 2], the first in the low half.
    """
    if matrix.is_symmetric:
        return []
    zeros, count = matrix.zeros, matrix.inputs // matrix.block
    is_signed = matrix.values.onnx_type in (onnx.TensorProto.INT8, onnx.TensorProto.INT4)
    raised = np.uint8((8 if matrix.bits == 4 else 128) if is_signed else 0)

    def rows(begin: int, end: int) -> NDArray[Any]:
        part = np.zeros((end - begin, count), np.uint8)
        if zeros is not None:
            part = zeros.rows(begin, end).view(np.uint8) + raised
        return pack(np.pad(part, [(0, 0), (0, count % 2)])) if matrix.bits == 4 else part

    width = (count + 1) // 2 if matrix.bits == 4 else count
    name, shape = f"{matrix.values.name}/zeros", (matrix.outputs, width)
    return [view.add_stored(LazyTensor(name, onnx.TensorProto.UINT8, shape, rows))]


@dataclass(frozen=True)
class Projection:
    """A projection node, taken apart."""

    node: onnx.NodeProto
    x: str
    matrix: WeightMatrix
    bias: LazyTensor | None

    @property
    def output(self) -> str:
        """Name of what it makes."""
        return str(self.node.output[0])


def find_projections(view: GraphView) -> tuple[int, int]:
    """Replace products with weights by projections; return how many, and of how many.

    ```
    W ─ Transpose ─┐
    x ─────────── MatMul ─ y                =>   x, W ─ Projection ─ y
    x ─────────── MatMul ─ Add bias ─ y     =>   x, W, bias ─ Projection ─ y
    x, W, bias ── Gemm ─ y                  =>   x, W, bias ─ Projection ─ y
    ```
    """
    products = [node for node in view.nodes("MatMul", "Gemm") if _has_weight(view, node)]
    replaced = 0
    for node in products:
        matrix = _factor(view, node)
        if matrix is None:
            continue
        bias = view.stored(node.input[2]) if len(node.input) > 2 else None
        add_projection(view, node.input[0], matrix, bias, node.output[0])
        replaced += 1
    view.tidy()
    for node in view.nodes(PROJECTION):
        _take_bias(view, node)
    view.tidy()
    return replaced, len(products)


def add_projection(
    view: GraphView,
    x: str,
    matrix: WeightMatrix,
    bias: LazyTensor | None,
    output: str | None = None,
) -> str:
    """Add a projection and return its output."""
    inputs = [x, matrix.add_to(view), *([view.add_stored(bias)] if bias else [])]
    outputs = [output] if output is not None else None
    return view.add(PROJECTION, inputs, outputs=outputs, domain=SPECRT, N=matrix.outputs)


def find_projection(view: GraphView, output: str) -> Projection | None:
    """Return the projection that makes a value."""
    node = view.maker(output, PROJECTION)
    return read_projection(view, node) if node is not None else None


def read_projection(view: GraphView, node: onnx.NodeProto) -> Projection:
    """Take a projection node apart."""
    matrix = find_matrix(view, node.input[1])
    assert matrix is not None, "a projection was made of a matrix"
    bias = view.stored(node.input[2]) if len(node.input) > 2 else None
    return Projection(node, node.input[0], matrix, bias)


def emit_projections(view: GraphView, accuracy_level: int) -> tuple[int, int]:
    """Replace projections by what ONNX Runtime runs; return how many in codes, and of how many.

    ```
    fp32          x, W ─ FusedMatMul(transB) ─ (Add bias) ─ y
    int8, int4    x, codes, scales (, bias) ─ MatMulNBits ─ y
    ```
    The weight stays [N, K], as checkpoints and embeddings have it, so that a tied embedding is
    stored once; packed at load, it is as fast as [K, N].
    """
    quantized = emitted = 0
    for node in view.nodes(PROJECTION):
        projection = read_projection(view, node)
        quantized += projection.matrix.scales is not None
        if projection.matrix.is_in_blocks:
            _emit_codes(view, projection, accuracy_level)
            emitted += 1
        else:
            _emit_dense(view, projection)
    view.tidy()
    return emitted, quantized


def _has_weight(view: GraphView, node: onnx.NodeProto) -> bool:
    return not view.depends_on(node.input[1], [i.name for i in view.graph.input])


def _factor(view: GraphView, node: onnx.NodeProto) -> WeightMatrix | None:
    if node.op_type == "MatMul":
        return find_factor(view, node.input[1])
    attributes = view.attributes(node)
    plain = attributes.get("alpha", 1.0) == attributes.get(
        "beta", 1.0
    ) == 1.0 and not attributes.get("transA")
    if not plain or (len(node.input) > 2 and not _is_bias(view, node.input[2])):
        return None
    find = find_matrix if attributes.get("transB") else find_factor
    return find(view, node.input[1])


def _is_bias(view: GraphView, name: str) -> bool:
    stored = view.stored(name)
    return (
        stored is not None and len(stored.shape) == 1 and stored.onnx_type == onnx.TensorProto.FLOAT
    )


def _take_bias(view: GraphView, node: onnx.NodeProto) -> None:
    add = view.only_reader(node.output[0], "Add")
    if add is None or len(node.input) > 2:
        return
    projection = read_projection(view, node)
    for name in add.input:
        bias = view.stored(name)
        if bias is not None and bias.shape == (projection.matrix.outputs,):
            add_projection(view, projection.x, projection.matrix, bias, add.output[0])


def _emit_dense(view: GraphView, projection: Projection) -> None:
    view.require_domain(MICROSOFT, 1)
    inputs = [projection.x, projection.matrix.add_to(view)]
    if projection.bias is None:
        view.add("FusedMatMul", inputs, [projection.output], MICROSOFT, transB=1)
        return
    product = view.add("FusedMatMul", inputs, domain=MICROSOFT, transB=1)
    view.add("Add", [product, view.add_stored(projection.bias)], outputs=[projection.output])


def _emit_codes(view: GraphView, projection: Projection, accuracy_level: int) -> None:
    view.require_domain(MICROSOFT, 1)
    matrix = projection.matrix
    assert matrix.scales is not None
    codes = view.add_stored(blocks(matrix))
    zeros = zero_points(view, matrix)
    bias = ["", view.add_stored(projection.bias)] if projection.bias else []
    view.add(
        "MatMulNBits",
        [projection.x, codes, view.add_stored(matrix.scales), *(zeros or [""] * bool(bias)), *bias],
        outputs=[projection.output],
        domain=MICROSOFT,
        K=matrix.inputs,
        N=matrix.outputs,
        bits=matrix.bits,
        block_size=matrix.block,
        accuracy_level=accuracy_level,
    )


def join_projections(view: GraphView, parts: Sequence[Projection]) -> str | None:
    """Return a value that holds the outputs of projections side by side, or None.

    ```
    x ─┬─ Projection W ─ a
       └─ Projection V ─ b      =>      x ─ Projection [W; V] ─ a and b, along the last axis
    ```
    They must read one value, have all a bias or none, and weights of one precision and block.
    """
    first = parts[0]
    if any(p.x != first.x or not p.matrix.fits(first.matrix) for p in parts):
        return None
    biases = [p.bias for p in parts if p.bias is not None]
    if len(biases) not in (0, len(parts)):
        return None
    matrix = join_matrices([p.matrix for p in parts])
    return add_projection(view, first.x, matrix, joined(biases) if biases else None)


def join_siblings(view: GraphView) -> None:
    """Join all projections that read one value, and split what they make; not those that activate.

    ```
    x ─┬─ Projection gate ─ a
       └─ Projection up ── b    =>      x ─ Projection [gate; up] ─ Split ─ a, b
    ```
    """
    siblings: dict[str, list[Projection]] = defaultdict(list)
    for node in view.nodes(PROJECTION):
        if "activation" not in view.attributes(node):
            siblings[node.input[0]].append(read_projection(view, node))
    for group in siblings.values():
        output = join_projections(view, group) if len(group) > 1 else None
        if output is not None:
            sizes = np.array([p.matrix.outputs for p in group], np.int64)
            inputs = [output, view.add_constant("sizes", sizes)]
            view.add("Split", inputs, outputs=[p.output for p in group], axis=-1)
    view.tidy()


class Gate(NamedTuple):
    """A gated feed-forward layer: activation(gate) · up."""

    gate: str
    up: str
    activation: str
    """As the kernels call it; empty for one that they lack."""
    product: str


def gated(view: GraphView) -> list[Gate]:
    """Return every gated feed-forward layer.

    ```
    gate ─ activation ─┐
    up ────────────── Mul
    ```
    """
    found = []
    for product in view.nodes("Mul"):
        for act, up in (product.input, reversed(product.input)):
            gate = _activated(view, act)
            if gate and gate != up and all(view.maker(name, PROJECTION) for name in (gate, up)):
                lone = all(len(view.readers(name)) == 1 for name in (act, up))
                name = _activation(view, act, gate) if lone else ""
                found.append(Gate(gate, str(up), name, product.output[0]))
                break
    return found


def _activation(view: GraphView, name: str, gate: str) -> str:
    """Return what the kernels call the function that makes a value of a gate."""
    node = view.maker(name)
    assert node is not None
    by_tanh = node.op_type == "Gelu" and view.attributes(node).get("approximate") == b"tanh"
    if by_tanh or _written_gelu(view, name) == gate:
        return "gelu"
    inner = [view.maker(i, "Sigmoid") for i in node.input if i != gate]
    silu = node.op_type == "Mul" and inner and inner[0] and inner[0].input[0] == gate
    return "silu" if silu else ""


def _activated(view: GraphView, name: str) -> str | None:
    """Return x if a value is some function of x alone, such as `x · sigmoid(x)`."""
    node = view.maker(name)
    if node is None:
        return None
    if node.op_type in ("Gelu", "Relu", "Sigmoid", "Tanh"):
        return str(node.input[0])
    if node.op_type == "Mul":
        for x, inner in (node.input, reversed(node.input)):
            if _activated(view, inner) == x:
                return str(x)
    return _written_gelu(view, name)


def _written_gelu(view: GraphView, name: str) -> str | None:
    """Return x if a value is the GELU by tanh of it, written out as T5 and GPT-2 do.

    ```
    x ─┬─ Pow 3 ─ Mul 0.044715 ─ Add x ─ Mul sqrt(2 / pi) ─ Tanh ─ Add 1 ─┐
       └─ Mul 0.5 ────────────────────────────────────────────────────── Mul ─ value
    ```
    """
    product = view.maker(name, "Mul")
    for half, grown in (product.input, reversed(product.input)) if product is not None else ():
        x = _scaled_by(view, half, "Mul", 0.5)
        turned = _scaled_by(view, grown, "Add", 1.0)
        tanh = view.maker(turned, "Tanh") if turned else None
        total = tanh and _scaled_by(view, tanh.input[0], "Mul", (2 / np.pi) ** 0.5)
        add = view.maker(total, "Add") if total else None
        for one, other in (add.input, reversed(add.input)) if add is not None else ():
            cube = _scaled_by(view, other, "Mul", 0.044715)
            if one == x and cube and _scaled_by(view, cube, "Pow", 3.0) == x:
                return x
    return None


def _scaled_by(view: GraphView, name: str, op_type: str, number: float) -> str | None:
    """Return the other operand if a value is made by an operation with a known number."""
    node = view.maker(name, op_type)
    if node is None:
        return None
    for one, other in (node.input, reversed(node.input)):
        scalar = view.scalar(other)
        if scalar is not None and np.isclose(scalar, number, rtol=1e-6):
            return str(one)
        if op_type == "Pow":  # which does not commute
            return None
    return None


def emit_embeddings(view: GraphView) -> tuple[int, int]:
    """Gather from codes; return how many tables, and of how many quantized ones.

    ```
    codes, scales ─ DequantizeLinear ─┐
    tokens ──────────────────────── Gather ─ y
      =>  codes, tokens, scales ─ GatherBlockQuantized ─ y
    ```
    The codes are the bytes that MatMulNBits reads, so a tied table is stored once.
    """
    total = emitted = 0
    for node in view.nodes("Gather"):
        matrix = find_matrix(view, node.input[0])
        if matrix is None or matrix.scales is None or view.attributes(node).get("axis", 0) != 0:
            continue
        total += 1
        if not matrix.is_in_blocks:
            continue
        codes = view.add_stored(unsigned(matrix.values))
        view.require_domain(MICROSOFT, 1)
        view.add(
            "GatherBlockQuantized",
            [codes, node.input[1], view.add_stored(matrix.scales), *zero_points(view, matrix)],
            outputs=[node.output[0]],
            domain=MICROSOFT,
            bits=matrix.bits,
            block_size=matrix.block,
            gather_axis=0,
            quantize_axis=1,
        )
        emitted += 1
    view.tidy()
    return emitted, total
