"""Rules about quantized weights: what DequantizeLinear may look like, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from specrt_export.lint.facts import Facts, type_name
from specrt_export.lint.finding import Fault, NodeFault, Rule, Severity, each

SIGNED = (
    onnx.TensorProto.INT8,
    onnx.TensorProto.INT4,
    onnx.TensorProto.FLOAT8E4M3FN,
    onnx.TensorProto.FLOAT4E2M1,
)
BYTES = (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN)
QUANTIZERS = ("DequantizeLinear", "QuantizeLinear")
PRODUCTS = ("MatMul", "Gemm")


def _codes(facts: Facts, node: onnx.NodeProto) -> str | None:
    kind = facts.type(node.input[0])
    if kind is None or kind in SIGNED:
        return None
    return f"it dequantises {type_name(kind)}"


def _zero_point(facts: Facts, node: onnx.NodeProto) -> str | None:
    values = facts.constant(node.input[2]) if len(node.input) > 2 else None
    if values is None or values.dtype.kind == "O" or not values.astype(float).any():
        return None
    return "its zero points are not all 0"


def _product(facts: Facts, node: onnx.NodeProto) -> bool:
    """Tell whether a product reads what a node makes, directly or transposed."""
    readers = list(facts.readers(node.output[0]))
    for turned in [r for r in readers if r.op_type == "Transpose" and r.output]:
        readers += facts.readers(turned.output[0])
    return any(r.op_type in PRODUCTS for r in readers)


def _block(facts: Facts, node: onnx.NodeProto) -> int:
    return facts.integer(node, "block_size")


def _blocks(facts: Facts, node: onnx.NodeProto) -> str | None:
    kind = facts.type(node.input[0])
    if kind not in BYTES or not _block(facts, node) or not _product(facts, node):
        return None
    return (
        f"{type_name(kind)} in blocks of {_block(facts, node)} is not dequantised inside the "
        "product: every pass writes the whole weight as 16-bit floats"
    )


def _rows(facts: Facts, node: onnx.NodeProto) -> str | None:
    kind = facts.type(node.input[0])
    if kind != onnx.TensorProto.INT4 or _block(facts, node) or not _product(facts, node):
        return None
    return (
        "int4 without blocks is not dequantised inside the product: every wide pass writes the "
        "whole weight as 16-bit floats"
    )


def _constants(facts: Facts) -> Iterator[Fault]:
    for name, tensor in facts.tensors.items():
        if tensor.data_type not in SIGNED:
            continue
        others = [r for r in facts.readers(name) if r.op_type not in QUANTIZERS]
        if others:
            yield (
                name,
                f"a constant of {type_name(tensor.data_type)} goes to {others[0].op_type}, and may "
                "go to DequantizeLinear only",
            )


def _rule(name: str, severity: Severity, fault: NodeFault, remedy: str) -> Rule:
    return Rule(f"quantized-{name}", severity, each("DequantizeLinear", fault=fault), remedy)


RULES = (
    _rule(
        "type", "refused", _codes, "quantize to signed, symmetric codes: int8, int4 or fp8 (e4m3)"
    ),
    _rule("zero-point", "refused", _zero_point, "quantize symmetrically, with zero points of 0"),
    _rule("blocks", "slow", _blocks, "give each output row one scale, or use int4 in blocks"),
    _rule("rows", "slow", _rows, "use blocks, of 128 for instance"),
    Rule(
        "quantized-constant",
        "refused",
        _constants,
        "put DequantizeLinear right after the constant, and Gather, Transpose or Reshape after it",
    ),
)
