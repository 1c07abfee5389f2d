"""Write an engine: a graph, and beside it the bytes of its weights, a slice at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx

from specrt_export.compile.room import no_room
from specrt_export.lower.stored import Stored

ENGINE, WEIGHTS = "engine.onnx", "engine.data"

ALIGNMENT = 4096
"""Each weight begins on a page of its own, so that a device can map it."""

SLICE_BYTES = 16 << 20
"""Bytes of a weight that are in memory at a time."""

_INLINE_BYTES = 1024
"""Up to this size a weight lies in the graph itself."""


def write_engine(model: onnx.ModelProto, weights: Mapping[str, Stored], out: Path) -> None:
    """Write `engine.data` and `engine.onnx` into a folder; each byte of a weight once.

    Raises: BuildError when the disk is full.
    """
    try:
        with (out / WEIGHTS).open("wb") as file:
            _write_weights(model, weights, file)
        (out / ENGINE).write_bytes(model.SerializeToString(deterministic=True))
    except OSError as error:
        raise no_room(out / WEIGHTS) from error


def _write_weights(model: onnx.ModelProto, weights: Mapping[str, Stored], file: BinaryIO) -> None:
    placed: dict[str, tuple[int, int]] = {}
    for tensor in model.graph.initializer:
        stored = weights.get(tensor.name)
        if stored is None:
            continue
        del tensor.external_data[:]
        if stored.row_bytes * stored.length <= _INLINE_BYTES:
            tensor.raw_data = stored.load().tobytes()
            tensor.data_location = onnx.TensorProto.DEFAULT
            continue
        if stored.identity not in placed:
            placed[stored.identity] = _append(file, stored)
        offset, length = placed[stored.identity]
        for key, value in (("location", WEIGHTS), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))


def _append(file: BinaryIO, stored: Stored) -> tuple[int, int]:
    """Write a weight at the next page; return where it begins, and its bytes."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    offset = file.tell()
    step = max(1, SLICE_BYTES // max(1, stored.row_bytes))
    for begin in range(0, stored.length, step):
        part = stored.rows(begin, min(begin + step, stored.length))
        file.write(np.ascontiguousarray(part).data)
    return offset, file.tell() - offset
