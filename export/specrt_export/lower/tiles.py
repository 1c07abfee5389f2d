"""Weights in the layout of the CPU kernels: strips of 4 tiles of 16 outputs.

`runtime/cpp/src/kernels/kernels.hpp` describes the layout. All instruction sets read the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.quantize.codes import unpack

TILE = 16
"""Outputs of a tile."""

GROUP = 4
"""Inputs whose products an instruction sums."""

STRIP = 4
"""Tiles side by side, which a core reads as one stream."""


def tiled_codes(codes: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Return int8 or int4 codes [N, K] and scales [N, blocks] as bytes [tiles, bytes of a tile].

    Codes are raised by half their range, so that they are not negative; missing outputs have codes
    and scales of 0. Scales are fp16 where that holds them all. K is a multiple of 8 for int4: two
    groups share bytes.
    """
    small = codes.onnx_type == onnx.TensorProto.INT4
    inputs, blocks = codes.shape[1], scales.shape[1]
    step = 2 * GROUP if small else GROUP
    zero = 8 if small else 128
    assert inputs // blocks % step == 0, "a block of codes is a multiple of 16"
    kind = np.dtype(np.float16 if _fits_half(scales) else np.float32)

    def turned(first: int, last: int, side: int) -> NDArray[Any]:
        part = _outputs(codes, first, last)
        whole = unpack(part) if small else part.view(np.int8)
        raised = (whole.astype(np.int16) + zero).astype(np.uint8)
        groups = raised.reshape(
            -1, side, TILE, blocks, inputs // blocks // step, step // GROUP, GROUP
        )
        groups = groups.transpose(
            0, 3, 4, 5, 1, 2, 6
        )  # [strips, blocks, steps, groups, side, 16, 4]
        if small:
            groups = np.bitwise_or(groups[:, :, :, :1], np.left_shift(groups[:, :, :, 1:], 4))
        beside = _outputs(scales, first, last).astype(kind).reshape(-1, side, TILE, blocks)
        beside = np.ascontiguousarray(beside.transpose(0, 3, 1, 2)).view(np.uint8)
        shape = (*groups.shape[:2], -1)
        return np.concatenate((groups.reshape(shape), beside.reshape(shape)), -1)

    return _tiled(codes, codes.row_bytes + blocks * kind.itemsize, turned)


def tiled_floats(weights: LazyTensor) -> LazyTensor:
    """Return weights [N, K] in fp32, fp16 or bf16 as bytes [tiles, K · 16 · bytes each]."""

    def turned(first: int, last: int, side: int) -> NDArray[Any]:
        part = _outputs(weights, first, last).reshape(-1, side * TILE, weights.shape[1])
        return np.ascontiguousarray(part.transpose(0, 2, 1)).view(np.uint8)

    return _tiled(weights, weights.row_bytes, turned)


PIECE_BYTES = 4 << 20
"""Bytes of tiles that are made at a time: what lies in memory on the way is a few times as much."""


def _tiled(
    source: LazyTensor, output_bytes: int, turned: Callable[[int, int, int], NDArray[Any]]
) -> LazyTensor:
    """Return tiles [tiles, bytes of a tile], as many bytes in all: those of a strip are mixed.

    `turned` makes the tiles from a first to a last, in strips of so many.
    """
    count, size = tile_count(source.shape[0]), TILE * output_bytes

    def tiles(begin: int, end: int) -> NDArray[Any]:
        low, high = begin // STRIP * STRIP, min(-(-end // STRIP) * STRIP, count)
        made = np.empty((high - low, size), np.uint8)
        step = max(STRIP, PIECE_BYTES // max(1, size) // STRIP * STRIP)
        edges = sorted({*range(low, high, step), high // STRIP * STRIP, high})
        for first, last in pairwise(edges):
            part = turned(first, last, min(STRIP, last - first))
            made[first - low : last - low] = part.reshape(last - first, size)
        return made[begin - low : end - low]

    return LazyTensor(f"{source.name}/tiles", onnx.TensorProto.UINT8, (count, size), tiles)


def whole_tiles(bias: LazyTensor) -> LazyTensor:
    """Return a bias [N] as fp32 [tiles · 16], with zeros at the end."""
    length = tile_count(bias.shape[0]) * TILE

    def rows(begin: int, end: int) -> NDArray[Any]:
        return _padded(bias.rows(begin, min(end, bias.length)), end - begin)

    return LazyTensor(f"{bias.name}/tiles", bias.onnx_type, (length,), rows)


def alternating(gate: LazyTensor, up: LazyTensor) -> LazyTensor:
    """Return two tensors [N, ..] as one whose tiles are of the one and of the other in turns."""
    parts = (gate, up)

    def rows(begin: int, end: int) -> NDArray[Any]:
        first, last = begin // TILE, tile_count(end)
        # The tiles of each that are among those from the first to the last, if any.
        spans = [((first + 1 - turn) // 2, (last + 1 - turn) // 2) for turn in range(2)]
        taken = {t: _outputs(parts[t], *span) for t, span in enumerate(spans) if span[0] < span[1]}
        one = next(iter(taken.values()))
        inner = one.shape[1:]
        tiles = np.empty((last - first, TILE, *inner), one.dtype)
        for turn, part in taken.items():
            tiles[(turn - first) % 2 :: 2] = part.reshape(-1, TILE, *inner)
        return tiles.reshape(-1, *inner)[begin - first * TILE : end - first * TILE]

    shape = (2 * tile_count(gate.shape[0]) * TILE, *gate.shape[1:])
    return LazyTensor(f"{gate.name}~{up.name}", gate.onnx_type, shape, rows)


def tile_count(outputs: int) -> int:
    """Return how many tiles hold so many outputs."""
    return -(-outputs // TILE)


def _outputs(tensor: LazyTensor, begin: int, end: int) -> NDArray[Any]:
    """Return the rows of some tiles; zeros for those that the tensor lacks."""
    rows = tensor.rows(begin * TILE, min(end * TILE, tensor.length))
    return _padded(rows, (end - begin) * TILE)


def _padded(rows: NDArray[Any], count: int) -> NDArray[Any]:
    missing = count - len(rows)
    return np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows


def _fits_half(scales: LazyTensor) -> bool:
    return all(
        np.array_equal(part, part.astype(np.float16).astype(np.float32))
        for _, part in scales.slices()
    )
