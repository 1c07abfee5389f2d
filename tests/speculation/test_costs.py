"""What passes cost: between what was measured, beyond it, and for rows that share a pass."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.errors import BundleError
from specrt.speculation.costs import Costs
from specrt.speculation.pool import as_one_launch

NS = st.floats(1.0, 1e9)


def test_a_round_is_draft_and_verify_and_what_lies_outside() -> None:
    costs = Costs((100.0, 110.0, 130.0), (0.0, 10.0, 20.0), 5.0)
    assert [costs.round_ns(g) for g in range(3)] == [105.0, 125.0, 155.0]
    assert costs.plain_ns == 105.0
    assert costs.scaled(2.0, 3.0) == Costs((200.0, 220.0, 260.0), (0.0, 30.0, 60.0), 5.0)
    assert [as_one_launch(costs).round_ns(g) for g in range(3)] == [105.0, 125.0, 155.0]
    assert as_one_launch(costs).draft(2) == 0.0
    # Beyond what was measured costs go on as before, and never fall.
    assert [costs.verify(g) for g in (2, 3, 4)] == [130.0, 145.0, 160.0]
    assert [costs.draft(g) for g in (2, 3, 4)] == [20.0, 30.0, 40.0]
    assert Costs((100.0, 90.0), (0.0,)).verify(9) == 90.0


@given(st.lists(st.tuples(st.integers(1, 5), NS), max_size=6), NS, st.integers(0, 30))
def test_costs_between_measured_ones_lie_between_them(
    steps: list[tuple[int, float]], first: float, most: int
) -> None:
    measured = [(0, first)]
    for step, ns in steps:
        measured.append((measured[-1][0] + step, ns))
    table = Costs.between(measured, most)
    assert len(table) == most + 1
    assert all(math.isclose(table[gamma], ns) for gamma, ns in measured if gamma <= most)
    for (low, before), (high, after) in itertools.pairwise(measured):
        for ns in table[low : high + 1]:
            assert min(before, after) * 0.999 <= ns <= max(before, after) * 1.001


@pytest.mark.parametrize(
    "costs",
    [
        ((), (0.0,)), ((1.0,), ()), ((0.0, 1.0), (0.0,)), ((1.0,), (0.0, -1.0)), ((1.0,), (1.0,)),
        ((math.nan,), (0.0,)), ((1.0,), (0.0, math.inf)), ((1.0,), (0.0,), -1.0),
    ],
)  # fmt: skip
def test_costs_that_no_machine_has_are_refused(costs: Any) -> None:
    with pytest.raises(BundleError, match="specrt tune"):
        Costs(*costs)
