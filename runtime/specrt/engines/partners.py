"""Find out whether rows of a quantized target need partners on this machine."""

from __future__ import annotations

import numpy as np

from specrt.engine import Engine, Feed, Logits
from specrt.engines.ort import OrtEngine
from specrt.engines.ort_packed import OrtPackedEngine

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
    if not isinstance(target, OrtEngine | OrtPackedEngine) or not target.spare:
        return False
    widest = min(4, target.max_width, target.max_length - FILLED - LAPS)
    target.even = True
    if widest >= 2:
        target.even = not _alike(target, widest)
    return target.even


def _alike(target: OrtEngine | OrtPackedEngine, widest: int) -> bool:
    """Compare the last row of passes of every width, as they are, with that of a pair."""
    length = FILLED + LAPS
    ids = np.arange(length, dtype=np.int64) * STEP % target.geometry.vocab_size
    for begin in range(0, length, 2):
        _logits(target, ids[begin : begin + 2].tolist(), begin)
    # From the last end to the first: a partner overwrites what lies behind the end.
    for end in range(FILLED + LAPS, FILLED, -1):
        target.even = True
        pair = _logits(target, ids[end - 2 : end].tolist(), end - 2)[-1].copy()
        target.even = False
        for width in range(1, widest + 1):
            row = _logits(target, ids[end - width : end].tolist(), end - width)[-1]
            if not np.array_equal(row, pair):
                return False
    return True


def _logits(target: OrtEngine | OrtPackedEngine, tokens: list[int], start: int) -> Logits:
    """Feed tokens to the first row; return the logits [S, V] after each."""
    if isinstance(target, OrtPackedEngine):
        found = target.forward_rows([Feed(0, tokens, start, len(tokens))])[0].logits
    else:
        found = target.forward([tokens], start).logits
    logits: Logits = found[0]
    return logits
