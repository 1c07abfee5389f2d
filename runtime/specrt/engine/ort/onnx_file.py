"""What an ONNX file reads from other files: its weights, found without the `onnx` package.

Source: onnx.proto (https://onnx.ai/onnx/api/classes.html) and the protocol buffer encoding
    (https://protobuf.dev/programming-guides/encoding/)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt.held_file import HeldFile

_WITHIN = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
"""By kind of message: the fields that are, or hold, tensors."""

_DIMS, _TYPE, _NAME, _EXTERNAL, _LOCATION = 1, 2, 8, 13, 14

_BITS = {1: 32, 2: 8, 3: 8, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16}
"""Of one element, by number of its type in ONNX."""

_ARRAYS: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

_NUMPY: dict[int, Any] = {1: np.float32, 3: np.int8, 6: np.int32, 7: np.int64, 9: np.bool_,
                          10: np.float16, 11: np.float64}  # fmt: skip


@dataclass(frozen=True)
class Weight:
    """An initializer whose bytes lie in another file, mapped."""

    name: str
    type: int
    """Its number in ONNX."""
    array: NDArray[Any]


def mapped_weights(path: Path, files: Mapping[str, HeldFile]) -> list[Weight]:
    """Return the weights that a graph keeps in other files; `files` are those next to it.

    Raises: EngineError for weights that are elsewhere.
    """
    with _sound(path):
        return [_weight(fields, files) for fields in _external(bytes(files[path.name].data))]


def files_of(path: Path, files: Mapping[str, HeldFile]) -> set[str]:
    """Return the names of the files that a graph reads.

    Raises: EngineError for one that is not among `files`.
    """
    with _sound(path):
        names = {
            _place(fields).get("location", "") for fields in _external(bytes(files[path.name].data))
        }
        return {name for name in names if files[name]}


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise EngineError(
            f"{path} needs the file {error.args[0]!r}, which is not among those that the manifest "
            "lists next to it: build the bundle again with `specrt build RECIPE`"
        ) from None
    except (ValueError, IndexError) as error:
        raise EngineError(
            f"{path} is not a sound graph ({error}); build the bundle again"
        ) from error


def _weight(fields: Mapping[int, list[Any]], files: Mapping[str, HeldFile]) -> Weight:
    place = _place(fields)
    kind, name = fields.get(_TYPE, [0])[-1], fields.get(_NAME, [b""])[-1].decode()
    shape = tuple(_integers(fields.get(_DIMS, [])))
    data = files[place.get("location", "")].data
    if kind not in _BITS:
        raise ValueError(f"{name} is of type {kind}, which no weights in other files have")
    size, offset = prod(shape) * _BITS[kind] // 8, int(place.get("offset", 0))
    if int(place.get("length", size)) != size or not 0 <= offset <= len(data) - size:
        raise ValueError(f"{name} lies outside of {place.get('location')!r}")
    flat = np.frombuffer(data, np.uint8, size, offset)
    array = flat.view(_NUMPY.get(kind, _ARRAYS[_BITS[kind]])).reshape(shape)
    return Weight(name, kind, array)


def _place(fields: Mapping[int, list[Any]]) -> dict[str, str]:
    entries = [dict(_strings(entry)) for entry in fields.get(_EXTERNAL, [])]
    return {entry.get(1, ""): entry.get(2, "") for entry in entries}


def _external(model: bytes) -> Iterator[dict[int, list[Any]]]:
    """Yield the fields of every tensor that says its bytes lie elsewhere.

    Raises: ValueError for one that is not an initializer of the graph itself.
    """
    left = [("model", model, "")]
    while left:
        kind, data, way = left.pop()
        if kind == "tensor":
            fields: dict[int, list[Any]] = {}
            for number, value in fields_of(data):
                fields.setdefault(number, []).append(value)
            if fields.get(_LOCATION, [0])[-1]:
                if way != "model graph ":
                    raise ValueError("a tensor that is not an initializer lies in another file")
                yield fields
            continue
        for number, value in fields_of(data):
            inner = _WITHIN[kind].get(number)
            if inner and isinstance(value, bytes):
                left.append((inner, value, f"{way}{kind} "))


def fields_of(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield numbers and values of the fields of a message."""
    at, end = 0, len(data)
    while at < end:
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"it has a field of the kind {wire}")
        size, at = _varint(data, at) if wire == 2 else (8 if wire == 1 else 4, at)
        if size > end - at:
            raise ValueError("it ends too early")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("it holds a number of more than 64 bits")


def _integers(values: list[Any]) -> Iterator[int]:
    """Yield repeated integers, which may be packed."""
    for value in values:
        if isinstance(value, int):
            yield value
        else:
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                yield one


def _strings(data: bytes) -> Iterator[tuple[int, str]]:
    for number, value in fields_of(data):
        if isinstance(value, bytes):
            yield number, value.decode()
