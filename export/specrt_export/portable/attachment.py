"""The bytes of a graph's weights: where a checkpoint holds them, or a place to be filled in.

No torch here: a graph that was exported elsewhere meets its weights on any machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from specrt.errors import CheckpointError, ExportError
from specrt.geometry import Geometry
from specrt.held_file import replacing
from specrt_export.checkpoint.checkpoint import NEVER_READ, Checkpoint
from specrt_export.checkpoint.safetensors_file import WeightBytes, map_array, same_floats
from specrt_export.portable.external_data import external_tensors
from specrt_export.portable.graph import (
    ATTACHED,
    CODED,
    MODEL_TYPE,
    OPTIONAL,
    PART,
    PARTS,
    SOURCE,
    STRIPS,
    TIED,
    TYPES,
    facts_of,
    geometry_of,
    load_graph,
    part_path,
    parts_beside,
    read_graph,
    source_of,
)

UNATTACHED = "unattached.safetensors"
"""Location of a weight whose checkpoint has not been seen; no file has this name."""


@dataclass(frozen=True)
class ExportedGraph:
    """A portable graph on disk."""

    path: Path
    geometry: Geometry
    nodes: int
    bytes: int
    parts: tuple[ExportedGraph, ...] = ()
    """Of an encoder-decoder, whose decoder this is: the others."""


def is_attached(graph: Path) -> bool:
    """Tell whether a graph says where its weights are; true of what is not a graph."""
    try:
        model = onnx.load(graph, load_external_data=False)
    except MemoryError:
        raise
    except Exception:  # the library passes on whatever its parser raises
        return True
    return facts_of(model).get(ATTACHED) != "false"


def attach_graph(graph: Path, checkpoint: Checkpoint, out: Path | None = None) -> ExportedGraph:
    """Complete a graph exported from a config alone, in place or at `out`.

    Of an encoder-decoder it is the decoder's, and those next to it are completed with it.

    Raises: ExportError for no graph, or one that has its weights already; CheckpointError if they
        do not fit.
    """
    model = load_graph(graph)
    facts = facts_of(model)
    attached = facts.get(ATTACHED)
    if attached != "false":
        raise ExportError(
            f"{graph} is not a graph without weights (its {ATTACHED} is {attached!r}); export one "
            "with --config-only"
        )
    place, beside = out or graph, {}
    if SOURCE in facts and PART not in facts:
        beside = {part: path for part in PARTS if (path := part_path(graph, part)).is_file()}
        _check_conditioned(graph, facts, beside, checkpoint)
    attach(model, checkpoint)
    parts = [
        attach_graph(path, checkpoint, part_path(place, part)) for part, path in beside.items()
    ]
    return replace(save_graph(model, place), parts=tuple(parts))


def _check_conditioned(
    graph: Path, facts: Mapping[str, str], beside: Mapping[str, Path], checkpoint: Checkpoint
) -> None:
    """Refuse the graphs of an encoder-decoder that are not whole, or of another type of model.

    Raises: ExportError, CheckpointError.
    """
    if "cross" not in beside:
        raise ExportError(
            f"{graph} is the decoder of an encoder-decoder, and there is no "
            f"{part_path(graph, 'cross').name} next to it; export both again with --config-only"
        )
    kind, held = facts.get(MODEL_TYPE), checkpoint.config.get("model_type")
    if kind != held:
        raise CheckpointError(
            f"{graph} is the graph of a model of type {kind}, and {checkpoint.origin} is of type "
            f"{held}; give it the checkpoint whose config.json it was exported from"
        )


def save_graph(model: onnx.ModelProto, out: Path) -> ExportedGraph:
    """Write a graph, replacing what is there, or nothing.

    Raises: ExportError.
    """
    data = model.SerializeToString(deterministic=True)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as file:
            file.write(data)
    except OSError as error:
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
    _settle_ties(model, checkpoint)
    _settle_optional(model, checkpoint)
    _settle_strips(model, checkpoint)
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


def _settle_ties(model: onnx.ModelProto, checkpoint: Checkpoint) -> None:
    """Name each weight that a checkpoint leaves out, or repeats, as one there that it is tied to.

    One that a checkpoint holds with other values stays: transformers does not tie it either.
    """
    graph, tied = model.graph, json.loads(_taken(model, TIED) or "{}")
    names: dict[str, str] = {}
    for name, group in tied.items():
        places = {other: _stored(checkpoint, other) for other in group}
        there = {other: place for other, place in places.items() if place is not None}
        own = there.get(name) or next(iter(there.values()), None)
        alike = (n for n, w in there.items() if own and (w is own or same_floats(w, own)))
        names[name] = next(alike, name)
    kept: dict[str, TensorProto] = {}
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
        kept.pop(tensor.name, None)  # its last place is that in a graph whose model ties it
        kept[tensor.name] = tensor
    tensors = list(kept.values())
    del graph.initializer[:]
    graph.initializer.extend(tensors)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def _settle_optional(model: onnx.ModelProto, checkpoint: Checkpoint) -> None:
    """Point those weights at the bytes of a checkpoint that it may leave out, where it does not.

    A bias of zeros, which most checkpoints of BART hold, is left out of the graph.
    """
    optional = json.loads(_taken(model, OPTIONAL) or "[]")
    for tensor in [t for t in model.graph.initializer if t.name in optional]:
        stored = _stored(checkpoint, tensor.name)
        values = numpy_helper.to_array(tensor) if stored is None else map_array(stored)
        readers = {node.op_type for node in model.graph.node if tensor.name in node.input}
        if readers == {"Add"} and not values.any():
            _bypass(model.graph, tensor)
        elif stored is not None:
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            _place(tensor, {"location": UNATTACHED})


def _settle_strips(model: onnx.ModelProto, checkpoint: Checkpoint) -> None:
    """Put a weight together of the strips of rows in which a checkpoint holds it.

        strips ── Concat ── the weight, under its name

    Raises: CheckpointError where they have more rows together, or fewer.
    """
    graph, strips = model.graph, json.loads(_taken(model, STRIPS) or "{}")
    for tensor in [t for t in graph.initializer if t.name in strips]:
        if _stored(checkpoint, tensor.name) is not None:
            continue
        graph.initializer.remove(tensor)
        rows, names = tensor.dims[0], strips[tensor.name]
        parts = [graph.initializer.add() for _ in names]
        for part, name in zip(parts, names, strict=True):
            part.CopyFrom(tensor)
            part.name, stored = name, _stored(checkpoint, name)
            part.dims[0] = stored.shape[0] if stored is not None and stored.shape else 0
            _find(checkpoint, part)
        if sum(part.dims[0] for part in parts) != rows:
            raise CheckpointError(
                f"{checkpoint.origin}: {', '.join(names)} have {[p.dims[0] for p in parts]} rows, "
                f"config.json calls for {rows} together; check that both are of one model"
            )
        place = f"{tensor.name}/Concat"
        graph.node.insert(0, helper.make_node("Concat", names, [tensor.name], place, axis=0))


def _bypass(graph: onnx.GraphProto, zeros: TensorProto) -> None:
    """Take out what adds zeros: x ── Add(zeros) ── y becomes x ── y, under the name of y."""
    for add in [node for node in graph.node if zeros.name in node.input]:
        (left,) = (name for name in add.input if name != zeros.name)
        graph.node.remove(add)
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [add.output[0] if name == left else name for name in names]
    graph.initializer.remove(zeros)


def check_weights(graph: Path, checkpoint: Checkpoint) -> Geometry:
    """Hold a graph to the weights of its checkpoint, and these to what it reads; return its sizes.

    Of an encoder-decoder it is the decoder's, and those next to it count with it.
    Raises: CheckpointError for a weight elsewhere than the graph says, and for one that is not
    read.
    """
    model, read = read_graph(graph), set[str]()
    others = parts_beside(graph).values() if source_of(model) else ()
    for part in (model, *map(read_graph, others)):
        for tensor in external_tensors(part):
            read.add(_placed(graph, tensor, checkpoint))
    _check_read(checkpoint, read)
    return geometry_of(model)


def _placed(graph: Path, tensor: TensorProto, checkpoint: Checkpoint) -> str:
    """Return the name of a graph's weight in its checkpoint.

    Raises: CheckpointError where the graph was exported from another one.
    """
    place = {entry.key: entry.value for entry in tensor.external_data}
    name = _stored_name(checkpoint, tensor.name)
    stored = checkpoint.weights.get(name)
    if tensor.name in checkpoint.coded and place.get("location") == CODED:
        return name
    if stored is None or (
        stored.file.name != place.get("location")
        or stored.offset != int(place.get("offset", 0))
        or not _holds(stored, tensor)
        or TYPES.get(stored.dtype) != tensor.data_type
    ):
        raise CheckpointError(
            f"{graph} was exported from another checkpoint than {checkpoint.folder}: "
            f"{tensor.name} is not where the graph says; export it again with "
            f"`specrt export {checkpoint.folder} --out {graph}`"
        )
    return name


def _check_read(checkpoint: Checkpoint, read: Collection[str]) -> None:
    """Refuse weights that nothing reads, but for those that change nothing.

    Raises: CheckpointError.
    """
    ours = [checkpoint.weights[name] for name in read]
    unread = [
        name
        for name, weight in checkpoint.weights.items()
        if name not in read
        and not NEVER_READ.search(name)
        and not _predicts_further(checkpoint, name)
        and not _is_shared(checkpoint, name)
        and not (name.endswith("bias") and _is_zero(checkpoint, name))
        and not any(same_floats(weight, one) for one in ours)
    ]
    if unread:
        more = f" and {len(unread) - 1} more tensors" if len(unread) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.origin} holds {unread[0]}{more}, which no part of the model in its "
            "config.json reads; correct config.json (num_hidden_layers, attention_bias and the "
            "like) or fetch both again, of one model"
        )


def _predicts_further(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a weight is of a layer beyond the model's, which predicts several tokens."""
    layer, config = re.search(r"\blayers\.(\d{1,6})\.", name), checkpoint.config
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if layer is None or not isinstance(first, int) or not isinstance(count, int):
        return False
    return first <= int(layer[1]) < first + count


def _is_shared(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether a weight is of keys or values of a layer that reads another's in their place."""
    layer, config = re.search(r"\blayers\.(\d{1,6})\.self_attn\.[kv]_", name), checkpoint.config
    count, shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if layer is None or not isinstance(count, int) or not isinstance(shared, int):
        return False
    return count - shared <= int(layer[1]) < count


def _is_zero(checkpoint: Checkpoint, name: str) -> bool:
    return name not in checkpoint.coded and not map_array(checkpoint.weights[name]).any()


def _taken(model: onnx.ModelProto, key: str) -> str | None:
    """Take a fact off a graph, and return it."""
    for index, entry in enumerate(model.metadata_props):
        if entry.key == key:
            value = str(entry.value)
            del model.metadata_props[index]
            return value
    return None


def _location(tensor: TensorProto) -> str:
    found = (entry.value for entry in tensor.external_data if entry.key == "location")
    return next(found, "")


def _place(tensor: TensorProto, facts: Mapping[str, str]) -> None:
    del tensor.external_data[:]
    for key, value in facts.items():
        tensor.external_data.add(key=key, value=value)


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    # Checkpoints saved from a model without its head lack the first part of each name. That of a
    # head is its whole module: without it any tensor `weight` would be taken for the head's.
    short = name.partition(".")[2]
    return short if "." in short and name not in checkpoint.weights else name


def _stored(checkpoint: Checkpoint, name: str) -> WeightBytes | None:
    return checkpoint.weights.get(_stored_name(checkpoint, name))


def _holds(stored: WeightBytes, tensor: TensorProto) -> bool:
    """Tell whether stored values have the shape of a tensor, or its rows expert by expert."""
    shape, dims = stored.shape, tuple(tensor.dims)
    return shape == dims or (len(shape) == 3 and (shape[0] * shape[1], shape[2]) == dims)


def _find(checkpoint: Checkpoint, tensor: TensorProto) -> WeightBytes:
    stored = _stored(checkpoint, tensor.name)
    if stored is None:
        raise CheckpointError(
            f"{checkpoint.origin} holds no weight {tensor.name}, which its config.json calls for; "
            "check that both are of one model, and fetch it again"
        )
    if not _holds(stored, tensor):
        raise CheckpointError(
            f"{stored.file}: {tensor.name} has shape {list(stored.shape)}, config.json calls for "
            f"{list(tensor.dims)}; check that both are of one model"
        )
    if stored.dtype not in TYPES and tensor.name not in checkpoint.coded:
        raise CheckpointError(
            f"{stored.file}: {tensor.name} is stored as {stored.dtype}; expected one of "
            f"{', '.join(TYPES)}. Save the model as one of them, with `from_pretrained(folder, "
            'dtype="float32").save_pretrained(new)`, or take the checkpoint it was quantised from'
        )
    return stored
