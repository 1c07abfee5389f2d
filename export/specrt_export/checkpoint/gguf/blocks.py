"""The formats that GGUF stores weights in: blocks of a row, as whole numbers and their scales.

A weight is `scale * code - minimum`, in fp32 and in that order, to the last bit what ggml makes
of the block: products of an fp16 scale and a whole number of 8 bits are exact in fp32.
Source: ggml, ggml-quants.c (dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt_export.checkpoint.codes import Codes, Floats
from specrt_export.checkpoint.tensor_rows import widen_bf16

Bytes = NDArray[np.uint8]

Decode = Callable[[Bytes], tuple[NDArray[Any], Floats, Floats | None]]


@dataclass(frozen=True)
class Format:
    """How ggml stores some weights of a row."""

    name: str
    items: int
    """Weights in a block of the file."""
    bytes: int
    dtype: str = ""
    """What floats are called in safetensors; empty for whole numbers."""
    block: int = 0
    """Weights that share a scale; 0 for floats."""
    least: int = 0
    most: int = 0
    """Codes there are."""
    minimums: bool = False
    decode: Decode | None = None

    @property
    def precision(self) -> str:
        """What holds its codes as they are; empty for floats."""
        if self.decode is None:
            return ""
        small = (self.least >= -8 and self.most <= 7) or (self.least >= 0 and self.most <= 15)
        return "int4" if small else "int8"

    def codes(self, rows: Bytes) -> Codes:
        """Return rows of blocks [N, row_bytes] as whole numbers."""
        assert self.decode is not None, f"{self.name} holds floats"
        codes, scales, minimums = self.decode(rows.reshape(-1, self.bytes))
        count = len(rows)
        return Codes(
            self.precision,
            codes.reshape(count, -1),
            scales.reshape(count, -1),
            minimums=None if minimums is None else minimums.reshape(count, -1),
        )

    def floats(self, rows: Bytes) -> Floats:
        """Return rows of blocks [N, row_bytes] as fp32 weights [N, K]."""
        if self.decode is not None:
            return self.codes(rows).floats()
        if self.dtype == "BF16":
            return widen_bf16(rows.view("<u2"))
        return rows.view("<f2" if self.dtype == "F16" else "<f4").astype(np.float32)


def _half(blocks: Bytes, begin: int) -> Floats:
    """Return the fp16 numbers at some byte of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view("<f2").astype(np.float32)


def _nibbles(blocks: Bytes, begin: int, size: int, group: int) -> Bytes:
    """Return the low halves of each group of bytes, then the high ones, [blocks, 2 * size]."""
    grouped = blocks[:, begin : begin + size].reshape(len(blocks), -1, 1, group)
    halves = np.concatenate([grouped & np.uint8(15), grouped >> np.uint8(4)], axis=2)
    return halves.reshape(len(blocks), 2 * size)


def _fifth_bits(blocks: Bytes, begin: int) -> Bytes:
    """Return a bit for each of 32 weights, worth 16, of 4 bytes."""
    bits = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
    return bits << np.uint8(4)


def _signed(codes: Bytes, zero: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(zero)


def _q4_0(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    return _signed(_nibbles(blocks, 2, 16, 16), 8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    # What is stored is added, so its negative is subtracted.
    return _nibbles(blocks, 4, 16, 16), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    codes = _nibbles(blocks, 6, 16, 16) | _fifth_bits(blocks, 2)
    return _signed(codes, 16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    codes = _nibbles(blocks, 8, 16, 16) | _fifth_bits(blocks, 4)
    return codes, _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _six_bits(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return the scales and minimums [blocks, 8] that 12 bytes from the fourth on hold.

    Byte 4 + i and 8 + i hold scale and minimum i in their lower six bits, and above them the upper
    two of scale and minimum 4 + i, whose lower four are the halves of byte 12 + i.
    """
    low, middle, high = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = [low & np.uint8(63), (high & np.uint8(15)) | ((low >> np.uint8(2)) & np.uint8(48))]
    minimums = [
        middle & np.uint8(63),
        (high >> np.uint8(4)) | ((middle >> np.uint8(2)) & np.uint8(48)),
    ]
    return (
        _half(blocks, 0) * np.concatenate(scales, axis=1).astype(np.float32),
        _half(blocks, 2) * np.concatenate(minimums, axis=1).astype(np.float32),
    )


def _q4_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    return _nibbles(blocks, 16, 128, 32), *_six_bits(blocks)


def _q5_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    # Bit j of byte i belongs to weight i of the j-th 32.
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little").transpose(0, 2, 1)
    upper = bits.reshape(len(blocks), 256) << np.uint8(4)
    return _nibbles(blocks, 48, 128, 32) | upper, *_six_bits(blocks)


def _q6_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    # Two bits each of 32 bytes belong to four runs of 32 weights.
    pairs = blocks[:, 128:192].reshape(len(blocks), 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    upper = ((pairs >> shifts) & np.uint8(3)).reshape(len(blocks), 256) << np.uint8(4)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (
        _signed(_nibbles(blocks, 0, 128, 64) | upper, 32),
        _half(blocks, 208) * scales,
        None,
    )


FORMATS = {
    0: Format("F32", 1, 4, "F32"),
    1: Format("F16", 1, 2, "F16"),
    30: Format("BF16", 1, 2, "BF16"),
    2: Format("Q4_0", 32, 18, "", 32, -8, 7, False, _q4_0),
    3: Format("Q4_1", 32, 20, "", 32, 0, 15, True, _q4_1),
    6: Format("Q5_0", 32, 22, "", 32, -16, 15, False, _q5_0),
    7: Format("Q5_1", 32, 24, "", 32, 0, 31, True, _q5_1),
    8: Format("Q8_0", 32, 34, "", 32, -128, 127, False, _q8_0),
    12: Format("Q4_K", 256, 144, "", 32, 0, 15, True, _q4_k),
    13: Format("Q5_K", 256, 176, "", 32, 0, 31, True, _q5_k),
    14: Format("Q6_K", 256, 210, "", 16, -32, 31, False, _q6_k),
}
"""By the number that stands in a file."""

# fmt: off
ABSENT = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}
# fmt: on
"""Formats that are refused, by name."""
