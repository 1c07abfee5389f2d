"""Steps of several rows: the regret of `auto` in company, and who drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import NamedTuple

import pytest
import step_traces
from gamma_traces import LARGEST, MACHINES

from specrt.speculation.costs import Costs
from specrt.speculation.shared_step import DraftingRow, SharedStep

INT8 = MACHINES["206 M int8"]
companies = cache(step_traces.companies)


class Row(NamedTuple):
    """A policy of a row whose drafted tokens are kept with one chance."""

    chance: float

    @property
    def tokens(self) -> Sequence[float]:
        """By number of drafted tokens, how many a round emits."""
        return [sum(self.chance**i for i in range(g + 1)) for g in range(LARGEST + 1)]


def begun(rows: int, costs: Costs = INT8) -> SharedStep:
    """Return steps of so many rows, of which the first, a plain one, took what was tuned."""
    step = SharedStep(costs, LARGEST)
    step.begin(rows, ())
    step.settle(rows, [0] * rows, 0, round(costs.verify(rows - 1)))
    return step


def chosen(step: SharedStep, rows: Sequence[Row], lacks: int = 0, room: int = 1000) -> list[bool]:
    """Return which rows draft in the next step."""
    step.begin(len(rows), [DraftingRow(row, lacks, room) for row in rows])
    return [step.drafts(row) for row in rows]


def settled(step: SharedStep, steps: int, chance: float, ns: float = 1.0) -> list[int]:
    """Run steps of three rows, whose drafts come to what they do; return how many rows drafted."""
    found, rows = [], [Row(0.80), Row(0.81), Row(0.82)]
    for _ in range(steps):
        drafting = sum(chosen(step, rows))
        found.append(drafting)
        made = 3 + round(drafting * chance)
        verify_ns = round(INT8.verify(2 + drafting) * ns)
        step.settle(
            made, [1] * drafting or [0], 10**5 * drafting, verify_ns, drafting > 0, drafting
        )
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", step_traces.REGRETS)
def test_auto_in_company_falls_behind_the_best_fixed_gamma_by_little(
    kind: str, every: bool
) -> None:
    regrets = [step_traces.regret(one) for one in companies()[kind][:: 1 if every else 51]]
    assert mean(regrets) <= step_traces.REGRETS[kind].mean
    assert max(regrets) <= step_traces.REGRETS[kind].worst


def test_the_rows_that_draft_are_those_whose_drafts_are_kept() -> None:
    rows = [Row(0.05), Row(0.9), Row(0.02), Row(0.85)]
    assert chosen(begun(4), rows) == [False, True, False, True]


def test_the_first_step_of_a_number_of_rows_is_plain() -> None:
    assert chosen(SharedStep(INT8, LARGEST), [Row(0.9)] * 3) == [False] * 3
    assert chosen(begun(3), [Row(0.9)] * 3) == [True] * 3


def test_no_row_is_held_up_for_another_that_gains_less() -> None:
    """A wide pass for one row alone makes more tokens, and each of the others fewer in its time."""
    steep = Costs(tuple(1e6 * (1 + 0.2 * w) for w in range(40)), (0.0,) + (1e4,) * LARGEST)
    step = begun(4, steep)
    rows = [Row(0.99), Row(0.0), Row(0.0), Row(0.0)]
    assert chosen(step, rows) == [True, False, False, False]
    assert step.gamma < LARGEST


def test_a_draft_that_costs_more_than_it_brings_is_none() -> None:
    dear = Costs(INT8.verify_ns, tuple(g * 1e7 for g in range(LARGEST + 1)))
    assert chosen(begun(3, dear), [Row(0.5)] * 3) == [False] * 3


def test_outcome_wins_where_drafts_come_to_less_than_was_expected() -> None:
    """Within tens of steps it drafts no more; where they come to what was expected it goes on."""
    for chance, most in ((0.0, 0.1), (0.9, 1.0)):
        drafting = settled(SharedStep(INT8, LARGEST), 400, chance)
        share = mean(count > 0 for count in drafting[100:])
        assert share <= most
        assert share >= 0.8 * (most == 1.0)


def test_probes_cost_little() -> None:
    drafting = settled(SharedStep(INT8, LARGEST), 1000, 0.0)
    assert 0 < sum(count > 0 for count in drafting[300:]) < 0.1 * 700


def steps_to_probe(step: SharedStep) -> int:
    """Run plain steps until the next one is a probe; return how many."""
    for steps in range(5000):
        if any(chosen(step, [Row(0.1)] * 3)):
            return steps
        step.settle(3, [0] * 3, 0, round(INT8.verify(2)))
    raise AssertionError("it never probes")


def test_a_probe_pays_for_what_its_draft_reads() -> None:
    """The step is no measure of passes then."""
    waits = []
    for draft_ns in (10**6, 10**9):
        step = begun(3)
        steps_to_probe(step)
        step.settle(3, [], draft_ns, 0)
        waits.append(steps_to_probe(step))
    assert waits[1] > 5 * waits[0]


def test_a_long_prompt_is_not_read_for_a_few_tokens() -> None:
    for lacks, room, drafts in ((2, 10, True), (4000, 1000, True), (4000, 3, False)):
        step, rows = begun(3), [Row(0.8)] * 3
        chosen(step, rows)
        assert all(chosen(step, rows, lacks, room)) == drafts


def test_rows_that_go_on_alone_pay_for_the_passes_alone() -> None:
    step = begun(3)
    chosen(step, [Row(0.8)] * 3)
    shared = step.drafting(1)
    step.go_on(1)
    alone = step.drafting(2)
    assert alone[3] - alone[2] > shared[3] - shared[2]
