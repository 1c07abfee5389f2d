"""Weights as small whole numbers: symmetric codes, one scale for each block of weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specrt_export.portable.external_data import Floats

Codes = NDArray[np.int8]


INT8_MOST = 127


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


FP8_MOST = 448.0


INT4_LEAST, INT4_MOST = -8, 7


EXTREMES = tuple(float(value) for value in np.linspace(7.4, 10.5, 8))
"""Codes, before rounding and clipping, that the largest weight of a block is tried at.

Eight leave 0.8 % more squared error than 45 over a wider range, at a fifth of the time.
"""


_CHUNK = 1 << 16
"""Weights worked on at once: few enough that every step finds them in the cache."""


_SMALLEST = np.float32(1e-30)
"""A block whose weights are all smaller is stored as zeros, before 1 / scale overflows."""


def encode(
    weights: Floats, precision: str, block: int, *, positive: bool = False
) -> tuple[Codes, Floats]:
    """Return codes and scales of weights; codes of fp8 are the bytes of its numbers.

    `positive` keeps scales of int4 from being negative; of normal weights that leaves 9 % more
    squared error in blocks of 128, and 14 % in blocks of 32.
    Shapes: weights and codes [N, K]; scales [N, K / block]; K is a multiple of block.
    """
    blocks = np.ascontiguousarray(weights).reshape(-1, block)
    codes = np.empty(blocks.shape, np.int8)
    scales = np.empty(len(blocks), np.float32)
    finders: dict[str, Callable[[Floats], tuple[Codes, Floats]]] = {
        "int4": partial(_int4, positive=positive),
        "int8": _int8,
        "fp8": _fp8,
    }
    find = finders[precision]
    step = max(1, _CHUNK // block)
    for at in range(0, len(blocks), step):
        # One row for each place in a block: sums over a block are then sums of long rows.
        rows = np.ascontiguousarray(blocks[at : at + step].T)
        block_codes, scale = find(rows)
        codes[at : at + step] = block_codes.T
        scales[at : at + step] = scale
    return codes.reshape(weights.shape), scales.reshape(len(weights), -1)


def int4_scales(rows: Floats, *, positive: bool) -> Floats:
    """Return the scales [N] of least squared error of a block [block, N] of int4 weights."""
    scales = np.empty(rows.shape[1], np.float32)
    step = max(1, _CHUNK // len(rows))
    for at in range(0, len(scales), step):
        part = np.ascontiguousarray(rows[:, at : at + step])
        scales[at : at + step] = _int4(part, positive=positive)[1]
    return scales


def decode(codes: NDArray[Any], scales: Floats) -> Floats:
    """Return the weights [N, K] that codes [N, K] and scales [N, K / block] stand for."""
    blocks = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    return blocks.reshape(codes.shape)


def pack(codes: Codes) -> NDArray[np.uint8]:
    """Return int4 codes [N, K] two to a byte, [N, K / 2], the first in the low half."""
    pairs = codes.view(np.uint8).reshape(len(codes), -1, 2)
    return (pairs[..., 0] & np.uint8(15)) | (pairs[..., 1] << np.uint8(4))


def unpack(packed: NDArray[np.uint8]) -> Codes:
    """Return the int4 codes [N, K] of bytes [N, K / 2]."""
    # Up and down again as a signed number, which copies the sign into the upper half.
    halves: Codes = np.stack([packed << 4, packed & 0xF0], axis=-1).view(np.int8)
    codes: Codes = (halves >> 4).reshape(len(packed), -1)
    return codes


def _int8(rows: Floats) -> tuple[Codes, Floats]:
    """Round to 127 steps of the largest weight."""
    scales = _half(_scales(rows, INT8_MOST))
    codes = np.rint(rows / scales)
    return np.clip(codes, -INT8_MOST, INT8_MOST).astype(np.int8), scales


_LEAST_HALF = np.float32(2.0**-14)
"""The least normal number of fp16."""


def _half(scales: Floats) -> Floats:
    """Round scales to fp16, in which they are stored where it holds them all.

    Those that fp16 would hold with fewer digits stay as they are. Of int4 and int8 weights rounding
    adds less than 0.1 % to the squared error.
    """
    rounded = np.clip(scales, -65504, 65504).astype(np.float16).astype(np.float32)
    fits = (np.abs(scales) >= _LEAST_HALF) & (np.abs(scales) <= 65504)
    return np.where(fits, rounded, scales)


def _fp8(rows: Floats) -> tuple[Codes, Floats]:
    """Round to numbers of 4 bits of exponent and 3 of mantissa, the largest weight being 448.

    Source: Micikevicius et al. 2022, arXiv:2209.05433 (E4M3).
    """
    scales = _scales(rows, FP8_MOST)
    return (rows / scales).astype(FP8).view(np.int8), scales


def _scales(rows: Floats, most: float) -> Floats:
    """Return scales that bring the largest weight to `most`; none is 0 or less: TensorRT's rule."""
    largest = np.maximum(rows.max(0), -rows.min(0))
    largest[largest < _SMALLEST] = 0
    return np.where(largest > 0, largest / np.float32(most), np.float32(1)).astype(np.float32)


def _int4(rows: Floats, *, positive: bool) -> tuple[Codes, Floats]:
    """Search each block's scale for the least squared error.

    The largest weight is put on the side of -8, where codes reach one step further, so scales may
    be negative: DequantizeLinear, MatMulNBits and GatherBlockQuantized take that, and TensorRT's
    parser does not.
    For codes q of weights w the best scale is w·q / q·q, and it explains (w·q)² / q·q of w·w.
    """
    extreme = np.where(-rows.min(0) >= rows.max(0), rows.min(0), rows.max(0))
    extreme[np.abs(extreme) < _SMALLEST] = 0
    empty = extreme == 0
    extreme = -np.abs(extreme) if positive else extreme
    unit: Floats = np.divide(-1, np.where(empty, 1, extreme), dtype=np.float32)
    most = np.full(len(unit), -1, np.float32)
    scales = np.ones_like(most)
    codes = np.empty_like(rows)
    for code in EXTREMES:
        _round(rows, unit * np.float32(code), codes)
        # In units of the largest weight, so that squares of small weights do not vanish.
        match = np.einsum("ij,ij->j", rows, codes) * unit
        scale = match / np.maximum(np.einsum("ij,ij->j", codes, codes), 1)
        explained = match * scale
        better = explained > most
        np.copyto(most, explained, where=better)
        np.copyto(scales, scale, where=better)
    scales = _half(np.where(empty | (scales == 0), np.float32(1), scales / unit))
    inverse = np.where(empty, np.float32(0), np.float32(1) / scales)
    _round(rows, inverse, codes)
    return codes.astype(np.int8), scales


def _round(rows: Floats, inverse: Floats, out: NDArray[Any]) -> None:
    np.multiply(rows, inverse, out=out)
    np.rint(out, out=out)
    np.maximum(out, INT4_LEAST, out=out)
    np.minimum(out, INT4_MOST, out=out)
