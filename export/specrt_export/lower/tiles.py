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

from specrt_export.checkpoint.codes import unpack_unsigned
from specrt_export.lower.lazy_tensor import LazyTensor, smallest_format, stored_as
from specrt_export.lower.projections import WeightMatrix
from specrt_export.lower.view import GraphView
from specrt_export.portable.external_data import HALVES

TILE = 16
"""Outputs of a tile."""

GROUP = 4
"""Inputs whose products an instruction sums."""

STRIP = 4
"""Tiles side by side, which a core reads as one stream."""


def tiled_codes(matrix: WeightMatrix) -> tuple[LazyTensor, str]:
    """Return a matrix in codes as bytes [tiles, bytes of a tile], and the name of their format.

    Codes with a sign are raised by half their range, so that they are not negative, and zeros as
    they; missing outputs have codes and scales of 0. Scales and minimums are fp16 where that holds
    them all; scales of fp4 are half as large, as its values are doubled. Bits without a sign that
    have neither zeros nor minimums get zeros of 0.
    """
    assert matrix.scales is not None
    assert matrix.block % TILE == 0, "a block of codes is a multiple of 16"
    inputs, count = matrix.inputs, matrix.inputs // matrix.block
    signed = matrix.values.onnx_type in (onnx.TensorProto.INT8, onnx.TensorProto.INT4)
    is_integer = matrix.format in ("int4", "int8")
    has_zeros = is_integer and matrix.minimums is None and (not signed or matrix.zeros is not None)
    raised = 0 if not signed else 8 if matrix.bits == 4 else 128
    scale = np.float32(0.5 if matrix.is_table else 1)
    floats = [(matrix.scales, scale), (matrix.minimums, np.float32(1))]
    factors = [(tensor, factor) for tensor, factor in floats if tensor is not None]
    fits = all(_fits_half(tensor, factor) for tensor, factor in factors)
    kind = np.dtype(np.float16 if fits else np.float32)
    packed = matrix.bits == 4

    def raise_(part: NDArray[Any]) -> NDArray[Any]:
        return part.view(np.uint8) + np.uint8(raised)  # in two's complement

    def zeros(first: int, last: int) -> NDArray[Any]:
        if matrix.zeros is None:
            return np.zeros(((last - first) * TILE, count), np.uint8)
        return raise_(_outputs(matrix.zeros, first, last))

    def turned(first: int, last: int, side: int) -> NDArray[Any]:
        part = _outputs(matrix.values, first, last)
        if matrix.values.onnx_type in HALVES:
            # Raising a half in two's complement flips its upper bit.
            part = unpack_unsigned(part ^ np.uint8(0x88 if raised else 0))
        else:
            part = raise_(part)
        values = _turned_fp8 if matrix.format == "fp8" else _turned_codes
        pieces = [values(part, side, count, packed=packed)]
        for tensor, factor in factors:
            beside = (_outputs(tensor, first, last) * factor).astype(kind)
            pieces.append(_beside(beside, side))
        if has_zeros:
            beside = zeros(first, last)
            if packed:  # those of two blocks in a byte
                pairs = np.pad(beside, [(0, 0), (0, count % 2)]).reshape(len(beside), -1, 2)
                beside = pairs[..., 0] | pairs[..., 1] << 4
            pieces.append(_beside(beside, side))
        if not has_zeros or not packed:
            return np.concatenate(pieces, -1)
        return _alternating_ends(np.concatenate(pieces[:-1], -1), pieces[-1])

    row_bytes = inputs // 2 if packed else inputs
    row_bytes += count * kind.itemsize * len(factors)
    row_bytes += has_zeros and ((count + 1) // 2 if packed else count)
    suffix = "-zeros" if has_zeros else "-minimums" if matrix.minimums else ""
    return _tiled(matrix.values, TILE * row_bytes, turned), matrix.format + suffix


def _alternating_ends(blocks: NDArray[Any], ends: NDArray[Any]) -> NDArray[Any]:
    """Put ends [strips, (blocks + 1) / 2, bytes] after every other one of blocks."""
    size = blocks.shape[-1]
    whole = np.empty((len(blocks), ends.shape[1], 2 * size + ends.shape[-1]), np.uint8)
    whole[..., :size] = blocks[:, ::2]
    whole[..., size : size + ends.shape[-1]] = ends
    odd = blocks[:, 1::2]
    whole[:, : odd.shape[1], size + ends.shape[-1] :] = odd
    missing = blocks.shape[1] % 2 * size
    return whole.reshape(len(blocks), -1)[:, : whole[0].size - missing]


def _turned_codes(codes: NDArray[Any], side: int, blocks: int, *, packed: bool) -> NDArray[Any]:
    """Return codes [outputs, K] as bytes [strips, blocks, bytes of a block]."""
    step = 2 * GROUP if packed else GROUP
    steps = codes.shape[1] // blocks // step
    groups = codes.reshape(-1, side, TILE, blocks, steps, step // GROUP, GROUP)
    groups = groups.transpose(0, 3, 4, 5, 1, 2, 6)  # [strips, blocks, steps, groups, side, 16, 4]
    if packed:
        groups = np.bitwise_or(groups[:, :, :, :1], np.left_shift(groups[:, :, :, 1:], 4))
    return groups.reshape(*groups.shape[:2], -1)


def _turned_fp8(codes: NDArray[Any], side: int, blocks: int, *, packed: bool) -> NDArray[Any]:
    """Return codes [outputs, K] as bytes [strips, blocks, bytes of a block], input by input."""
    parts = codes.reshape(-1, side * TILE, blocks, codes.shape[1] // blocks)
    return parts.transpose(0, 2, 3, 1).reshape(len(parts), blocks, -1)


def _beside(numbers: NDArray[Any], side: int) -> NDArray[Any]:
    """Return numbers [outputs, blocks] as bytes [strips, blocks, bytes]."""
    parts = numbers.reshape(-1, side * TILE, numbers.shape[1])
    return np.ascontiguousarray(parts.transpose(0, 2, 1)).view(np.uint8)


def tiled_floats(weights: LazyTensor) -> LazyTensor:
    """Return weights [N, K] in fp32, fp16 or bf16 as bytes [tiles, K · 16 · bytes each]."""

    def turned(first: int, last: int, side: int) -> NDArray[Any]:
        part = _outputs(weights, first, last).reshape(-1, side * TILE, weights.shape[1])
        return np.ascontiguousarray(part.transpose(0, 2, 1)).view(np.uint8)

    return _tiled(weights, TILE * weights.row_bytes, turned)


PIECE_BYTES = 4 << 20
"""Bytes of tiles that are made at a time: what lies in memory on the way is a few times as much."""


def _tiled(
    source: LazyTensor, size: int, turned: Callable[[int, int, int], NDArray[Any]]
) -> LazyTensor:
    """Return tiles [tiles, size], as many bytes in all, mixed within a strip.

    `turned` makes the tiles from a first to a last, in strips of so many.
    """
    count = tile_count(source.shape[0])

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
    held_by = gate.held_by if gate.held_by == up.held_by else ""
    return LazyTensor(f"{gate.name}~{up.name}", gate.onnx_type, shape, rows, held_by=held_by)


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


def _fits_half(numbers: LazyTensor, factor: np.float32) -> bool:
    with np.errstate(over="ignore"):  # what fp16 is too small for
        return all(
            np.array_equal(part * factor, (part * factor).astype(np.float16).astype(np.float32))
            for _, part in numbers.slices()
        )


def has_codes(matrix: WeightMatrix) -> bool:
    """Tell whether the kernels take a matrix's codes as they are.

    Signed codes with minimums are none of any format.
    """
    if matrix.scales is None or matrix.block % TILE:
        return False
    signed = matrix.values.onnx_type in (onnx.TensorProto.INT8, onnx.TensorProto.INT4)
    return matrix.format in ("int4", "int8", "fp4", "fp8") and not (signed and matrix.minimums)


def add_tiles(view: GraphView, matrix: WeightMatrix) -> tuple[str, dict[str, Any]]:
    """Add a matrix to a graph in tiles; return its name, and what reads it as attributes.

    fp32 weights that bf16 or fp16 hold bit for bit are stored in it.
    """
    attributes: dict[str, Any] = {"N": matrix.outputs, "K": matrix.inputs}
    if has_codes(matrix):
        tiles, kind = tiled_codes(matrix)
        attributes |= {"format": kind, "block_size": matrix.block}
    else:
        dense = matrix.floats()
        attributes |= {"format": smallest_format(dense), "block_size": 0}
        tiles = tiled_floats(stored_as(dense, attributes["format"]))
    return view.add_stored(tiles), attributes
