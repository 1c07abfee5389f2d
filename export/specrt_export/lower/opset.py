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
    return stamp_opset(model, OLDEST)


def stamp_opset(model: onnx.ModelProto, version: int) -> int:
    """Lower the standard opset to a version where no operator needs more; return what it is."""
    stamp = next(o for o in model.opset_import if o.domain in ("", "ai.onnx"))
    nodes = [n for n in model.graph.node if n.domain in ("", "ai.onnx")]
    if all(_exists(n.op_type, version) for n in nodes):
        for node in nodes:
            _drop_newer_attributes(node, version)
        stamp.version = version
        model.ir_version = _OLDEST_IR
    return int(stamp.version)


def _exists(op_type: str, version: int) -> bool:
    # ONNX Runtime registers this one in the standard domain, outside the standard.
    if op_type == "SimplifiedLayerNormalization":
        return True
    return onnx.defs.has(op_type, version, "")


def _drop_newer_attributes(node: onnx.NodeProto, version: int) -> None:
    if not onnx.defs.has(node.op_type, version, ""):
        return
    known = onnx.defs.get_schema(node.op_type, version, "").attributes
    kept = [a for a in node.attribute if a.name in known]
    del node.attribute[:]
    node.attribute.extend(kept)
