"""Weights as codes of 4 or 8 bits, in blocks that share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

Integers = NDArray[np.int8]


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)

FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([FP4_VALUES, -FP4_VALUES])
"""What the codes of fp4 stand for: a sign, two bits of exponent and one of mantissa.

Source: OCP Microscaling Formats (MX) 1.0, 5.3.3 (E2M1).
"""


@dataclass(frozen=True)
class Codes:
    """Rows of weights in codes, and what these stand for in fp32, rounded in this order.

    ```
    int4, int8      scale * (code - zero), or scale * code - minimum
    fp4, fp8        scale * value of the code
    ```
    """

    format: str
    """int4, int8, fp4 or fp8."""
    codes: NDArray[Any]
    """[N, K]: int8, or uint8 where no code is negative; of fp4 and fp8 the bits, uint8."""
    scales: Floats
    """[N, K / block]."""
    zeros: NDArray[Any] | None = None
    """[N, K / block], of the type of the codes and as small; None where all are 0."""
    minimums: Floats | None = None
    """[N, K / block]; None where there are none. There are never zeros and minimums."""

    def floats(self) -> Floats:
        """Return the weights [N, K]."""
        blocks = self._values().reshape(*self.scales.shape, -1)
        if self.zeros is not None:
            blocks -= self.zeros[..., None]
        blocks *= self.scales[..., None]
        if self.minimums is not None:
            blocks -= self.minimums[..., None]
        return blocks.reshape(self.codes.shape)

    def _values(self) -> Floats:
        if self.format == "fp4":
            return np.take(FP4_VALUES, self.codes)
        stored = self.codes.view(FP8) if self.format == "fp8" else self.codes
        values: Floats = stored.astype(np.float32)
        return values


class TensorOrigin(NamedTuple):
    """The tensor of a file that a weight of a checkpoint is from."""

    file: Path
    tensor: str
    format: str
    """What the file's own kind calls its format."""


class CodedWeight(Protocol):
    """A weight [N, K] that a checkpoint holds in codes.

    All of its rows have zeros, or all minimums, or none of them has either; codes of one type.
    """

    @property
    def name(self) -> str:
        """What transformers calls it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the model."""

    @property
    def precision(self) -> str:
        """The format of its codes: int4, int8, fp4 or fp8."""

    @property
    def block(self) -> int:
        """Weights of a row that share a scale."""

    @property
    def inputs(self) -> NDArray[np.int64] | None:
        """The input that each column of the codes multiplies [K]; None where they are in order."""

    @property
    def origin(self) -> TensorOrigin:
        """Where it is from."""

    def codes(self, begin: int, end: int) -> Codes:
        """Return rows `begin` to `end`.

        Raises: CheckpointError for scales that are not finite numbers.
        """

    def floats(self, begin: int, end: int) -> Floats:
        """Return rows `begin` to `end` as the fp32 weights that they stand for, inputs in order.

        Raises: CheckpointError.
        """


INT8_MOST = 127


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
) -> tuple[Integers, Floats]:
    """Return codes and scales of weights; codes of fp8 are the bytes of its numbers.

    `positive` keeps scales of int4 from being negative; of normal weights that leaves 9 % more
    squared error in blocks of 128, and 14 % in blocks of 32.
    Shapes: weights and codes [N, K]; scales [N, K / block]; K is a multiple of block.
    """
    blocks = np.ascontiguousarray(weights).reshape(-1, block)
    codes = np.empty(blocks.shape, np.int8)
    scales = np.empty(len(blocks), np.float32)
    finders: dict[str, Callable[[Floats], tuple[Integers, Floats]]] = {
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


def encode_codes(
    weights: Floats, precision: str, block: int, *, positive: bool = False, zeros: bool = False
) -> Codes:
    """Return weights in codes; with `zeros` int4 is not symmetric."""
    if not zeros or precision != "int4":
        return Codes(precision, *encode(weights, precision, block, positive=positive))
    blocks = np.ascontiguousarray(weights).reshape(-1, block)
    codes = np.empty(blocks.shape, np.int8)
    scales, found = np.empty(len(blocks), np.float32), np.empty(len(blocks), np.int8)
    step = max(1, _CHUNK // block)
    for at in range(0, len(blocks), step):
        part = slice(at, at + step)
        rows, scales[part], found[part] = _int4_with_zeros(np.ascontiguousarray(blocks[part].T))
        codes[part] = rows.T
    shape = len(weights), -1
    return Codes("int4", codes.reshape(weights.shape), scales.reshape(shape), found.reshape(shape))


class BlockGrid(NamedTuple):
    """The weights that a block of int4 may have, for each of several rows."""

    scales: Floats
    """[N]."""
    zeros: Integers | None = None
    """[N]; None where all are 0."""


def int4_grid(rows: Floats, *, positive: bool = False, zeros: bool = False) -> BlockGrid:
    """Return scales, and zeros, of least squared error of a block [block, N] of int4 weights."""
    scales = np.empty(rows.shape[1], np.float32)
    found = np.zeros(rows.shape[1], np.int8)
    step = max(1, _CHUNK // len(rows))
    for at in range(0, len(scales), step):
        part = np.ascontiguousarray(rows[:, at : at + step])
        if zeros:
            _, scales[at : at + step], found[at : at + step] = _int4_with_zeros(part)
        else:
            scales[at : at + step] = _int4(part, positive=positive)[1]
    return BlockGrid(scales, found if zeros else None)


def decode(codes: NDArray[Any], scales: Floats) -> Floats:
    """Return the weights [N, K] that codes [N, K] and scales [N, K / block] stand for."""
    blocks = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    return blocks.reshape(codes.shape)


def pack(codes: NDArray[Any]) -> NDArray[np.uint8]:
    """Return int4 codes [N, K] two to a byte, [N, K / 2], the first in the low half."""
    pairs = codes.view(np.uint8).reshape(len(codes), -1, 2)
    return (pairs[..., 0] & np.uint8(15)) | (pairs[..., 1] << np.uint8(4))


def unpack(packed: NDArray[np.uint8]) -> Integers:
    """Return the int4 codes [N, K] of bytes [N, K / 2]."""
    # Up and down again as a signed number, which copies the sign into the upper half.
    halves: Integers = np.stack([packed << 4, packed & 0xF0], axis=-1).view(np.int8)
    codes: Integers = (halves >> 4).reshape(len(packed), -1)
    return codes


def unpack_unsigned(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes [N, K] from 0 to 15 of bytes [N, K / 2]."""
    both = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _int8(rows: Floats) -> tuple[Integers, Floats]:
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


def _fp8(rows: Floats) -> tuple[Integers, Floats]:
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


def _int4(rows: Floats, *, positive: bool) -> tuple[Integers, Floats]:
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


SPANS = tuple(float(value) for value in np.linspace(0.7, 1.0, 8))
"""Shares of what lies between the least and the largest weight of a block that codes span."""


def _int4_with_zeros(rows: Floats) -> tuple[Integers, Floats, Integers]:
    """Search each block's scale and zero, as `_int4` does its scale.

    Codes from -8 to 7 span from the least weight, or 0, to the largest, or 0, or less than that.
    """
    low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
    empty = high - low < _SMALLEST
    unit: Floats = np.divide(1, np.where(empty, 1, high - low), dtype=np.float32)
    most = np.full(len(unit), -1, np.float32)
    scales, zeros = np.ones_like(most), np.zeros_like(most)
    codes = np.empty_like(rows)
    for span in SPANS:
        inverse = unit * np.float32((INT4_MOST - INT4_LEAST) / span)
        zero = np.clip(np.rint(INT4_LEAST - low * inverse * span), INT4_LEAST, INT4_MOST)
        _round(rows, inverse, codes, zero)
        match = np.einsum("ij,ij->j", rows, codes) * unit
        scale = match / np.maximum(np.einsum("ij,ij->j", codes, codes), 1)
        explained = match * scale
        better = explained > most
        np.copyto(most, explained, where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(zeros, zero, where=better)
    scales = _half(np.where(empty | (scales <= 0), np.float32(1), scales / unit))
    zeros[empty] = 0
    _round(rows, np.where(empty, np.float32(0), np.float32(1) / scales), codes, zeros)
    codes += zeros
    return codes.astype(np.int8), scales, zeros.astype(np.int8)


def _round(rows: Floats, inverse: Floats, out: NDArray[Any], zeros: Floats | float = 0.0) -> None:
    """Round to what a code may be less its zero."""
    np.multiply(rows, inverse, out=out)
    np.rint(out, out=out)
    np.maximum(out, INT4_LEAST - zeros, out=out)
    np.minimum(out, INT4_MOST - zeros, out=out)
