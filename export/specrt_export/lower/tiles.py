"""Weights in the layout of the CPU kernels: tiles of 16 outputs, which a pass reads in one go.

`runtime/cpp/src/kernels/kernels.hpp` describes the layout. All instruction sets read the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from specrt_export.lower.lazy_tensor import LazyTensor
from specrt_export.portable.external_data import STORAGE
from specrt_export.quantize.codes import unpack

TILE = 16
"""Outputs of a tile."""

GROUP = 4
"""Inputs whose products an instruction sums."""


def tiled_codes(codes: LazyTensor) -> LazyTensor:
    """Return int8 or int4 codes [N, K] as bytes [tiles, 16 · K · bits / 8].

    Raised by half their range, so that they are not negative; missing outputs have codes of 0.
    K is a multiple of 8 for int4: two groups share bytes.
    """
    small = codes.onnx_type == onnx.TensorProto.INT4
    inputs = codes.shape[1]
    step = 2 * GROUP if small else GROUP
    zero = 8 if small else 128
    assert inputs % step == 0, "a block of codes is a multiple of 16"

    def turned(part: NDArray[Any], tiles: int) -> NDArray[Any]:
        whole = unpack(part) if small else part.view(np.int8)
        raised = (whole.astype(np.int16) + zero).astype(np.uint8)
        groups = raised.reshape(tiles, TILE, inputs // step, step // GROUP, GROUP)
        groups = groups.transpose(0, 2, 3, 1, 4)  # [tiles, steps, groups of a step, 16, 4]
        return groups[:, :, :1] | (groups[:, :, 1:] << 4) if small else groups

    return _tiled(codes, onnx.TensorProto.UINT8, (TILE * codes.row_bytes,), turned)


def tiled_scales(scales: LazyTensor) -> LazyTensor:
    """Return scales [N, blocks] as [tiles, blocks, 16]: fp16 where that holds them all."""
    kind = onnx.TensorProto.FLOAT16 if _fits_half(scales) else onnx.TensorProto.FLOAT

    def turned(part: NDArray[Any], tiles: int) -> NDArray[Any]:
        return part.astype(STORAGE[kind]).reshape(tiles, TILE, -1).transpose(0, 2, 1)

    return _tiled(scales, kind, (scales.shape[1], TILE), turned)


def tiled_floats(weights: LazyTensor) -> LazyTensor:
    """Return weights [N, K] in fp32, fp16 or bf16 as bytes [tiles, K · 16 · bytes each]."""

    def turned(part: NDArray[Any], tiles: int) -> NDArray[Any]:
        outputs = part.reshape(tiles, TILE, -1).transpose(0, 2, 1)
        return np.ascontiguousarray(outputs).view(np.uint8)

    return _tiled(weights, onnx.TensorProto.UINT8, (TILE * weights.row_bytes,), turned)


PIECE_BYTES = 4 << 20
"""Bytes of tiles that are made at a time: what lies in memory on the way is a few times as much."""


def _tiled(
    source: LazyTensor, kind: int, shape: tuple[int, ...],
    turned: Callable[[NDArray[Any], int], NDArray[Any]],
) -> LazyTensor:  # fmt: skip
    """Return a tensor of tiles [tiles, *shape], which `turned` makes of the rows of so many."""

    def tiles(begin: int, end: int) -> NDArray[Any]:
        made = np.empty((end - begin, *shape), STORAGE[kind])
        step = max(1, PIECE_BYTES // max(1, prod(shape) * made.itemsize))
        for first in range(begin, end, step):
            last = min(first + step, end)
            part = turned(_outputs(source, first, last), last - first)
            made[first - begin : last - begin] = part.reshape(last - first, *shape)
        return made

    return LazyTensor(f"{source.name}/tiles", kind, (tile_count(source.shape[0]), *shape), tiles)


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
