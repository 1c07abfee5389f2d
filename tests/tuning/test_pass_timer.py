"""Costs are those of the engines: toy engines that move a clock by what they say they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from specrt.errors import EngineError
from specrt.speculation.costs import shared_widths
from specrt.speculation.pool import Models
from specrt.tuning.pass_timer import CONTEXT, measure_costs, rising
from support.rows import PackedTable
from support.toy import TableEngine, TableOutput
from tuning.conftest import Clock

GAMMAS = tuple(range(9))


class Priced(TableEngine):
    """An engine whose passes take what they are said to cost."""

    def __init__(self, clock: Clock, price: Callable[[int], int], **options: Any) -> None:
        super().__init__(memory=1, max_length=512, **options)
        self._clock, self._price = clock, price

    def forward(self, tokens: ArrayLike, start: ArrayLike, rows: int | None = None) -> TableOutput:
        self._clock.now += self._price(np.shape(tokens)[1])
        return super().forward(tokens, start, rows)


def target_price(width: int) -> int:
    return 1_000_000 + 70_000 * width


def draft_price(width: int) -> int:
    return 90_000 + 1_000 * width


@pytest.mark.parametrize("draft", ["wrong", "right", "none"])
def test_costs_are_those_of_the_engines(clock: Clock, draft: str) -> None:
    target = Priced(clock, target_price)
    models = Models(target, None, GAMMAS)
    wanted = [0] * 9
    if draft != "none":
        models = Models(target, Priced(clock, draft_price, seed=int(draft == "wrong")), GAMMAS)
        first = draft_price(2 if draft == "right" else 1)  # after a round whose tokens all stay
        wanted[1:] = [first + draft_price(1) * (g - 1) for g in GAMMAS[1:]]
    costs = measure_costs(models, clock=clock)
    assert costs.verify_ns == tuple(target_price(g + 1) for g in GAMMAS)
    assert (costs.draft_ns, costs.outside_ns) == (tuple(wanted), 0)
    # Rounds are timed at a filled context.
    starts = [call.start for call in target.calls]
    begun = next(i for i, start in enumerate(starts) if start >= CONTEXT)
    assert (min(starts[begun:]), max(starts) < CONTEXT + 4 * 9) == (CONTEXT, True)
    assert (target.buffer[0, : CONTEXT + 1] >= 0).all()


def test_passes_that_something_else_holds_up_do_not_count(clock: Clock) -> None:
    """Not even where most of them are."""
    luck = random.Random(1)

    def price(width: int) -> int:
        return round(target_price(width) * (1 if luck.random() < 0.2 else 40))

    draft = Priced(clock, lambda width: 90_000, seed=1)
    costs = measure_costs(Models(Priced(clock, price), draft, GAMMAS), clock=clock, budget_s=20.0)
    assert costs.verify_ns == tuple(target_price(g + 1) for g in GAMMAS)


@pytest.mark.parametrize("busy_s", [2.0, 1e9])
def test_costs_that_no_engine_has_are_measured_longer_then_refused(
    clock: Clock, busy_s: float
) -> None:
    """Other work holds up the passes of 5 tokens, for a while or without an end."""
    began = clock.now

    def price(width: int) -> int:
        busy = width == 5 and clock.now - began < busy_s * 1e9
        return target_price(width) * (40 if busy else 1)

    models = Models(Priced(clock, price), None, GAMMAS)
    if busy_s > 2:
        with pytest.raises(EngineError, match=r"other work .* 5 tokens .*`specrt tune`"):
            measure_costs(models, clock=clock, budget_s=1.0)
        assert clock.now - began < 6e9
    else:
        costs = measure_costs(models, clock=clock, budget_s=1.0)
        assert costs.verify_ns == tuple(target_price(g + 1) for g in GAMMAS)


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=20))
def test_rising_costs_never_fall_and_keep_their_sum(costs: list[float]) -> None:
    found = rising(costs)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(costs))
    assert rising(sorted(costs)) == sorted(costs)
    assert rising([1, 5, 3, 9]) == [1, 4, 4, 9], "a dip is shared by its neighbours"


def test_passes_of_several_rows_are_priced_by_their_tokens(clock: Clock) -> None:
    for rows, longest, widths in ((4, 256, [18, 36]), (7, 256, [18, 36, 63]), (4, 30, [18, 27]),
                                  (1, 256, [])):  # fmt: skip
        assert shared_widths(8, rows, longest) == widths
    engine = PackedTable([Priced(clock, target_price, max_width=32) for _ in range(3)])
    costs = measure_costs(Models(engine, None, GAMMAS), clock=clock, budget_s=20.0).verify_ns
    assert len(costs) == 27
    known = [*GAMMAS, 17, 26]
    assert [costs[g] for g in known] == [target_price(g + 1) for g in known]
