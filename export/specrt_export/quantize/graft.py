"""Put stored weights into a graph in the place of those they were made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import onnx
from onnx import TensorProto, helper

from specrt_export.quantize.precision import SCALED
from specrt_export.quantize.store import Stored


def graft(model: onnx.ModelProto, stored: Iterable[Stored]) -> None:
    """Let each use of a chosen weight read its stored form; drop what nothing reads any more.

        codes, scales ── DequantizeLinear ─┐
        fp16 or bf16 ─── Cast ─────────────┴─ (Transpose) ── Transpose, Gemm or Gather

    The transposition in brackets is there for a weight that was turned to be stored.
    """
    nodes = {node.name: node for node in model.graph.node}
    added: list[onnx.NodeProto] = []
    for one in stored:
        model.graph.initializer.extend(one.tensors)
        made = _restore(one)
        added.extend(made)
        for use in one.choice.uses:
            nodes[use.node].input[use.input] = made[-1].output[0]
    rest = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*added, *rest])
    prune(model)


def _restore(one: Stored) -> list[onnx.NodeProto]:
    """Return the nodes that make fp32 weights of stored ones."""
    choice, names = one.choice, [tensor.name for tensor in one.tensors]
    if choice.precision in SCALED:
        made = [_node("DequantizeLinear", choice.name, names, axis=1, block_size=choice.block)]
    else:
        made = [_node("Cast", choice.name, names, to=TensorProto.FLOAT)]
    if choice.turned:
        made.append(_node("Transpose", choice.name, made[0].output, perm=[1, 0]))
    return made


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
    kept = [node for node in graph.node if needed.intersection(node.output)]
    used = [tensor for tensor in graph.initializer if tensor.name in needed]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(used)
