"""Files of safetensors: where each tensor lies, by the header, and the tensor as an array."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError, first_line
from specrt.held_file import open_file

_STORED: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<u4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""How tensors lie; words of packed numbers have no sign."""

ITEM_BYTES = {name: dtype.itemsize for name, dtype in _STORED.items()}

FLOAT_TYPES = ("F16", "BF16", "F32")
"""Those that models are computed in, and scales stored in."""

SLICE_BYTES = 16 << 20
"""Bytes of a tensor that are looked at together."""

_FIRST_BYTES = 64 << 10
"""Those by which most tensors differ already."""

HEADER_LIMIT = 100_000_000
"""Bytes; the safetensors format itself refuses longer headers."""


@dataclass(frozen=True)
class WeightBytes:
    """Where a weight lies: `bytes` bytes from `offset` of `file`, once that is there."""

    file: Path
    dtype: str
    """Of floats as safetensors names it; of whole numbers their format, such as `Q4_K`."""
    shape: tuple[int, ...]
    offset: int
    bytes: int


def count_formats(names: Iterable[str]) -> str:
    """Return what tensors are stored as, the most frequent first, as `"BF16 290, F32 1"`."""
    return ", ".join(f"{name} {count}" for name, count in Counter(names).most_common())


def read_header(path: Path) -> dict[str, WeightBytes]:
    """Read and validate one safetensors header.

    Raises: CheckpointError if the file is missing, truncated, or its header lies.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
                raise _damaged(path, f"its header claims {length} bytes of {size}")
            entries = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; fetch the checkpoint again") from None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, first_line(error)) from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is not an object")
    entries.pop("__metadata__", None)
    return {name: _weight(path, name, entry, 8 + length, size) for name, entry in entries.items()}


def _weight(path: Path, name: str, entry: Any, data: int, size: int) -> WeightBytes:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"the entry of {name} is malformed") from error
    if dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{path}: {name} is stored as {dtype}; expected one of {', '.join(ITEM_BYTES)}"
        )
    spans = 0 <= begin <= end and end - begin == prod(shape) * ITEM_BYTES[dtype]
    if min(shape, default=0) < 0 or not spans:
        raise _damaged(path, f"{name} {dtype}{list(shape)} spans bytes {begin} to {end}")
    if data + end > size:
        raise _damaged(path, f"{name} ends at byte {data + end} of {size}: it is truncated")
    return WeightBytes(path, dtype, shape, data + begin, end - begin)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged ({what}); fetch it again")


def map_array(tensor: WeightBytes) -> NDArray[Any]:
    """Map a tensor; what is read of it is what is sliced.

    Raises: CheckpointError for a file that is gone.
    """
    return _mapped(tensor).view(_STORED[tensor.dtype]).reshape(tensor.shape)


def _mapped(tensor: WeightBytes) -> NDArray[np.uint8]:
    if not tensor.bytes:  # which no system maps
        return np.empty(0, np.uint8)
    try:
        mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.bytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file} cannot be read ({error}); fetch it again") from error
    return mapped.view(np.ndarray)


def same_floats(one: WeightBytes, other: WeightBytes) -> bool:
    """Tell whether two tensors are floats of one type and shape, and equal bit for bit.

    Raises: CheckpointError for a file that is gone.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in FLOAT_TYPES:
        return False
    mine, theirs = _mapped(one), _mapped(other)
    ends = (_FIRST_BYTES, *range(SLICE_BYTES, one.bytes + SLICE_BYTES, SLICE_BYTES))
    return all(
        np.array_equal(mine[begin:end], theirs[begin:end]) for begin, end in pairwise((0, *ends))
    )


_EXPONENTS: dict[str, tuple[np.dtype[Any], int, int]] = {
    "F8_E4M3": (np.dtype(np.uint8), 0x7F, 0x7F),
    "F8_E5M2": (np.dtype(np.uint8), 0x7F, 0x7C),
    "F8_E8M0": (np.dtype(np.uint8), 0xFF, 0xFF),
    "F16": (np.dtype("<u2"), 0x7FFF, 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7FFF, 0x7F80),
    "F32": (np.dtype("<u4"), 0x7FFFFFFF, 0x7F800000),
}
"""By type of floats: how their bits are read, those besides the sign, and the least of these that
no finite number has."""


def check_finite(tensors: Mapping[str, WeightBytes]) -> None:
    """Refuse tensors that hold values that are not finite numbers, naming the first.

    Reads all of them, at about a GB a second.
    Raises: CheckpointError.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        finite = pool.map(_is_finite, tensors.values())
        bad = [name for name, good in zip(tensors, finite, strict=True) if not good]
    if bad:
        more = f", as {len(bad) - 1} more tensors do" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{tensors[bad[0]].file}: {bad[0]} holds NaN or infinity{more}; expected finite "
            "numbers: fetch the file again, or save the model again"
        )


def _is_finite(tensor: WeightBytes) -> bool:
    if tensor.dtype not in _EXPONENTS:
        return True
    dtype, digits, least = _EXPONENTS[tensor.dtype]
    step, data = SLICE_BYTES, _mapped(tensor)
    slices = (data[at : at + step].view(dtype) for at in range(0, tensor.bytes, step))
    return all(int((part & dtype.type(digits)).max()) < least for part in slices)
