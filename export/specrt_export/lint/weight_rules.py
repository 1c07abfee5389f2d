"""Rules about weights: their layout, their bytes, their quantization and their types."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
import onnx
from onnx import external_data_helper

from specrt_export.lint.rules import (
    TESTED,
    Facts,
    Fault,
    NodeFault,
    Rule,
    Severity,
    each,
    label,
    type_name,
)

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

LARGE_ELEMENTS = 1 << 14
"""Weights from which on storing them twice is worth a word."""


def _layout(facts: Facts, node: onnx.NodeProto) -> str | None:
    if len(node.input) < 2 or (node.op_type == "Gemm" and facts.integer(node, "transB")):
        return None
    name = facts.through(node.input[1], "Cast", "Identity")
    tensor = facts.tensors.get(name)
    if tensor is None or tensor.data_type not in FLOATS or len(tensor.dims) != 2:
        return None
    if math.prod(tensor.dims) < LARGE_ELEMENTS or 1 in tensor.dims:
        return None
    return f"its weight {name} lies as [K, N], and a plan with a profile of width 1 stores it twice"


def _external(facts: Facts) -> Iterator[onnx.TensorProto]:
    for tensor in facts.tensors.values():
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def _place(tensor: onnx.TensorProto) -> str:
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def _outside(facts: Facts) -> Iterator[Fault]:
    for tensor in _external(facts):
        if not _place(tensor) and facts.folder is None:
            continue  # its bytes are still to be written, or handed over
        place = PurePosixPath(_place(tensor).replace("\\", "/"))
        if not place.name or place.is_absolute() or ".." in place.parts:
            yield tensor.name, f"its bytes lie in {str(place)!r}, which is not below the graph"


def _missing(facts: Facts) -> Iterator[Fault]:
    if facts.folder is None:
        return
    absent: dict[str, list[str]] = defaultdict(list)
    outside = {name for name, _ in _outside(facts)}
    for tensor in _external(facts):
        place = _place(tensor)
        if tensor.name not in outside and _size(facts.folder / place) is None:
            absent[place].append(tensor.name)
    for place, names in absent.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{more}", f"{place!r} is not next to the graph"


def _size(path: Path) -> int | None:
    """Return the bytes of a file; None where there is none of that name."""
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):
        return None


def _span(tensor: onnx.TensorProto) -> tuple[int, int | None] | None:
    """Return where a weight begins and how long it says it is; None when that is not a number."""
    try:
        info = external_data_helper.ExternalDataInfo(tensor)
        return int(info.offset or 0), int(info.length) if info.length is not None else None
    except (ValueError, TypeError):
        return None


def _short(facts: Facts) -> Iterator[Fault]:
    outside = {name for name, _ in _outside(facts)}
    for tensor in _external(facts):
        span, bits = _span(tensor), _bits(tensor.data_type)
        if tensor.name in outside or bits is None:
            continue
        wanted = -(-math.prod(tensor.dims) * bits // 8)
        offset, stated = span or (-1, None)
        there = wanted if stated is None else stated
        size = _size(facts.folder / _place(tensor)) if facts.folder is not None else None
        if size is not None:
            rest = size - offset
            there = min(there, rest) if stated is not None else rest
        if offset < 0 or there != wanted:
            yield tensor.name, f"its shape asks for {wanted} bytes, and {max(there, 0)} are there"


def _bits(kind: int) -> int | None:
    sizes: dict[int, int] = {
        onnx.TensorProto.INT4: 4,
        onnx.TensorProto.UINT4: 4,
        onnx.TensorProto.FLOAT4E2M1: 4,
    }
    try:
        return sizes.get(kind) or onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize * 8
    except (KeyError, ValueError):
        return None


LAYOUT_RULES = (
    Rule(
        "weight-layout",
        "slow",
        each("MatMul", "Gemm", fault=_layout),
        "store it as [N, K] and put a Transpose before the product",
    ),
    Rule(
        "weight-outside",
        "refused",
        _outside,
        "put the file next to the graph, under a relative path, or hand the parser the bytes",
    ),
    Rule("weight-missing", "refused", _missing, "put the file there, or hand the parser the bytes"),
    Rule("weight-size", "refused", _short, "write the file again"),
)


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


def _scales(facts: Facts, node: onnx.NodeProto) -> str | None:
    values = facts.stored(node.input[1]) if len(node.input) > 1 else None
    if values is None or values.dtype.kind == "O":
        return None
    wrong = ~(values.astype(np.float32) > 0)
    return f"{int(wrong.sum())} of its {wrong.size} scales are not above 0" if wrong.any() else None


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


def _rule(
    name: str, severity: Severity, fault: NodeFault, remedy: str, source: str = TESTED
) -> Rule:
    return Rule(
        f"quantized-{name}", severity, each("DequantizeLinear", fault=fault), remedy, source
    )


QUANTIZED_RULES = (
    _rule(
        "type", "refused", _codes, "quantize to signed, symmetric codes: int8, int4 or fp8 (e4m3)"
    ),
    _rule("zero-point", "refused", _zero_point, "quantize symmetrically, with zero points of 0"),
    _rule(
        "scales",
        "refused",
        _scales,
        "quantize with positive scales, as builds for TensorRT do",
        source="the parser of TensorRT 10 and 11: `Scale coefficients must all be positive`",
    ),
    _rule("blocks", "slow", _blocks, "give each output row one scale, or use int4 in blocks"),
    _rule("rows", "slow", _rows, "use blocks, of 128 for instance"),
    Rule(
        "quantized-constant",
        "refused",
        _constants,
        "put DequantizeLinear right after the constant, and Gather, Transpose or Reshape after it",
    ),
)


T = onnx.TensorProto

KNOWN_TYPES = frozenset(
    {
        T.FLOAT, T.FLOAT16, T.BFLOAT16, T.DOUBLE, T.INT32, T.INT64, T.INT8, T.INT4,
        T.BOOL, T.UINT8, T.FLOAT8E4M3FN, T.FLOAT4E2M1,
    }
)  # fmt: skip

FP4_SINCE = (10, 8)

LARGEST_HALF = 65504.0

# What reads values of one type: the inputs that must agree, all of them where none is named.
AGREEING: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Min", "Max", "Sum", "Concat", "MatMul"), ()),
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"), ()),
    "Where": (1, 2),
    "ScatterElements": (0, 2),
}


def _stated(facts: Facts) -> Iterator[tuple[str, int]]:
    """Yield what states a type: inputs, outputs, constants and casts."""
    graph = facts.model.graph
    for value in (*graph.input, *graph.output):
        yield value.name, value.type.tensor_type.elem_type
    for name, tensor in facts.tensors.items():
        # Weights of other types have a rule that knows their remedy.
        if not any(r.op_type == "DequantizeLinear" for r in facts.readers(name)):
            yield name, tensor.data_type
    for node in facts.nodes("Cast"):
        yield label(node), facts.integer(node, "to")


def _unsupported(facts: Facts) -> Iterator[Fault]:
    for name, kind in _stated(facts):
        if kind not in KNOWN_TYPES and kind != T.UNDEFINED:
            yield name, f"{type_name(kind)} is not a type of TensorRT"


def _fp4(facts: Facts) -> Iterator[Fault]:
    if facts.version < FP4_SINCE:
        for name, tensor in facts.tensors.items():
            if tensor.data_type == T.FLOAT4E2M1:
                yield name, "fp4 came with TensorRT 10.8"


def _double(facts: Facts) -> Iterator[Fault]:
    for name, kind in _stated(facts):
        if kind == T.DOUBLE:
            yield name, "fp64 is computed in fp32, and values beyond it are clamped"


def _byte(facts: Facts, node: onnx.NodeProto) -> str | None:
    inner = facts.integer(node, "to") == T.UINT8 and node.output[0] not in facts.outputs
    return "uint8 is a type of graph inputs and outputs only" if inner else None


def _containers(facts: Facts) -> Iterator[Fault]:
    for value in (*facts.model.graph.input, *facts.model.graph.output):
        kind = value.type.WhichOneof("value")
        if kind not in ("tensor_type", None):
            yield value.name, f"it is a {kind.removesuffix('_type')}, and TensorRT has tensors only"


def _sparse(facts: Facts) -> Iterator[Fault]:
    for tensor in facts.model.graph.sparse_initializer:
        yield tensor.values.name, "sparse constants are not read"


def _differing(facts: Facts, node: onnx.NodeProto) -> str | None:
    chosen = AGREEING[node.op_type] or range(len(node.input))
    kinds = [facts.type(node.input[i]) for i in chosen if i < len(node.input)]
    known = sorted({kind for kind in kinds if kind is not None})
    if len(known) < 2:
        return None
    return (
        f"it reads {' and '.join(map(type_name, known))}, and types are never changed on their own"
    )


def _overflow(facts: Facts, node: onnx.NodeProto) -> str | None:
    if facts.integer(node, "to") != T.FLOAT16:
        return None
    name = facts.through(node.input[0], "Identity")
    values = facts.constant(name)
    if values is None or facts.type(name) not in (T.FLOAT, T.DOUBLE, T.BFLOAT16):
        return None
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max(initial=0.0))
    if largest <= LARGEST_HALF:
        return None
    return (
        f"its constant reaches {largest:.3g}, which is infinite in fp16; a row that such a mask "
        "hides entirely becomes NaN"
    )


TYPE_RULES = (
    Rule("type-unsupported", "refused", _unsupported, "use int32 or int64, or a signed 8-bit type"),
    Rule("type-fp4", "refused", _fp4, "use int4 or int8", "the parser's changelog, 10.8"),
    Rule("type-double", "dropped", _double, "use fp32, so that both sides compute the same"),
    Rule("type-byte", "refused", each("Cast", fault=_byte), "use int32 inside the graph"),
    Rule("type-container", "refused", _containers, "use one tensor each"),
    Rule("type-sparse", "refused", _sparse, "store the constant densely"),
    Rule("type-mixed", "refused", each(*AGREEING, fault=_differing), "insert a Cast"),
    Rule(
        "type-overflow",
        "dropped",
        each("Cast", fault=_overflow),
        f"use a constant within fp16, such as {-LARGEST_HALF:.0f}",
    ),
)
