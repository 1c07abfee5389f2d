"""Rules about TensorScatter: what becomes a key-value cache updated in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx

from specrt_export.lint.facts import Facts, type_name
from specrt_export.lint.finding import Fault, Rule, each, label

CACHE_TYPES = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)
RANK, LENGTH = 4, -2
OWN_INPUT = "make the cache a graph input of its own, with nothing between it and the node"
DECOMPOSED = "use ScatterElements, which copies the cache"


def _mode(facts: Facts, node: onnx.NodeProto) -> str | None:
    mode = facts.text(node, "mode", "linear")
    return f"its mode is {mode!r}" if mode != "linear" else None


def _rank(facts: Facts, node: onnx.NodeProto) -> str | None:
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


def _input(facts: Facts, node: onnx.NodeProto) -> str | None:
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


RULES = (
    Rule("cache-mode", "refused", each("TensorScatter", fault=_mode), "use mode linear"),
    Rule("cache-rank", "refused", each("TensorScatter", fault=_rank), "reshape to [B, H, M, D]"),
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
    Rule("cache-input", "refused", each("TensorScatter", fault=_input), OWN_INPUT),
    Rule(
        "cache-output",
        "refused",
        each("TensorScatter", fault=_output),
        "make the result of the node itself a graph output, and bind it to its input's memory",
    ),
    Rule("cache-twice", "refused", _twice, "write a cache once; join what is written before"),
)
