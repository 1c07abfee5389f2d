"""Short convolutions of the CPU kernels, over a ring that is shorter than a pass."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from support.kernels import session

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
ROWS, LENGTH, CHANNELS, TAPS, BACK = 2, 300, 5, 4, 13


@pytest.mark.parametrize("ring", [TAPS - 1 + BACK, TAPS - 2 + BACK])
def test_a_ring_holds_what_a_token_sees_and_what_is_taken_back(ring: int) -> None:
    """Passes reach 40 positions, and rows go back by `BACK` from the end of what was written."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((TAPS, CHANNELS)).astype("f4")
    text = rng.standard_normal((ROWS, TAPS - 1 + LENGTH, CHANNELS)).astype("f4")
    text[:, : TAPS - 1] = 0
    right = np.zeros((ROWS, LENGTH, CHANNELS), np.float32)
    for tap in range(TAPS):
        right += text[:, tap : tap + LENGTH] * weight[tap]
    places = dict.fromkeys(("slots", "positions"), (INT64, ["T"]))
    inputs = {"x": (FLOAT, [1, "T", CHANNELS]), "ring": (FLOAT, [None] * 4), **places}
    outputs = dict.fromkeys(("y", "new"), FLOAT)
    operator = session("Convolution", {**inputs, "weight": (FLOAT, [None] * 2)}, outputs)
    memory = np.full((ROWS, 1, ring, 16), np.nan, np.float32)
    held, ends, differing = [0] * ROWS, [0] * ROWS, 0
    for _ in range(300):
        passed = []
        for row in rng.permutation(ROWS)[: rng.integers(1, ROWS + 1)]:
            start = int(rng.integers(max(0, ends[row] - BACK), held[row] + 1))
            start = start if start < LENGTH - 40 else 0
            width = int(rng.choice([1, 3, BACK, 40]))
            good = int(rng.integers(1, width + 1)) if width <= BACK else width
            fed = text[row, TAPS - 1 + start :][:width].copy()
            fed[good:] = np.nan  # these are drafted wrongly
            passed.append((row, start, good, fed))
            held[row] = start + good
            ends[row] = start + width if start == 0 else max(ends[row], start + width)
        feeds = {
            "x": np.concatenate([fed for *_, fed in passed])[None],
            "slots": np.concatenate([[row] * len(fed) for row, *_, fed in passed]),
            "positions": np.concatenate([s + np.arange(len(fed)) for _, s, _, fed in passed]),
        }
        y, memory = operator.run(None, {**feeds, "ring": memory, "weight": weight})
        for row, start, good, fed in passed:
            differing += not np.array_equal(y[0, :good], right[row, start : start + good])
            y = y[:, len(fed) :]
    assert (differing == 0) == (ring == TAPS - 1 + BACK), f"{differing} passes differ"
    apart = {"x": text[:1, :2], "slots": np.zeros(2, np.int64), "positions": np.array([3, 5])}
    with pytest.raises(Exception, match="the tokens of a row one after another"):
        operator.run(None, {**apart, "ring": memory, "weight": weight})
