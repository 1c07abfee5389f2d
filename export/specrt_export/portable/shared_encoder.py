"""Whether a draft and its target have the same encoder."""

from __future__ import annotations

from pathlib import Path

from specrt.errors import CheckpointError
from specrt_export.portable.external_data import MappedWeight, map_weights
from specrt_export.portable.graph import part_path, read_graph, source_of


def shares_encoder(target: tuple[Path, Path], draft: tuple[Path, Path]) -> bool:
    """Tell whether a draft reads the hidden states of its target: they are the same, bit for bit.

    Each is the graph of a decoder, with others next to it, and the folder of its weights.
    Raises: CheckpointError for a draft without an encoder whose states are not its target's size.
    """
    (graph, folder), (other, other_folder) = target, draft
    ours, theirs = (source_of(read_graph(part_path(one, "cross"))) for one in (graph, other))
    assert ours is not None, "a cross graph has the sizes of its source"
    assert theirs is not None, "a cross graph has the sizes of its source"
    if not part_path(other, "encoder").is_file():
        if (ours.width, ours.max_source) != (theirs.width, theirs.max_source):
            raise CheckpointError(
                f"{other_folder} has no encoder, and attends to {theirs.max_source} states of "
                f"{theirs.width}; its target's are {ours.max_source} of {ours.width}: choose a "
                "draft that was made of this target"
            )
        return True
    one, two = (read_graph(part_path(path, "encoder")) for path in (graph, other))
    if one.graph.node != two.graph.node:
        return False
    weights = {weight.name: weight for weight in map_weights(two, other_folder)}
    inline = {t.name: t for t in two.graph.initializer if t.name not in weights}
    mine = map_weights(one, folder)
    return all(
        tensor == inline.get(tensor.name)
        for tensor in one.graph.initializer
        if tensor.name not in {weight.name for weight in mine}
    ) and all(_same_bytes(weight, weights.get(weight.name)) for weight in mine)


def _same_bytes(one: MappedWeight, other: MappedWeight | None) -> bool:
    return (
        other is not None
        and one.onnx_type == other.onnx_type
        and one.array.shape == other.array.shape
        and one.array.tobytes() == other.array.tobytes()
    )
