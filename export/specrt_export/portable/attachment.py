"""The bytes of a graph's weights: where a checkpoint holds them, or a place to be filled in.

No torch here: a graph that was exported elsewhere meets its weights on any machine.
"""

from __future__ import annotations

import onnx_ir as ir

from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint
from specrt_export.gguf.model import WeightBytes
from specrt_export.portable.graph import ATTACHED, CODED, TYPES

UNATTACHED = "unattached.safetensors"
"""Location of a weight whose checkpoint has not been seen; no file has this name."""


def detach(model: ir.Model) -> None:
    """Give each weight of a traced graph a place still to be filled in."""
    for value in model.graph.initializers.values():
        if value.const_value is None:
            value.const_value = _external(value, UNATTACHED, ir.DataType.FLOAT)
    model.metadata_props[ATTACHED] = "false"


def attach(model: ir.Model, checkpoint: Checkpoint) -> None:
    """Fill in the bytes of each weight; one stored in another type is cast to fp32.

        weight (bf16) ── Cast(to=FLOAT) ── what read the weight

    One stored in codes stays without bytes, for `quantize.keep` to fill in.
    Raises: CheckpointError for a weight that is missing, misshapen or quantised otherwise.
    """
    casts = []
    coded = checkpoint.coded
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.location != UNATTACHED:
            continue
        stored = _find(checkpoint, value)
        if value.name in coded:
            value.const_value = _external(value, CODED, ir.DataType.FLOAT)
            continue
        dtype = ir.DataType(TYPES[stored.dtype])
        if dtype != ir.DataType.FLOAT:
            casts.append(_cast(value))
        value.type = ir.TensorType(dtype)
        value.const_value = _external(value, stored.file.name, dtype, stored.offset, stored.bytes)
    if casts:
        model.graph.insert_before(model.graph[0], casts)
    model.metadata_props[ATTACHED] = "true"


def _cast(weight: ir.Value) -> ir.Node:
    name = f"{weight.name}/Cast"
    uses = list(weight.uses())
    node = ir.node("Cast", [weight], {"to": ir.DataType.FLOAT.value}, name=name)
    node.outputs[0].name = name
    for use in uses:
        use.node.replace_input_with(use.idx, node.outputs[0])
    return node


def _find(checkpoint: Checkpoint, value: ir.Value) -> WeightBytes:
    assert value.name is not None
    assert value.shape is not None
    # Checkpoints saved from a model without its head lack the first part of each name.
    bare = value.name.partition(".")[2]
    stored = checkpoint.weights.get(value.name) or checkpoint.weights.get(bare)
    if stored is None:
        raise CheckpointError(
            f"{checkpoint.folder} holds no weight {value.name}, which its config.json calls for; "
            "check that both are of one model, and fetch it again"
        )
    if stored.shape != tuple(value.shape):
        raise CheckpointError(
            f"{stored.file}: {value.name} has shape {list(stored.shape)}, config.json calls for "
            f"{list(value.shape)}; check that both are of one model"
        )
    if stored.dtype not in TYPES and value.name not in checkpoint.coded:
        raise CheckpointError(
            f"{stored.file}: {value.name} is stored as {stored.dtype}; expected one of "
            f"{', '.join(TYPES)}. Export the checkpoint it was quantised from"
        )
    return stored


def _external(
    value: ir.Value,
    location: str,
    dtype: ir.DataType,
    offset: int | None = None,
    length: int | None = None,
) -> ir.ExternalTensor:
    assert value.name is not None
    assert value.shape is not None
    shape = ir.Shape(value.shape)
    return ir.ExternalTensor(location, offset, length, dtype, shape=shape, name=value.name)
