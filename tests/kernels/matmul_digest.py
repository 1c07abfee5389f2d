"""Prints a digest of products and attention, for one instruction set: SPECRT_KERNELS names it."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from kernels.test_attention import attend_all
from kernels.test_matmul import FORMATS, rows_of
from support.kernels import matmul, stored

WIDTHS = (1, 2, 3, 5, 6, 7, 8, 13, 33)

if __name__ == "__main__":
    digest = hashlib.sha256()
    for format_, outputs, inputs, block in FORMATS:
        weights = stored(format_, outputs, inputs, block)
        gates = stored(format_, outputs - outputs % 2, inputs, block, gates=True)
        for run in (matmul(weights), *(matmul(gates, activation=a) for a in ("silu", "gelu"))):
            for width in WIDTHS:
                digest.update(np.ascontiguousarray(run(rows_of(width, inputs))).tobytes())
    for output in attend_all():
        digest.update(np.ascontiguousarray(output).tobytes())
    sys.stdout.write(digest.hexdigest())
