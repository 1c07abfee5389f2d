"""The weights a portable graph points at, mapped from the checkpoint's own files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.checkpoint import Checkpoint

_TYPES = {
    "F32": onnx.TensorProto.FLOAT,
    "F16": onnx.TensorProto.FLOAT16,
    "BF16": onnx.TensorProto.BFLOAT16,
}
STORAGE: dict[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    # NumPy has no bf16; the bits travel together with the ONNX type.
    onnx.TensorProto.BFLOAT16: np.dtype(np.uint16),
    onnx.TensorProto.INT8: np.dtype(np.int8),
    # Two to a byte, the first in the low half.
    onnx.TensorProto.INT4: np.dtype(np.uint8),
    onnx.TensorProto.FLOAT8E4M3FN: np.dtype(np.uint8),
    # The codes of an engine, whose zero lies in the middle.
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
}
"""How the types of weights lie in memory."""


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint, or of a quantized graph's folder, as its stored bytes."""

    name: str
    onnx_type: int
    array: NDArray[Any]
    """Shapes: that of the tensor; of int4 [N, K] the bytes, [N, K / 2]."""


def check_weights(graph: Path, model: onnx.ModelProto, checkpoint: Checkpoint) -> None:
    """Hold where a graph finds each weight to where the checkpoint has it.

    Raises: CheckpointError when the graph was exported from another checkpoint.
    """
    for tensor in external_tensors(model):
        place = {entry.key: entry.value for entry in tensor.external_data}
        bare = tensor.name.partition(".")[2]
        stored = checkpoint.weights.get(tensor.name) or checkpoint.weights.get(bare)
        if stored is None or (
            stored.file.name != place.get("location")
            or stored.offset != int(place.get("offset", 0))
            or stored.shape != tuple(tensor.dims)
            or _TYPES.get(stored.dtype) != tensor.data_type
        ):
            raise CheckpointError(
                f"{graph} was exported from another checkpoint than {checkpoint.folder}: "
                f"{tensor.name} is not where the graph says; export it again with "
                f"`specrt export {checkpoint.folder} --out {graph}`"
            )


def map_weights(model: onnx.ModelProto, folder: Path) -> list[Weight]:
    """Map every external initializer of a portable graph from the files in a folder.

    Raises: CheckpointError naming the shard that is missing or too short.
    """
    shards: dict[str, NDArray[np.uint8]] = {}
    weights = []
    for tensor in external_tensors(model):
        place = {entry.key: entry.value for entry in tensor.external_data}
        shard = place.get("location", "")
        if shard not in shards:
            shards[shard] = _map(folder, shard)
        begin = int(place.get("offset", 0))
        dtype, shape = STORAGE[tensor.data_type], _stored_shape(tensor)
        size = prod(shape) * dtype.itemsize
        if begin + size > len(shards[shard]):
            raise CheckpointError(
                f"{folder / shard} ends before {tensor.name} does (byte {begin + size} of "
                f"{len(shards[shard])}); fetch the checkpoint again, or export the graph again"
            )
        array: NDArray[Any] = shards[shard][begin : begin + size].view(dtype)
        weights.append(Weight(tensor.name, tensor.data_type, array.reshape(shape)))
    return weights


def _stored_shape(tensor: onnx.TensorProto) -> tuple[int, ...]:
    *outer, inner = tensor.dims or (1,)
    if tensor.data_type == onnx.TensorProto.INT4:
        inner //= 2
    return (*outer, inner) if tensor.dims else ()


def external_tensors(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Return the initializers whose bytes lie in a checkpoint."""
    external = onnx.TensorProto.EXTERNAL
    return [t for t in model.graph.initializer if t.data_location == external]


def location(tensor: onnx.TensorProto) -> str:
    """Return the name of the file that holds an external tensor."""
    return next((e.value for e in tensor.external_data if e.key == "location"), "")


def _map(folder: Path, shard: str) -> NDArray[np.uint8]:
    """Map one shard; links are followed, because hub caches are made of them."""
    if not shard or Path(shard).name != shard:
        raise CheckpointError(
            f"the graph points at weights in {shard!r}; expected a plain file name. "
            "Export it again with `specrt export`"
        )
    try:
        return np.memmap(folder / shard, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / shard} cannot be read: {error}") from error
