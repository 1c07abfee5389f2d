"""Times of a completion, asked for while it runs."""

from __future__ import annotations

import random
from statistics import median

from specrt.completion import Timings


def test_asked_each_round_the_times_are_those_asked_at_the_end() -> None:
    dice = random.Random(3)
    often, now = Timings(0), 0
    assert (often.itl_ms, often.tokens_per_second) == (0.0, 0.0)
    for _ in range(40):
        now += dice.randrange(1, 9_000_000)
        often.arrivals.append((now, dice.randrange(0, 5)))
        once = Timings(0, list(often.arrivals))
        gaps = [
            (after - before) / count / 1e6
            for (before, _), (after, count) in zip(once.arrivals, once.arrivals[1:], strict=False)
            for _ in range(count)
        ]
        assert often.itl_ms == once.itl_ms == (median(gaps) if gaps else 0.0)
        assert often.tokens_per_second == once.tokens_per_second
        if gaps:
            assert often.tokens_per_second == len(gaps) / ((now - often.arrivals[0][0]) / 1e9)
