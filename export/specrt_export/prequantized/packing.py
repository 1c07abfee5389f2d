"""Tensors of quantized checkpoints as arrays: slices of them, and whole numbers packed in words."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specrt.errors import CheckpointError
from specrt_export.gguf.model import WeightBytes
from specrt_export.quantize.codes import FP8, Floats

Words = NDArray[np.uint32]

Bytes = NDArray[np.uint8]

_STORED: dict[str, np.dtype[Any]] = {
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype("<u4"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F8_E4M3": FP8,
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""How tensors lie; words of packed numbers have no sign."""

SCALES = ("F16", "BF16", "F32")
"""Types of scales that are floats."""


def array(tensor: WeightBytes) -> NDArray[Any]:
    """Map a tensor; what is read of it is what is sliced.

    Raises: CheckpointError for a file that is gone.
    """
    dtype = _STORED[tensor.dtype]
    try:
        mapped = np.memmap(tensor.file, np.uint8, "r", tensor.offset, (tensor.bytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file} cannot be read ({error}); fetch it again") from error
    return mapped.view(np.ndarray).view(dtype).reshape(tensor.shape)


def as_floats(values: NDArray[Any]) -> Floats:
    """Return scales in fp32, which holds all of them; a byte without a sign is a power of two.

    Source: OCP Microscaling Formats (MX) 1.0, 5.4.1 (E8M0).
    """
    if values.dtype == np.uint8:
        values = values.view(ml_dtypes.float8_e8m0fnu)
    return values.astype(np.float32)


def unpacked(words: NDArray[Any], bits: int) -> Bytes:
    """Return the numbers of 4 or 8 bits of words [.., n], [.., n * 32 / bits], the lowest first."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return halves(data) if bits == 4 else data


def halves(data: Bytes) -> Bytes:
    """Return the halves of bytes [.., n], [.., 2 n], the low one first."""
    both = np.stack([data & np.uint8(15), data >> np.uint8(4)], axis=-1)
    return both.reshape(*data.shape[:-1], 2 * data.shape[-1])


_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight columns of a word are, in AWQ."""


def interleaved(words: Words) -> Bytes:
    """Return the numbers of AWQ's words [.., n], [.., 8 n]: columns 0 2 4 6 1 3 5 7 of each.

    Source: AutoAWQ, awq/utils/packing_utils.py (AWQ_ORDER).
    """
    numbers = unpacked(words, 4)
    return numbers.reshape(*words.shape, 8)[..., _PLACES].reshape(numbers.shape)


def raised(words: Words, bits: int) -> Words:
    """Return words of numbers each of which is one more.

    As one sum over the word, which undoes the difference by which GPTQModel writes version 1.
    """
    ones = sum(1 << at for at in range(0, 32, bits))
    return words + np.uint32(ones)
