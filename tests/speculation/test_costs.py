from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.errors import BundleError
from specrt.speculation.costs import Costs

NS = st.floats(1.0, 1e9)


def test_a_round_is_draft_and_verify_and_what_lies_outside() -> None:
    costs = Costs((100.0, 110.0, 130.0), (0.0, 10.0, 20.0), 5.0)
    assert [costs.round_ns(g) for g in range(3)] == [105.0, 125.0, 155.0]
    assert costs.plain_ns == 105.0


def test_beyond_what_was_measured_costs_go_on_as_before() -> None:
    costs = Costs((100.0, 110.0, 140.0), (0.0, 10.0), 0.0)
    assert [costs.verify(g) for g in (2, 3, 4)] == [140.0, 160.0, 180.0]
    assert [costs.draft(g) for g in (1, 2, 3)] == [10.0, 20.0, 30.0]


def test_costs_that_seem_to_fall_are_not_thought_to_fall_further() -> None:
    assert Costs((100.0, 90.0), (0.0,)).verify(9) == 90.0
    assert Costs((100.0,), (0.0,)).verify(9) == 100.0


@given(st.lists(st.tuples(st.integers(1, 5), NS), max_size=6), NS, st.integers(0, 30))
def test_costs_between_measured_ones_lie_between_them(
    steps: list[tuple[int, float]], first: float, most: int
) -> None:
    measured = [(0, first)]
    for step, ns in steps:
        measured.append((measured[-1][0] + step, ns))
    table = Costs.between(measured, most)
    assert len(table) == most + 1
    for gamma, ns in measured:
        if gamma <= most:
            assert math.isclose(table[gamma], ns)
    for (low, before), (high, after) in itertools.pairwise(measured):
        for ns in table[low : high + 1]:
            assert min(before, after) * 0.999 <= ns <= max(before, after) * 1.001


def test_costs_are_measured_from_gamma_zero_on() -> None:
    with pytest.raises(ValueError, match="gamma 0"):
        Costs.between([(1, 5.0)], 3)


def test_engines_that_take_longer() -> None:
    costs = Costs((100.0, 110.0), (0.0, 10.0), 5.0).scaled(verify=2.0, draft=3.0)
    assert costs == Costs((200.0, 220.0), (0.0, 30.0), 5.0)


@pytest.mark.parametrize(
    ("verify", "draft", "outside"),
    [
        ((), (0.0,), 0.0),
        ((1.0,), (), 0.0),
        ((0.0, 1.0), (0.0,), 0.0),
        ((1.0, -1.0), (0.0,), 0.0),
        ((1.0,), (0.0, -1.0), 0.0),
        ((1.0,), (1.0,), 0.0),
        ((1.0,), (0.0,), -1.0),
        ((math.nan,), (0.0,), 0.0),
        ((1.0,), (0.0, math.inf), 0.0),
    ],
)
def test_costs_that_no_machine_has_are_refused(
    verify: tuple[float, ...], draft: tuple[float, ...], outside: float
) -> None:
    with pytest.raises(BundleError, match="specrt tune"):
        Costs(verify, draft, outside)
