"""Writes an engine: a graph, and beside it the bytes of its weights, a slice at a time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx

from specrt.errors import BuildError
from specrt_export.lower.lazy_tensor import LazyTensor


def disk_full(path: Path) -> BuildError:
    """Return the error for a file that could not be written, with what is free on its disk."""
    free = shutil.disk_usage(path.parent).free >> 20
    return BuildError(
        f"{path} could not be written, with {free} MiB free on its disk; free some, or build "
        "elsewhere with --out"
    )


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write; at the end it takes the place of `path`.

    Whatever stops the writing, what was at `path` is as it was and the file is gone.
    Raises: BuildError for what the disk refused.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(".part", f".{path.name}.", path.parent)
    except OSError as error:
        raise BuildError(
            f"{path} cannot be written ({error.strerror or error}); build elsewhere with --out"
        ) from error
    aside = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        aside.chmod(0o644)
        aside.replace(path)
    except OSError as error:
        raise disk_full(path) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


ENGINE, WEIGHTS = "engine.onnx", "engine.data"

ALIGNMENT = 4096
"""Each weight begins on a page of its own, so that a device can map it."""

SLICE_BYTES = 16 << 20
"""Bytes of a weight that are in memory at a time."""

_INLINE_BYTES = 1024
"""Up to this size a weight lies in the graph itself."""


def write_engine(model: onnx.ModelProto, weights: Mapping[str, LazyTensor], out: Path) -> None:
    """Write `engine.data` and `engine.onnx` into a folder; each byte of a weight once.

    Raises: BuildError when the disk is full.
    """
    try:
        with (out / WEIGHTS).open("wb") as file:
            _write_weights(model, weights, file)
        (out / ENGINE).write_bytes(model.SerializeToString(deterministic=True))
    except OSError as error:
        raise disk_full(out / WEIGHTS) from error


def _write_weights(
    model: onnx.ModelProto, weights: Mapping[str, LazyTensor], file: BinaryIO
) -> None:
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


def _append(file: BinaryIO, stored: LazyTensor) -> tuple[int, int]:
    """Write a weight at the next page; return where it begins, and its bytes."""
    file.write(bytes(-file.tell() % ALIGNMENT))
    offset = file.tell()
    step = max(1, SLICE_BYTES // max(1, stored.row_bytes))
    for begin in range(0, stored.length, step):
        part = stored.rows(begin, min(begin + step, stored.length))
        file.write(np.ascontiguousarray(part).data)
    return offset, file.tell() - offset
