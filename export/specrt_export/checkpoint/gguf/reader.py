"""The container of a GGUF file: its metadata, and where each tensor lies.

    magic, version, number of tensors, number of values
    values    key, type, value                   (an array: type of items, number, items)
    tensors   name, axes, shape, format, offset  (the innermost axis first; from the data's begin)
    data      tensors, each on a multiple of `general.alignment`

Source: ggml, docs/gguf.md. A file is data of strangers: each number is held to the bytes that are
left before anything is made of its size.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt.held_file import open_file
from specrt_export.checkpoint.gguf.blocks import ABSENT, FORMATS, Format
from specrt_export.checkpoint.safetensors_file import count_formats
from specrt_export.checkpoint.tensor_rows import TensorRows

SUFFIX = ".gguf"

MAGIC = b"GGUF"

VERSIONS = (2, 3)

OLDER_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
"""What files of this family began with before GGUF, as their bytes lie."""

ALIGNMENT, LARGEST_ALIGNMENT = 32, 1 << 20

MOST_AXES = 4

LARGEST = 1 << 40
"""More than any size that a model has."""

NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
"""How numbers lie, by the number of their type."""

BOOL, STRING, ARRAY = 7, 8, 9

LEAST_VALUE, LEAST_TENSOR = 8 + 1 + 4 + 1, 8 + 1 + 4 + 8 + 4 + 8
"""Bytes that an entry takes at least: what a file has room for bounds what it may claim."""

_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.gguf")


_BYTE = np.dtype(np.uint8)


class Strings(Sequence[str]):
    """An array of texts, decoded when they are asked for: 8 bytes each until then."""

    def __init__(self, data: bytes, begins: NDArray[np.int64], where: str) -> None:
        self._data = data
        self._begins = begins
        self._where = where

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        begin = int(self._begins[index])
        size = int.from_bytes(self._data[begin : begin + 8], "little")
        try:
            return self._data[begin + 8 : begin + 8 + size].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self._where}: item {index} is not UTF-8 ({error.reason} at byte "
                f"{error.start}); fetch the file again, or convert the model again"
            ) from None


Value = int | float | bool | str | NDArray[Any] | Strings


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies, and as what."""

    name: str
    file: Path
    format: Format
    shape: tuple[int, ...]
    """The innermost axis last."""
    offset: int

    @property
    def row_items(self) -> int:
        """Numbers in one row; a vector is one row."""
        return self.shape[-1]

    @property
    def length(self) -> int:
        """Rows."""
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; blocks never reach over its end."""
        return self.row_items // self.format.items * self.format.bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.length * self.row_bytes

    def rows(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Read the blocks of rows `begin` to `end`, [end - begin, row_bytes].

        Raises: CheckpointError for a file that was cut short since.
        """
        row = (self.row_bytes,)
        return TensorRows(self.name, self.file, self.offset, _BYTE, row).read(begin, end)


@dataclass(frozen=True)
class GgufFile:
    """One model in GGUF, of one file or of several parts, that was looked at."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    @property
    def path(self) -> Path:
        """The file, or the first part."""
        return self.files[0]

    @property
    def quantized(self) -> bool:
        """Whether any tensor is stored as whole numbers."""
        return any(tensor.format.decode is not None for tensor in self.tensors.values())

    def formats(self) -> str:
        """Return what its tensors are stored as and kept in, the most frequent first."""
        forms = (tensor.format for tensor in self.tensors.values())
        return count_formats(f"{form.name} {form.precision}".rstrip() for form in forms)

    def check_kept(self) -> None:
        """Refuse whole numbers that no engine holds as they are.

        Raises: CheckpointError naming the first tensor of them.
        """
        for tensor in self.tensors.values():
            form = tensor.format
            if form.decode is None or len(tensor.shape) == 2:
                continue
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is stored as {form.name}, and is not a matrix; take "
                f"a file of the model that llama-quantize wrote (this one has {self.formats()})"
            )

    @property
    def architecture(self) -> str:
        """Return what llama.cpp calls the kind of model."""
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text of the metadata.

        Raises: CheckpointError for another type, and for none without a default.
        """
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a whole number of 0 or more, as `text` does; a list must repeat one number."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if type(value) is not int or not 0 <= value <= LARGEST:
            raise self.wrong(key, f"a whole number from 0 to {LARGEST}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Return a finite number, as `text` does.

        The shortest that is the stored fp32: 1e-05, not 9.999999747378752e-06.
        """
        value = self._value(key, default)
        if type(value) not in (int, float) or not np.isfinite(value):
            raise self.wrong(key, "a finite number")
        number = float(value)
        short = float(str(np.float32(number))) if abs(number) < np.finfo(np.float32).max else number
        return short if np.float32(short) == np.float64(number) else number

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false, as `text` does."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def texts(self, key: str) -> Sequence[str]:
        """Return a list of texts, as `text` does; empty where the file has none."""
        value = self.metadata.get(key, ())
        if not isinstance(value, (Strings, tuple)):
            raise self.wrong(key, "a list of texts")
        return value

    def numbers(self, key: str) -> NDArray[Any]:
        """Return a list of numbers, as `text` does; empty where the file has none."""
        value = self.metadata.get(key, _NONE)
        if not isinstance(value, np.ndarray):
            raise self.wrong(key, "a list of numbers")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise CheckpointError(
                f"{self.path} has no {key}, which its model needs; convert the model again"
            )
        return value

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """Return the error for a value that is not what it has to be."""
        return CheckpointError(
            f"{self.path}: {key} is {shown(self.metadata.get(key))}; expected {expected}. Fetch "
            "the file again, or convert the model again"
        )


_NONE = np.empty(0, np.float32)


def shown(value: Any) -> str:
    """Return a value for an error message, short whatever it is."""
    if isinstance(value, (np.ndarray, Strings)):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor entries of a file, and of all its parts if it is one of several.

    Raises: CheckpointError naming file, value, what was expected and what to do.
    """
    first = _first_part(path)
    values, tensors = _read(first)
    count = _split_count(first, values)
    if count < 2:
        return GgufFile((first,), MappingProxyType(values), MappingProxyType(tensors))
    files = [first]
    for number, part in enumerate(_parts(first, count)[1:], start=1):
        of_part, more = _read(part)
        if of_part.get("split.no") != number or of_part.get("split.count") != count:
            raise CheckpointError(
                f"{part} says that it is part {shown(of_part.get('split.no'))} (counted from 0) of "
                f"{shown(of_part.get('split.count'))}; its name says {number} of {count}. Fetch "
                "all parts again, under their own names"
            )
        twice = next((name for name in more if name in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"{part} holds {twice}, and so does {tensors[twice].file}; fetch all parts again"
            )
        tensors |= more
        files.append(part)
    claimed = values.get("split.tensors.count", len(tensors))
    if claimed != len(tensors):
        raise CheckpointError(
            f"{first} names {shown(claimed)} tensors in {count} parts, which hold {len(tensors)}; "
            "fetch all parts again"
        )
    return GgufFile(tuple(files), MappingProxyType(values), MappingProxyType(tensors))


def _first_part(path: Path) -> Path:
    match = _PART.fullmatch(path.name)
    if match is None or match[2] == "00001":
        return path
    first = path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")
    if not first.is_file():
        raise CheckpointError(
            f"{path} is a part, and the first one is missing: {first.name}; fetch it too, into the "
            "same folder"
        )
    return first


def _split_count(path: Path, values: dict[str, Value]) -> int:
    count = values.get("split.count", 1)
    named = _PART.fullmatch(path.name)
    if type(count) is not int or (count > 1 and (named is None or int(named[3]) != count)):
        raise CheckpointError(
            f"{path} is one of {shown(count)} parts, which its name does not say; give all parts "
            "their own names, such as model-00001-of-00003.gguf"
        )
    return count


def _parts(first: Path, count: int) -> list[Path]:
    stem = first.name[: -len("00001-of-00001.gguf")]
    parts = [first.with_name(f"{stem}{n + 1:05}-of-{count:05}.gguf") for n in range(count)]
    missing = next((part.name for part in parts if not part.is_file()), None)
    if missing is not None:
        raise CheckpointError(
            f"{first.parent} lacks {missing}, one of {count} parts; fetch it too, into that folder"
        )
    return parts


def _read(path: Path) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    """Read one file, which is mapped for as long as that takes."""
    try:
        with open_file(path) as file:
            head = file.read(8)
            _check_head(path, head)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _check_head(path: Path, head: bytes) -> None:
    if head[:4] in OLDER_MAGICS:
        raise CheckpointError(
            f"{path} is of the format before GGUF; fetch the model in GGUF, or convert it again"
        )
    if head[:4] != MAGIC:
        raise CheckpointError(
            f"{path} begins with {head[:4]!r}, not with {MAGIC!r}: it is not a GGUF file; name "
            "another, or a folder with config.json"
        )
    version = int.from_bytes(head[4:8], "little")
    if int.from_bytes(head[4:8], "big") in (1, *VERSIONS):
        raise CheckpointError(
            f"{path} is big endian, for another kind of processor; fetch the little endian file, "
            "or convert the model again without --bigendian"
        )
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path} is of GGUF version {version}; expected 2 or 3. Fetch a newer file, or convert "
            "the model again"
        )


class _Header:
    """Reads values and tensor entries of a mapped file, in order."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 8
        self._end = len(data)

    def read(self) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
        tensors = self._count("tensors", LEAST_TENSOR)
        values = dict(self._values(self._count("values", LEAST_VALUE)))
        alignment = values.get("general.alignment", ALIGNMENT)
        if (
            type(alignment) is not int
            or not 1 <= alignment <= LARGEST_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise CheckpointError(
                f"{self._path}: general.alignment is {shown(alignment)}; expected a power of two "
                f"up to {LARGEST_ALIGNMENT}. Convert the model again"
            )
        entries = [self._tensor(alignment) for _ in range(tensors)]
        begin = -(-self._at // alignment) * alignment
        return values, self._placed(entries, begin)

    def _take(self, size: int, what: str) -> int:
        """Step over bytes; return where they begin.

        Raises: CheckpointError where the file has fewer.
        """
        begin = self._at
        if size > self._end - begin:
            raise self._damaged(f"{what} takes {size} bytes at byte {begin} of {self._end}")
        self._at = begin + size
        return begin

    def _number(self, layout: struct.Struct, what: str) -> Any:
        return layout.unpack_from(self._data, self._take(layout.size, what))[0]

    def _count(self, what: str, least: int) -> int:
        """Read how many entries follow, each of at least so many bytes."""
        count: int = self._number(_U64, f"the number of {what}")
        if count * least > self._end - self._at:
            raise self._damaged(f"it claims {count} {what} in {self._end - self._at} bytes")
        return count

    def _text(self, what: str) -> str:
        size = self._number(_U64, f"the length of {what}")
        begin = self._take(size, what)
        try:
            return self._data[begin : begin + size].decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"{what} at byte {begin} is not UTF-8: {error.reason}") from None

    def _values(self, count: int) -> Iterator[tuple[str, Value]]:
        known: set[str] = set()
        for number in range(count):
            key = self._text(f"the key of value {number}")
            if key in known or not key:
                raise self._damaged(f"key {shown(key)} is there twice" if key else "a key is empty")
            known.add(key)
            kind = self._number(_U32, f"the type of {shown(key)}")
            yield key, self._array(key) if kind == ARRAY else self._scalar(key, kind)

    def _scalar(self, key: str, kind: int) -> Value:
        if kind == STRING:
            return self._text(shown(key))
        if kind == BOOL:
            byte = self._data[self._take(1, shown(key))]
            if byte > 1:
                raise self._damaged(f"{shown(key)} is {byte}, where 0 or 1 is expected")
            return bool(byte)
        if kind not in NUMBERS:
            raise self._unknown(key, kind)
        dtype = NUMBERS[kind]
        begin = self._take(dtype.itemsize, shown(key))
        number: int | float = np.frombuffer(self._data, dtype, 1, begin)[0].item()
        return number

    def _array(self, key: str) -> Value:
        kind = self._number(_U32, f"the item type of {shown(key)}")
        if kind == ARRAY:
            raise self._damaged(f"{shown(key)} is a list of lists, which no model has")
        if kind == STRING:
            return self._strings(key)
        dtype = np.dtype(bool) if kind == BOOL else NUMBERS.get(kind)
        if dtype is None:
            raise self._unknown(key, kind)
        count = self._count(f"items of {shown(key)}", dtype.itemsize)
        begin = self._take(count * dtype.itemsize, shown(key))
        # Copied: the mapping is closed once the header is read.
        return np.frombuffer(self._data, dtype, count, begin).copy()

    def _strings(self, key: str) -> Strings:
        what = f"items of {shown(key)}"
        count = self._count(what, 8)
        start, begins = self._at, np.empty(count, np.int64)
        for index in range(count):
            begins[index] = self._at - start
            self._take(self._number(_U64, what), what)
        return Strings(self._data[start : self._at], begins, f"{self._path}: {shown(key)}")

    def _unknown(self, key: str, kind: int) -> CheckpointError:
        return self._damaged(f"{shown(key)} is of type {kind}; expected one from 0 to 12")

    def _tensor(self, alignment: int) -> GgufTensor:
        """Read one entry, whose offset counts from the data's begin."""
        name = self._text("the name of a tensor")
        what = shown(name)
        axes = self._number(_U32, f"the axes of {what}")
        if not 1 <= axes <= MOST_AXES:
            raise self._damaged(f"tensor {what} has {axes} axes; expected 1 to {MOST_AXES}")
        shape = tuple(self._number(_U64, f"the shape of {what}") for _ in range(axes))[::-1]
        format_ = self._format(what, self._number(_U32, f"the format of {what}"))
        if 0 in shape or shape[-1] % format_.items:
            raise self._damaged(
                f"tensor {what} of shape {list(shape)} is stored as {format_.name}, in blocks of "
                f"{format_.items} weights of a row"
            )
        offset = self._number(_U64, f"the offset of {what}")
        if offset % alignment:
            raise self._damaged(
                f"tensor {what} begins at byte {offset} of the data, no multiple of {alignment}"
            )
        return GgufTensor(name, self._path, format_, shape, offset)

    def _format(self, what: str, number: int) -> Format:
        if number in FORMATS:
            return FORMATS[number]
        known = ", ".join(format_.name for format_ in FORMATS.values())
        raise CheckpointError(
            f"{self._path}: tensor {what} is stored as {ABSENT.get(number, f'format {number}')}; "
            f"specrt reads {known}. Fetch a file such as Q4_K_M or Q8_0, or quantize the model "
            "again with llama-quantize"
        )

    def _placed(self, entries: list[GgufTensor], begin: int) -> dict[str, GgufTensor]:
        """Hold tensors to the file and to one another; count their offsets from its begin."""
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry.name in tensors or not entry.name:
                raise self._damaged(f"tensor {shown(entry.name)} is there twice or has no name")
            end = begin + entry.offset + entry.nbytes
            if end > self._end:
                raise self._damaged(
                    f"tensor {shown(entry.name)} ends at byte {end} of {self._end}: it is truncated"
                )
            tensors[entry.name] = GgufTensor(
                entry.name, entry.file, entry.format, entry.shape, begin + entry.offset
            )
        for one, other in pairwise(sorted(tensors.values(), key=lambda t: t.offset)):
            if one.offset + one.nbytes > other.offset:
                raise self._damaged(f"tensors {shown(one.name)} and {shown(other.name)} overlap")
        return tensors

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged ({what}); fetch it again")


_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
