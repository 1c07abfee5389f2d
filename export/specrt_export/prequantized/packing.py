"""Numbers of quantized checkpoints: whole ones packed in words, and scales."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specrt_export.quantize.codes import Floats, unpack_unsigned

Words = NDArray[np.uint32]

Bytes = NDArray[np.uint8]


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
    return unpack_unsigned(data) if bits == 4 else data


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
