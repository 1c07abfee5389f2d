"""The formats that GGUF stores weights in: blocks of a row, as codes and their scales.

A weight is `scale * code - minimum`, in fp32 and in that order, to the last bit what ggml makes
of the block: products of an fp16 scale and a whole number of 8 bits are exact in fp32. Codes are
whole numbers, but those of MXFP4 are fp4.
Source: ggml, ggml-quants.c (dequantize_row_*).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
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
    precision: str = ""
    """What holds its codes as they are; empty for floats."""
    block: int = 0
    """Weights that share a scale; 0 for floats."""
    decode: Decode | None = None
    minimums: bool = False
    dtype: str = ""
    """What floats are called in safetensors; empty for codes."""

    def codes(self, rows: Bytes) -> Codes:
        """Return rows of blocks [N, row_bytes] as codes."""
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


def _fields(data: Bytes, bits: int, group: int) -> Bytes:
    """Return the lowest bits of each group of bytes, then the next ones, up to the highest."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    fields = data.reshape(len(data), -1, 1, group) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), -1)


def _signed(codes: NDArray[Any], zero: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(zero)


def _q4_0(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    return _signed(_fields(blocks[:, 2:], 4, 16), 8), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    # What is stored is added, so its negative is subtracted.
    return _fields(blocks[:, 4:], 4, 16), _half(blocks, 0), -_half(blocks, 2)


def _q5_0(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    codes = _fields(blocks[:, 6:], 4, 16) | _fields(blocks[:, 2:6], 1, 1) << 4
    return _signed(codes, 16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    codes = _fields(blocks[:, 8:], 4, 16) | _fields(blocks[:, 4:8], 1, 1) << 4
    return codes, _half(blocks, 0), -_half(blocks, 2)


def _q8_0(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _q2_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    # A scale and a minimum share a byte, the scale in its lower half.
    scales, minimums = np.hsplit(_fields(blocks[:, :16], 4, 16).astype(np.float32), 2)
    codes = _fields(blocks[:, 16:80], 2, 32)
    return codes, _half(blocks, 80) * scales, _half(blocks, 82) * minimums


def _q3_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return _signed(codes, 4), _half(blocks, 108) * _signed(scales, 32).astype(np.float32), None


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
    return _fields(blocks[:, 16:], 4, 32), *_six_bits(blocks)


def _q5_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, Floats]:
    codes = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return codes, *_six_bits(blocks)


def _q6_k(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _signed(codes, 32), _half(blocks, 208) * scales, None


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What the codes of IQ4_NL and IQ4_XS stand for, close together near 0, where weights are many."""


def _iq4_nl(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    return _IQ4[_fields(blocks[:, 2:], 4, 16)], _half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    codes = _IQ4[_fields(blocks[:, 8:], 4, 16)]
    return codes, _half(blocks, 0) * _signed(scales, 32).astype(np.float32), None


def _mxfp4(blocks: Bytes) -> tuple[NDArray[Any], Floats, None]:
    codes = _fields(blocks[:, 1:], 4, 16)
    codes[codes == 8] = 0  # ggml has no zero with a sign
    # ggml halves the scale and doubles the values.
    return codes, blocks[:, :1].view(ml_dtypes.float8_e8m0fnu).astype(np.float32), None


FORMATS = {
    0: Format("F32", 1, 4, dtype="F32"),
    1: Format("F16", 1, 2, dtype="F16"),
    30: Format("BF16", 1, 2, dtype="BF16"),
    2: Format("Q4_0", 32, 18, "int4", 32, _q4_0),
    3: Format("Q4_1", 32, 20, "int4", 32, _q4_1, minimums=True),
    6: Format("Q5_0", 32, 22, "int8", 32, _q5_0),
    7: Format("Q5_1", 32, 24, "int8", 32, _q5_1, minimums=True),
    8: Format("Q8_0", 32, 34, "int8", 32, _q8_0),
    10: Format("Q2_K", 256, 84, "int4", 16, _q2_k, minimums=True),
    11: Format("Q3_K", 256, 110, "int4", 16, _q3_k),
    12: Format("Q4_K", 256, 144, "int4", 32, _q4_k, minimums=True),
    13: Format("Q5_K", 256, 176, "int8", 32, _q5_k, minimums=True),
    14: Format("Q6_K", 256, 210, "int8", 16, _q6_k),
    20: Format("IQ4_NL", 32, 18, "int8", 32, _iq4_nl),
    23: Format("IQ4_XS", 256, 136, "int8", 32, _iq4_xs),
    39: Format("MXFP4", 32, 17, "fp4", 32, _mxfp4),
}
"""By the number that stands in a file."""

# fmt: off
ABSENT = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}
# fmt: on
"""Formats that are refused, by name."""
