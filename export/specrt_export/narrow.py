"""Store an engine's fp32 weights as fp16 or bf16 where that loses nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from specrt_export.compile.engine_file import ENGINE, WEIGHTS
from specrt_export.mapped import external_tensors
from specrt_export.quantize.datafile import DataFile
from specrt_export.quantize.precision import Precision
from specrt_export.quantize.source import narrow, widen

_TYPES = {"bf16": TensorProto.BFLOAT16, "fp16": TensorProto.FLOAT16}

SLICE = 1 << 22
"""Weights in memory at a time."""


def narrow_engine(folder: Path, precision: Precision) -> int:
    """Halve the weights of an engine that a precision keeps as fp16 or bf16; return how many.

        w (fp32) ── Op      =>      w (bf16) ── Cast ── Op

    The CPU computes in fp32. Quantizing rounded these weights already, so a weight that comes back
    from the smaller type bit for bit is stored in it, and folding the cast when the engine is
    opened gives the same engine. What does not, such as a table of angles, stays fp32.
    """
    kinds = [kind for kind in _TYPES if kind in precision.names]
    if not kinds:
        return 0
    model = onnx.load(folder / ENGINE, load_external_data=False)
    written = folder / f"{WEIGHTS}.new"
    places: dict[tuple[str, ...], onnx.TensorProto] = {}
    with closing(DataFile(written, WEIGHTS)) as file:
        for tensor in external_tensors(model):
            place = tuple(entry.value for entry in tensor.external_data)
            if place not in places:  # a table may be there in two shapes
                places[place] = _move(tensor, folder / WEIGHTS, kinds, file)
            moved = places[place]
            tensor.data_type = moved.data_type
            del tensor.external_data[:]
            tensor.external_data.extend(moved.external_data)
    count = _add_casts(model)
    (folder / ENGINE).write_bytes(model.SerializeToString(deterministic=True))
    written.replace(folder / WEIGHTS)
    return count


def _move(
    tensor: onnx.TensorProto, path: Path, kinds: Sequence[str], file: DataFile
) -> onnx.TensorProto:
    """Copy a tensor's bytes, in the first of some smaller types that holds them."""
    place = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(place["offset"]), int(place["length"])
    if tensor.data_type != TensorProto.FLOAT:
        region = file.reserve(tensor.name, tensor.data_type, (length, 1), 1)
        for begin, part in _parts(path, offset, length, np.uint8):
            region.write(begin, part)
        return region.tensor
    items = length // 4
    fits = [k for k in kinds if all(_holds(k, p) for _, p in _parts(path, offset, items))]
    kind = fits[0] if fits else ""
    region = file.reserve(
        tensor.name, _TYPES.get(kind, TensorProto.FLOAT), (items, 1), 2 if kind else 4
    )
    for begin, part in _parts(path, offset, items):
        region.write(begin, narrow(part, kind) if kind else part)
    return region.tensor


def _parts(
    path: Path, offset: int, items: int, dtype: type[Any] = np.float32
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the index and the items of one slice after another."""
    size = np.dtype(dtype).itemsize
    for begin in range(0, items, SLICE):
        count = min(SLICE, items - begin)
        yield begin, np.fromfile(path, dtype, count, offset=offset + begin * size)


def _holds(kind: str, part: NDArray[np.float32]) -> bool:
    same = widen(narrow(part, kind), _TYPES[kind]).view(np.uint32) == part.view(np.uint32)
    return bool(same.all())


def _add_casts(model: onnx.ModelProto) -> int:
    """Widen what is stored as fp16 or bf16 before anything reads it; return how many that is."""
    small = [t.name for t in external_tensors(model) if t.data_type in _TYPES.values()]
    casts = [
        helper.make_node("Cast", [name], [f"{name}/Cast"], f"{name}/Cast", to=TensorProto.FLOAT)
        for name in small
    ]
    renamed = {cast.input[0]: cast.output[0] for cast in casts}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*casts, *nodes])
    return len(casts)
