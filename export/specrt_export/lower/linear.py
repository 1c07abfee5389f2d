"""Projections: recognised in whatever form they were exported, kept in one, emitted at the end.

Between recognition and emission a projection is one node of our own:

    x, W [N, K] (, bias [N]) ─ specrt.Projection(N) ─ x · Wᵀ + bias
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from specrt_export.lower.matrix import Matrix, blocks, find_factor, find_matrix
from specrt_export.lower.stored import Stored
from specrt_export.lower.view import GraphView

PROJECTION, SPECRT, MICROSOFT = "Projection", "specrt", "com.microsoft"


@dataclass(frozen=True)
class Projection:
    """A projection node, taken apart."""

    node: onnx.NodeProto
    x: str
    matrix: Matrix
    bias: Stored | None

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
    found = 0
    for node in products:
        matrix = _factor(view, node)
        if matrix is None:
            continue
        bias = view.stored(node.input[2]) if len(node.input) > 2 else None
        add_projection(view, node.input[0], matrix, bias, node.output[0])
        found += 1
    view.tidy()
    for node in view.nodes(PROJECTION):
        _take_bias(view, node)
    view.tidy()
    return found, len(products)


def add_projection(
    view: GraphView, x: str, matrix: Matrix, bias: Stored | None, output: str | None = None
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


def _factor(view: GraphView, node: onnx.NodeProto) -> Matrix | None:
    if node.op_type == "MatMul":
        return find_factor(view, node.input[1])
    said = view.attributes(node)
    plain = said.get("alpha", 1.0) == said.get("beta", 1.0) == 1.0 and not said.get("transA")
    if not plain or (len(node.input) > 2 and not _is_bias(view, node.input[2])):
        return None
    find = find_matrix if said.get("transB") else find_factor
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
    bias = ["", "", view.add_stored(projection.bias)] if projection.bias else []
    view.add(
        "MatMulNBits",
        [projection.x, codes, view.add_stored(matrix.scales), *bias],
        outputs=[projection.output],
        domain=MICROSOFT,
        K=matrix.inputs,
        N=matrix.outputs,
        bits=matrix.bits,
        block_size=matrix.block,
        accuracy_level=accuracy_level,
    )
