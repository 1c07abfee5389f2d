"""Weights in the layout of the CPU kernels: tiles of 16 outputs, which a pass reads in one go.

`runtime/cpp/src/kernels/kernels.hpp` describes the layout. All instruction sets read the same one.
"""

from __future__ import annotations

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


def tiled_codes(codes: LazyTensor) -> LazyTensor:
    """Return int8 or int4 codes [N, K] as bytes [tiles, 16 · K · bits / 8].

    Raised by half their range, so that they are not negative; missing outputs have codes of 0.
    """
    small = codes.onnx_type == onnx.TensorProto.INT4
    outputs, inputs = codes.shape
    step = 2 * GROUP if small else GROUP
    zero = 8 if small else 128

    def tiles(begin: int, end: int) -> NDArray[Any]:
        part = _outputs(codes, begin, end)
        whole = unpack(part) if small else part.view(np.int8)
        raised = (whole.astype(np.int16) + zero).astype(np.uint8)
        groups = raised.reshape(end - begin, TILE, inputs // step, step // GROUP, GROUP)
        groups = groups.transpose(0, 2, 3, 1, 4)  # [tiles, steps, groups of a step, 16, 4]
        if small:
            groups = groups[:, :, :1] | (groups[:, :, 1:] << 4)
        return np.ascontiguousarray(groups).reshape(end - begin, -1)

    shape = (tile_count(outputs), TILE * inputs * (4 if small else 8) // 8)
    return LazyTensor(f"{codes.name}/tiles", onnx.TensorProto.UINT8, shape, tiles)


def tiled_scales(scales: LazyTensor) -> LazyTensor:
    """Return scales [N, blocks] as [tiles, blocks, 16]: fp16 where that holds them all."""
    half = _fits_half(scales)

    def tiles(begin: int, end: int) -> NDArray[Any]:
        part = _outputs(scales, begin, end).reshape(end - begin, TILE, -1).transpose(0, 2, 1)
        return np.ascontiguousarray(part.astype(np.float16) if half else part)

    shape = (tile_count(scales.shape[0]), scales.shape[1], TILE)
    kind = onnx.TensorProto.FLOAT16 if half else onnx.TensorProto.FLOAT
    return LazyTensor(f"{scales.name}/tiles", kind, shape, tiles)


def tiled_floats(weights: LazyTensor) -> LazyTensor:
    """Return weights [N, K] in fp32, fp16 or bf16 as bytes [tiles, K · 16 · bytes each]."""

    def tiles(begin: int, end: int) -> NDArray[Any]:
        part = _outputs(weights, begin, end)
        part = part.reshape(end - begin, TILE, -1).transpose(0, 2, 1)
        return np.ascontiguousarray(part).reshape(end - begin, -1).view(np.uint8)

    shape = (tile_count(weights.shape[0]), TILE * weights.row_bytes)
    return LazyTensor(f"{weights.name}/tiles", onnx.TensorProto.UINT8, shape, tiles)


def whole_tiles(bias: LazyTensor) -> LazyTensor:
    """Return a bias [N] as fp32 [tiles · 16], with zeros at the end."""
    length = tile_count(bias.shape[0]) * TILE

    def rows(begin: int, end: int) -> NDArray[Any]:
        return np.pad(bias.load(), (0, length - bias.shape[0]))[begin:end]

    return LazyTensor(f"{bias.name}/tiles", bias.onnx_type, (length,), rows)


def alternating(gate: LazyTensor, up: LazyTensor) -> LazyTensor:
    """Return two tensors [N, ..] as one whose tiles are of the one and of the other in turns."""
    parts = (gate, up)

    def rows(begin: int, end: int) -> NDArray[Any]:
        first, last = begin // TILE, tile_count(end)
        tiles = [_outputs(parts[tile % 2], tile // 2, tile // 2 + 1) for tile in range(first, last)]
        return np.concatenate(tiles)[begin - first * TILE : end - first * TILE]

    shape = (2 * tile_count(gate.shape[0]) * TILE, *gate.shape[1:])
    return LazyTensor(f"{gate.name}~{up.name}", gate.onnx_type, shape, rows)


def tile_count(outputs: int) -> int:
    """Return how many tiles hold so many outputs."""
    return -(-outputs // TILE)


def _outputs(tensor: LazyTensor, begin: int, end: int) -> NDArray[Any]:
    """Return the rows of some tiles; zeros for those that the tensor lacks."""
    rows = tensor.rows(begin * TILE, min(end * TILE, tensor.length))
    missing = (end - begin) * TILE - len(rows)
    return np.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1)) if missing else rows


def _fits_half(scales: LazyTensor) -> bool:
    return all(
        np.array_equal(part, part.astype(np.float16).astype(np.float32))
        for _, part in scales.slices()
    )
