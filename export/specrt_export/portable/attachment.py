"""The bytes of a graph's weights: where a checkpoint holds them, or a place to be filled in.

No torch here: a graph that was exported elsewhere meets its weights on any machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from specrt.bundle import Geometry
from specrt.errors import CheckpointError, ExportError
from specrt_export.checkpoint import Checkpoint
from specrt_export.gguf.model import WeightBytes
from specrt_export.portable.graph import ATTACHED, CODED, TYPES, facts_of, geometry_of

UNATTACHED = "unattached.safetensors"
"""Location of a weight whose checkpoint has not been seen; no file has this name."""


@dataclass(frozen=True)
class ExportedGraph:
    """A portable graph on disk."""

    path: Path
    geometry: Geometry
    nodes: int
    bytes: int


def is_attached(graph: Path) -> bool:
    """Tell whether a graph says where its weights are; what is no graph does not say otherwise."""
    try:
        model = onnx.load(graph, load_external_data=False)
    except MemoryError:
        raise
    except Exception:  # the library passes on whatever its parser raises
        return True
    return facts_of(model).get(ATTACHED) != "false"


def attach_graph(graph: Path, checkpoint: Checkpoint, out: Path | None = None) -> ExportedGraph:
    """Complete a graph exported from a config alone, in place or at `out`.

    Raises: ExportError if the graph has its weights already, CheckpointError if they do not fit.
    """
    model = onnx.load(graph, load_external_data=False)
    attached = facts_of(model).get(ATTACHED)
    if attached != "false":
        raise ExportError(
            f"{graph} is not a graph without weights (its {ATTACHED} is {attached!r}); export one "
            "with --config-only"
        )
    attach(model, checkpoint)
    return save_graph(model, out or graph)


def save_graph(model: onnx.ModelProto, out: Path) -> ExportedGraph:
    """Write a graph, replacing what is there, or nothing.

    Raises: ExportError.
    """
    data = model.SerializeToString(deterministic=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(data)
        aside.replace(out)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ExportError(
            f"cannot write {out} ({error.strerror}); free space or choose another --out"
        ) from error
    return ExportedGraph(out, geometry_of(model), len(model.graph.node), len(data))


def attach(model: onnx.ModelProto, checkpoint: Checkpoint) -> None:
    """Fill in the bytes of each weight; one stored in another type is cast to fp32.

        weight (bf16) ── Cast(to=FLOAT) ── what read the weight

    One stored as whole numbers stays without bytes, for `quantize.keep` to fill in.
    Raises: CheckpointError for a weight that is missing, misshapen or quantised otherwise.
    """
    graph, coded = model.graph, checkpoint.coded
    cast: dict[str, str] = {}
    for tensor in graph.initializer:
        if _location(tensor) != UNATTACHED:
            continue
        stored = _find(checkpoint, tensor)
        if tensor.name in coded:
            _place(tensor, {"location": CODED})
            continue
        tensor.data_type = TYPES[stored.dtype]
        if tensor.data_type != TensorProto.FLOAT:
            cast[tensor.name] = f"{tensor.name}/Cast"
        offset, length = str(stored.offset), str(stored.bytes)
        _place(tensor, {"location": stored.file.name, "offset": offset, "length": length})
    for node in graph.node:
        node.input[:] = [cast.get(name, name) for name in node.input]
    nodes = [
        helper.make_node("Cast", [name], [made], name=made, to=TensorProto.FLOAT)
        for name, made in cast.items()
    ]
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)
    for entry in model.metadata_props:
        if entry.key == ATTACHED:
            entry.value = "true"


def _location(tensor: TensorProto) -> str:
    found = (entry.value for entry in tensor.external_data if entry.key == "location")
    return next(found, "")


def _place(tensor: TensorProto, facts: Mapping[str, str]) -> None:
    del tensor.external_data[:]
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=value)


def _find(checkpoint: Checkpoint, tensor: TensorProto) -> WeightBytes:
    # Checkpoints saved from a model without its head lack the first part of each name.
    bare = tensor.name.partition(".")[2]
    stored = checkpoint.weights.get(tensor.name) or checkpoint.weights.get(bare)
    if stored is None:
        raise CheckpointError(
            f"{checkpoint.origin} holds no weight {tensor.name}, which its config.json calls for; "
            "check that both are of one model, and fetch it again"
        )
    if stored.shape != tuple(tensor.dims):
        raise CheckpointError(
            f"{stored.file}: {tensor.name} has shape {list(stored.shape)}, config.json calls for "
            f"{list(tensor.dims)}; check that both are of one model"
        )
    if stored.dtype not in TYPES and tensor.name not in checkpoint.coded:
        raise CheckpointError(
            f"{stored.file}: {tensor.name} is stored as {stored.dtype}; expected one of "
            f"{', '.join(TYPES)}. Export the checkpoint it was quantised from"
        )
    return stored
