"""Make matrices of zeros in a grown checkpoint different from each other.

TensorRT keeps equal weights once: of codelet grown to 1 B it kept 1.69 of 1.98 GB, because what
the added layers write into the residual stream is all zeros. A GPU would then find in its cache
what a real model has to read. So these zeros become the smallest numbers of fp16, 6e-8, with
signs drawn at random: too small to move a score by what fp16 rounds, and no two matrices alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SMALLEST, SIGN = 0x0001, 15
_CHUNK = 1 << 24
_MAGNITUDE = 0x7FFF


def roughen(folder: Path) -> int:
    """Rewrite the fp16 matrices of a folder's shards that hold zeros alone; return their bytes."""
    rng, written = np.random.default_rng(0), 0
    for shard in sorted(folder.glob("*.safetensors")):
        for begin, shape in _matrices(shard):
            bits: NDArray[Any] = np.memmap(
                shard, np.uint16, "r+", offset=begin, shape=(prod(shape),)
            )
            if not (bits[: shape[1]] & _MAGNITUDE).any() and not (bits & _MAGNITUDE).any():
                for at in range(0, bits.size, _CHUNK):
                    part = bits[at : at + _CHUNK]
                    signs = rng.integers(0, 2, part.size, np.uint16) << SIGN
                    part[:] = signs | SMALLEST
                written += bits.nbytes
            del bits
    return written


def _matrices(shard: Path) -> Iterator[tuple[int, list[int]]]:
    """Yield where each fp16 matrix of a shard begins, and its shape."""
    with shard.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F16" and len(entry["shape"]) == 2:
            yield 8 + length + entry["data_offsets"][0], entry["shape"]
