from __future__ import annotations

import random

import pytest

from specrt.speculation.costs import Costs, Drift

TOLD = Costs(tuple(1000.0 + 100.0 * g for g in range(9)), tuple(50.0 * g for g in range(9)), 20.0)


def run(drift: Drift, true: Costs, gammas: list[int], rounds: int = 2000, seed: int = 0) -> None:
    draw = random.Random(seed)
    for i in range(rounds):
        gamma = gammas[i % len(gammas)]
        drift.time_verify(gamma, true.verify(gamma) * draw.lognormvariate(0, 0.1))
        if gamma:
            drift.time_draft(gamma, true.draft(gamma) * draw.lognormvariate(0, 0.1), True)
        if i % 64 == 63:
            drift.settle()


def assert_prices(drift: Drift, true: Costs, within: float) -> None:
    for g in range(9):
        assert drift.prices.verify[g] == pytest.approx(true.verify(g), rel=within)
        assert drift.prices.draft[g] == pytest.approx(true.draft(g), rel=within)


def test_at_first_prices_are_what_was_measured() -> None:
    prices = Drift(TOLD, 8).prices
    assert list(prices.total) == [TOLD.round_ns(g) for g in range(9)]


@pytest.mark.parametrize("factor", [0.2, 0.7, 1.5, 6.0])
def test_a_machine_that_is_slower_throughout(factor: float) -> None:
    drift = Drift(TOLD, 8)
    run(drift, TOLD.scaled(factor, factor), [0, 1, 3, 5])
    assert_prices(drift, TOLD.scaled(factor, factor), 0.06)


@pytest.mark.parametrize("slope", [0.5, 2.0])
def test_widths_that_cost_more_are_told_from_a_slow_machine(slope: float) -> None:
    true = Costs(tuple(1000.0 + 100.0 * slope * g for g in range(9)), TOLD.draft_ns, 20.0)
    drift = Drift(TOLD, 8)
    run(drift, true, [0, 1, 3, 5, 8])
    assert_prices(drift, true, 0.05)


def test_widths_that_never_ran_follow_those_that_did() -> None:
    true = TOLD.scaled(3.0)
    drift = Drift(TOLD, 8)
    run(drift, true, [4])
    assert drift.prices.verify[0] == pytest.approx(true.verify(0), rel=0.15)
    assert drift.prices.verify[8] == pytest.approx(true.verify(8), rel=0.15)


def test_one_pass_held_up_a_hundredfold_changes_little() -> None:
    drift = Drift(TOLD, 8)
    for _ in range(63):
        drift.time_verify(3, TOLD.verify(3))
        drift.time_draft(3, TOLD.draft(3), True)
    drift.time_verify(3, 100 * TOLD.verify(3))
    drift.time_draft(3, 100 * TOLD.draft(3), True)
    drift.settle()
    assert_prices(drift, TOLD, 0.01)


def test_a_draft_that_had_to_catch_up_tells_only_that_it_is_no_slower() -> None:
    drift = Drift(TOLD, 8)
    for _ in range(500):
        drift.time_draft(1, 9 * TOLD.draft(1), False)
        drift.settle()
    assert drift.prices.draft[1] == TOLD.draft(1)
    for _ in range(500):
        drift.time_draft(1, TOLD.draft(1) / 3, False)
        drift.settle()
    assert drift.prices.draft[1] == pytest.approx(TOLD.draft(1) / 3, rel=0.05)


def test_a_drafter_that_costs_nothing_stays_so() -> None:
    drift = Drift(Costs(TOLD.verify_ns, (0.0,) * 9), 8)
    for _ in range(100):
        drift.time_draft(3, 1234, True)
        drift.settle()
    assert drift.prices.draft == [0.0] * 9


@pytest.mark.parametrize("ns", [0, -5, 1e30])
def test_clocks_that_stand_still_or_leap_leave_prices_that_can_be_divided_by(ns: float) -> None:
    drift = Drift(TOLD, 8)
    for _ in range(3000):
        drift.time_verify(2, ns)
        drift.time_draft(2, ns, True)
        drift.settle()
    assert all(0 < price < 1e12 for price in drift.prices.total)
