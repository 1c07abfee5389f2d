"""Rules about Attention and TensorScatter: what becomes attention and KV-update layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import onnx

from specrt_export.lint.rules import (
    TESTED,
    Facts,
    Fault,
    NodeFault,
    Rule,
    Severity,
    Shape,
    each,
    label,
    type_name,
)

HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

FLOATS = (*HALVES, onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)

FEWEST_HEADS, WIDEST_HEAD, HEAD_STEP = 4, 256, 8

MASK, PAST, LENGTHS = 3, (4, 5), 6

DECOMPOSABLE = (
    "set the attribute TRT_decomposable to 1 on the node; it costs nothing where a kernel exists"
)

WRITTEN_OUT = "write attention out as MatMul, Softmax, MatMul"

EXPLICIT_MASK = "give the node an additive mask [B, 1, S, M] made from `start`"


@dataclass(frozen=True)
class HeadCounts:
    """Query and key heads, and the width of one; None where the graph does not say."""

    query: int | None
    key: int | None
    width: int | None


def heads_of(facts: Facts, node: onnx.NodeProto) -> HeadCounts:
    """Read head counts from shapes of rank 4, or from attributes and shapes of rank 3."""
    counts: list[int | None] = []
    width = None
    for index, key in ((0, "q_num_heads"), (1, "kv_num_heads")):
        shape = facts.shape(_input(node, index)) or ()
        count = shape[1] if len(shape) == 4 else facts.integer(node, key) or None
        counts.append(count if isinstance(count, int) else None)
        if index == 0 and shape and isinstance(shape[-1], int):
            width = shape[-1] if len(shape) == 4 else shape[-1] // max(counts[0] or 1, 1)
    return HeadCounts(counts[0], counts[1], width)


def _input(node: onnx.NodeProto, index: int) -> str:
    return node.input[index] if index < len(node.input) else ""


def _outputs(facts: Facts, node: onnx.NodeProto) -> str | None:
    count = len(node.output)
    return f"it has {count} outputs, and attention has one" if count > 1 else None


def _past(facts: Facts, node: onnx.NodeProto) -> str | None:
    given = any(_input(node, i) for i in PAST)
    return "past_key and past_value are not taken" if given else None


def _softcap(facts: Facts, node: onnx.NodeProto) -> str | None:
    cap = facts.number(node, "softcap")
    return f"softcap is {cap:g}, and only 0 is taken" if cap else None


def _precision(facts: Facts, node: onnx.NodeProto) -> str | None:
    stated = facts.states(node, "softmax_precision")
    return "softmax_precision is not taken, whatever its value" if stated else None


def _lengths(facts: Facts, node: onnx.NodeProto) -> str | None:
    given = _input(node, LENGTHS)
    return (
        "nonpad_kv_seqlen is not read: unwritten and stale keys are attended to" if given else None
    )


def _causal(facts: Facts, node: onnx.NodeProto) -> bool:
    return bool(facts.integer(node, "is_causal"))


def _causal_and_mask(facts: Facts, node: onnx.NodeProto) -> str | None:
    both = _causal(facts, node) and _input(node, MASK)
    return "is_causal and a mask are not taken together" if both else None


def _positions(shape: Shape) -> int | str | None:
    """Return the number of tokens of a [B, H, S, D] or [B, S, H * D] shape."""
    return shape[-2] if len(shape) in (3, 4) else None


def _causal_over_buffer(facts: Facts, node: onnx.NodeProto) -> str | None:
    if not _causal(facts, node) or _input(node, MASK):
        return None
    rows, columns = (_positions(facts.shape(_input(node, i)) or ()) for i in (0, 1))
    if rows is not None and rows == columns:
        return None
    return (
        f"is_causal counts from the first key: a pass of {rows or 'some'} tokens over "
        f"{columns or 'some'} keys sees the first ones, wherever in the buffer it starts"
    )


def _kernel(facts: Facts, node: onnx.NodeProto) -> str | None:
    """Say why no fused kernel takes a node; all but the type matter to passes of width 1 alone."""
    if facts.integer(node, "TRT_decomposable"):
        return None
    heads, kind = heads_of(facts, node), facts.type(_input(node, 0))
    if kind is not None and kind in FLOATS and kind not in HALVES:
        return "it computes in fp32, and attention kernels are fp16 and bf16"
    if heads.query is not None and heads.query < FEWEST_HEADS:
        return f"it has {heads.query} query heads, and at width 1 kernels need {FEWEST_HEADS}"
    if heads.width is not None and heads.width > WIDEST_HEAD:
        return f"its heads are {heads.width} wide, and kernels go to {WIDEST_HEAD}"
    if heads.width is not None and heads.width % HEAD_STEP:
        return (
            f"its heads are {heads.width} wide, and at width 1 kernels take multiples of "
            f"{HEAD_STEP}"
        )
    return None


def _groups(facts: Facts, node: onnx.NodeProto) -> str | None:
    heads = heads_of(facts, node)
    if not heads.query or not heads.key or heads.query % heads.key == 0:
        return None
    return f"{heads.query} query heads do not divide among {heads.key} key heads"


def _input_type(facts: Facts, node: onnx.NodeProto) -> str | None:
    kind = facts.type(_input(node, 0))
    if kind is None or kind in FLOATS:
        return None
    return f"it computes in {type_name(kind)}"


def _mask_type(facts: Facts, node: onnx.NodeProto) -> str | None:
    mask, query = facts.type(_input(node, MASK)), facts.type(_input(node, 0))
    if mask is None or query is None or mask in (query, onnx.TensorProto.BOOL):
        return None
    names = [type_name(kind) for kind in (mask, query)]
    return f"its mask is {names[0]} and its queries are {names[1]}"


def _bool_mask(facts: Facts, node: onnx.NodeProto) -> str | None:
    is_bool = facts.type(_input(node, MASK)) == onnx.TensorProto.BOOL
    return (
        "its mask is bool, which takes about 8 kernels more in each wide pass" if is_bool else None
    )


def _rank(facts: Facts, node: onnx.NodeProto) -> str | None:
    shape = facts.shape(_input(node, 0))
    if facts.version >= (11, 0) or shape is None or len(shape) == 4:
        return None
    return f"its queries have rank {len(shape)}, and TensorRT before 11.0 takes rank 4"


def _rule(
    name: str, severity: Severity, fault: NodeFault, remedy: str, source: str = TESTED
) -> Rule:
    return Rule(f"attention-{name}", severity, each("Attention", fault=fault), remedy, source)


ATTENTION_RULES = (
    _rule(
        "outputs", "refused", _outputs, "keep keys and values in graph inputs with TensorScatter"
    ),
    _rule("past", "refused", _past, "keep keys and values in graph inputs with TensorScatter"),
    _rule("softcap", "refused", _softcap, f"{WRITTEN_OUT}, with Tanh between"),
    _rule("precision", "refused", _precision, f"remove the attribute, or {WRITTEN_OUT}"),
    _rule("lengths", "dropped", _lengths, EXPLICIT_MASK),
    _rule(
        "causal-mask", "refused", _causal_and_mask, "leave out is_causal, and put it into the mask"
    ),
    _rule("causal", "dropped", _causal_over_buffer, EXPLICIT_MASK),
    _rule("kernel", "refused", _kernel, DECOMPOSABLE),
    _rule("groups", "refused", _groups, "repeat keys and values, or correct the shapes"),
    _rule("type", "refused", _input_type, "cast to fp16 or bf16 before"),
    _rule("mask-type", "refused", _mask_type, "cast the mask to the type of the queries"),
    _rule("mask-bool", "slow", _bool_mask, "add 0 and a large negative number instead"),
    _rule(
        "rank",
        "refused",
        _rank,
        "reshape to [B, H, S, D]",
        source="the parser's table of operators, 10.15",
    ),
)


CACHE_TYPES = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

RANK, LENGTH = 4, -2

OWN_INPUT = "make the cache a graph input of its own, with nothing between it and the node"

DECOMPOSED = "use ScatterElements, which copies the cache"


def _mode(facts: Facts, node: onnx.NodeProto) -> str | None:
    mode = facts.text(node, "mode", "linear")
    return f"its mode is {mode!r}" if mode != "linear" else None


def _cache_rank(facts: Facts, node: onnx.NodeProto) -> str | None:
    shape = facts.shape(node.input[0])
    if shape is None or len(shape) == RANK:
        return None
    return f"its cache has rank {len(shape)}, and a cache is [B, H, M, D]"


def _axis(facts: Facts, node: onnx.NodeProto) -> str | None:
    axis, shape = facts.integer(node, "axis", LENGTH), facts.shape(node.input[0])
    rank = RANK if shape is None else len(shape)
    if axis in (LENGTH, rank + LENGTH):
        return None
    return f"its axis is {axis}; positions must be the last axis but one of [B, H, M, D]"


def _length(facts: Facts, node: onnx.NodeProto) -> str | None:
    shape = facts.shape(node.input[0])
    if shape is None or len(shape) != RANK or isinstance(shape[LENGTH], int):
        return None
    return f"the length of its cache is not fixed ({shape[LENGTH] or 'unknown'})"


def _type(facts: Facts, node: onnx.NodeProto) -> str | None:
    kind = facts.type(node.input[0])
    if kind is None or kind in CACHE_TYPES:
        return None
    return f"its cache is {type_name(kind)}, and a cache is fp32, fp16 or bf16"


def _update_type(facts: Facts, node: onnx.NodeProto) -> str | None:
    kinds = [facts.type(name) for name in node.input[:2]]
    if None in kinds or len(set(kinds)) < 2:
        return None
    names = [type_name(kind) for kind in kinds if kind is not None]
    return f"its cache is {names[0]} and what it writes is {names[1]}"


def _cache_input(facts: Facts, node: onnx.NodeProto) -> str | None:
    name = node.input[0]
    if name in facts.inputs and name not in facts.tensors:
        return None
    maker = facts.maker(name)
    return f"its cache comes from {label(maker) if maker else 'a constant'}, not from a graph input"


def _output(facts: Facts, node: onnx.NodeProto) -> str | None:
    if node.output[0] in facts.outputs:
        return None
    return f"the updated cache {node.output[0]} is not a graph output"


def _twice(facts: Facts) -> Iterator[Fault]:
    if facts.too_old_for("TensorScatter"):
        return
    nodes = [n for n in facts.nodes("TensorScatter") if n.input]
    count = Counter(n.input[0] for n in nodes)
    for node in nodes:
        if count[node.input[0]] > 1:
            yield label(node), f"{node.input[0]} is written by {count[node.input[0]]} nodes"


CACHE_RULES = (
    Rule("cache-mode", "refused", each("TensorScatter", fault=_mode), "use mode linear"),
    Rule(
        "cache-rank", "refused", each("TensorScatter", fault=_cache_rank), "reshape to [B, H, M, D]"
    ),
    Rule("cache-axis", "refused", each("TensorScatter", fault=_axis), "transpose to [B, H, M, D]"),
    Rule(
        "cache-length",
        "refused",
        each("TensorScatter", fault=_length),
        "fix the length of the cache; lowering does, from `max_length` of the recipe",
    ),
    Rule(
        "cache-type",
        "refused",
        each("TensorScatter", fault=_type),
        f"keep the cache in fp16 or bf16; for a quantized one {DECOMPOSED}",
    ),
    Rule(
        "cache-update-type",
        "refused",
        each("TensorScatter", fault=_update_type),
        "cast what is written to the type of the cache",
    ),
    Rule("cache-input", "refused", each("TensorScatter", fault=_cache_input), OWN_INPUT),
    Rule(
        "cache-output",
        "refused",
        each("TensorScatter", fault=_output),
        "make the result of the node itself a graph output, and bind it to its input's memory",
    ),
    Rule("cache-twice", "refused", _twice, "write a cache once; join what is written before"),
)
