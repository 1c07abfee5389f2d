"""Find out whether rows of a quantized target need partners on this machine."""

from __future__ import annotations

import numpy as np

from specrt.engine import Engine, Tokens
from specrt.engines.ort import OrtEngine

FILLED = 8
"""Positions before the first row that is compared."""
LAPS = 3
"""Rows compared."""
STEP = 7919
"""Between one token id and the next: a prime, so that all kinds of tokens come up."""


def settle_partners(target: Engine) -> bool:
    """Let a target run passes of odd widths as they are where that is exact; return whether not.

    A lone token has its partner either way.

    Kernels differ by processor, block and precision: with int8 blocks of 32 an AVX-512 VNNI kernel
    rounds a lone row like any other, with blocks of 128 it does not. What kernels do, they do to
    every row, so that a few dozen rows tell. Leaves the target even where they differ.
    """
    if not isinstance(target, OrtEngine) or not target.spare:
        return False
    widest = min(4, target.max_width, target.max_length - FILLED - LAPS)
    target.even = True
    if widest >= 2:
        target.even = not _alike(target, widest)
    return target.even


def _alike(target: OrtEngine, widest: int) -> bool:
    """Compare the last row of passes of every width, as they are, with that of a pair."""
    length = FILLED + LAPS
    ids = np.arange(length, dtype=np.int64) * STEP % target.geometry.vocab_size
    tokens: Tokens = ids[None]
    for begin in range(0, length, 2):
        target.forward(tokens[:, begin : begin + 2], begin, 1)
    # From the last end to the first: a partner overwrites what lies behind the end.
    for end in range(FILLED + LAPS, FILLED, -1):
        target.even = True
        pair = target.forward(tokens[:, end - 2 : end], end - 2).logits[0, -1].copy()
        target.even = False
        for width in range(1, widest + 1):
            row = target.forward(tokens[:, end - width : end], end - width).logits[0, -1]
            if not np.array_equal(row, pair):
                return False
    return True
