"""Stamp a lowered graph with the oldest opset that holds it, so that older runtimes load it."""

from __future__ import annotations

import onnx

OLDEST = 21
_OLDEST_IR = 10


def stamp_oldest_opset(model: onnx.ModelProto) -> int:
    """Lower the standard opset to 21 where no operator needs more; return the version.

    ONNX Runtime 1.23, the last for Python 3.10, refuses opset 24. A graph whose attention was
    fused holds nothing newer than opset 21.
    """
    stamp = next(o for o in model.opset_import if o.domain in ("", "ai.onnx"))
    nodes = [n for n in model.graph.node if n.domain in ("", "ai.onnx")]
    if all(_exists(n.op_type) for n in nodes):
        for node in nodes:
            _drop_newer_attributes(node)
        stamp.version = OLDEST
        model.ir_version = _OLDEST_IR
    return int(stamp.version)


def _exists(op_type: str) -> bool:
    # ONNX Runtime registers this one in the standard domain, outside the standard.
    if op_type == "SimplifiedLayerNormalization":
        return True
    return onnx.defs.has(op_type, OLDEST, "")


def _drop_newer_attributes(node: onnx.NodeProto) -> None:
    if not onnx.defs.has(node.op_type, OLDEST, ""):
        return
    known = onnx.defs.get_schema(node.op_type, OLDEST, "").attributes
    kept = [a for a in node.attribute if a.name in known]
    del node.attribute[:]
    node.attribute.extend(kept)
