"""Rules about element types: which TensorRT has, which it narrows, which must agree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

from specrt_export.lint.facts import Facts, type_name
from specrt_export.lint.finding import Fault, Rule, each, label

T = onnx.TensorProto
HELD = frozenset(
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
        if kind not in HELD and kind != T.UNDEFINED:
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


RULES = (
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
