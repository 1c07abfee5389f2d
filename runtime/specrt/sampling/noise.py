"""Randomness without state: a number is a function of seed, request, purpose, position and token.

Two passes that draw the same number get the same number, whatever was drawn between them. That
is why a seed gives the same text with speculation on or off and in any batch, and why rolling back
costs nothing. docs/randomness.md says it in steps, with numbers to check others against.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1

_GOLDEN = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a number is drawn for; different purposes are independent."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    CORRECTION = 3


class Noise:
    """Numbers keyed by (seed, request, purpose, position, token).

    `request` tells completions apart that share a seed, 0 to 2^63 - 1.
    Source: SplitMix64's output function (Steele, Lea and Flood 2014), used as a counter-based
        generator: one stream per (seed, request, purpose, position), indexed by the token.
    """

    def __init__(self, seed: int, request: int = 0) -> None:
        assert 0 <= request < 1 << 63, "requests count from 0"
        root = _mix(seed)
        # Downwards, as purposes count upwards from the same root: no request is keyed as one.
        self._root = _mix(root - _GOLDEN * request) if request else root

    def uniform(self, purpose: Purpose, position: int) -> float:
        """Return one number in (0, 1)."""
        return ((_mix(self._stream(purpose, position) + _GOLDEN) >> 12) + 0.5) * 2.0**-52

    def exponential(
        self, purpose: Purpose, position: int, tokens: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return standard exponential noise for the given tokens.

        Shapes: tokens [K] -> [K] f64, positive.
        """
        stream = np.uint64(self._stream(purpose, position))
        bits = _mix_array(stream + (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
        # 52 bits, not 53: with a half added, one more bit would round to 1 at the top.
        uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
        noise: NDArray[np.float64] = np.negative(np.log(uniform, out=uniform), out=uniform)
        return noise

    def _stream(self, purpose: Purpose, position: int) -> int:
        return _mix(_mix(self._root + _GOLDEN * (purpose + 1)) + _GOLDEN * (position + 1))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix_array(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
