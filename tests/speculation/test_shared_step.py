"""Steps of several rows: the regret of `auto` in company, and who drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import NamedTuple

import pytest
import step_traces
from gamma_traces import LARGEST, MACHINES

from specrt.speculation.auto_gamma import AutoGamma
from specrt.speculation.costs import Costs
from specrt.speculation.shared_step import DraftingRow, SharedStep

INT8 = MACHINES["206 M int8"]
DEAR = Costs(INT8.verify_ns, tuple(g * 1e8 for g in range(LARGEST + 1)))
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


def test_no_row_is_held_up_for_another_that_gains_less() -> None:
    """A wide pass for one row alone makes more tokens, and each of the others fewer in its time."""
    steep = Costs(tuple(1e6 * (1 + 0.2 * w) for w in range(40)), (0.0,) + (1e4,) * LARGEST)
    step = begun(4, steep)
    rows = [Row(0.99), Row(0.0), Row(0.0), Row(0.0)]
    assert chosen(step, rows) == [True, False, False, False]
    assert step.gamma < LARGEST


def test_outcome_wins_where_drafts_come_to_less_than_was_expected() -> None:
    """Within tens of steps it drafts no more; where they come to what was expected it goes on."""
    for chance, most in ((0.0, 0.1), (0.9, 1.0)):
        drafting = settled(SharedStep(INT8, LARGEST), 400, chance)
        share = mean(count > 0 for count in drafting[100:])
        assert share <= most
        assert share >= 0.8 * (most == 1.0)


def test_rows_show_what_a_plain_step_takes_before_they_draft() -> None:
    """But do not wait for ever where steps are not timed, since one of them goes by no plan."""
    step, rows = SharedStep(INT8, LARGEST), [Row(0.9)] * 3
    waits = [chosen(step, rows) for _ in range(20)]
    assert waits[0] == [False] * 3
    assert waits[-1] == [True] * 3


def rests_before_a_probe(step: SharedStep) -> list[int]:
    """Rest as plans say until one lets rows draft; return how long each rest was."""
    rests = []
    while not any(chosen(step, [Row(0.1)] * 3)):
        rests.append(step.rest)
        steps = step.rest + 1
        step.settle(3 * steps, (), 0, round(steps * INT8.verify(2)), steps=steps)
    return rests


def test_a_plan_holds_the_longer_the_less_changes() -> None:
    """Up to the next probe."""
    step = SharedStep(DEAR, LARGEST)
    *rests, _ = rests_before_a_probe(step)
    assert rests == sorted(rests)
    assert rests[0] == step.rest == 0
    assert 10 < max(rests) < 20


def test_plain_steps_that_are_told_together_count_as_many() -> None:
    one, many = begun(3), begun(3)
    for slower, rests in ((1.0, 20), (2.0, 4)):
        ns = round(slower * INT8.verify(2))
        for _ in range(10 * rests):
            one.settle(3, [0] * 3, 0, ns)
        for _ in range(rests):
            many.settle(30, (), 0, 10 * ns, steps=10)
    assert many.company.steps_idle == one.company.steps_idle
    assert many.company.plain.ratio == pytest.approx(one.company.plain.ratio, rel=0.05)


def test_a_text_that_becomes_easy_is_drafted_within_tens_of_steps_after_a_rest() -> None:
    step = begun(3)
    *_, rest = rests_before_a_probe(step)
    assert rest < 20
    assert all(chosen(step, [Row(0.9)] * 3))


def test_a_row_without_company_reads_a_prompt_where_that_is_gained_again() -> None:
    for lacks, room, drafts in ((2, 10, True), (4000, 10_000, True), (4000, 30, False)):
        step = SharedStep(INT8, LARGEST)
        policy = AutoGamma(INT8, LARGEST, step=step)
        step.begin(1, [DraftingRow(policy, lacks, room)])
        assert bool(policy.choose()) == drafts


def test_a_long_prompt_is_not_read_for_a_few_tokens() -> None:
    for lacks, room, drafts in ((2, 10, True), (4000, 1000, True), (4000, 3, False)):
        step, rows = begun(3), [Row(0.8)] * 3
        chosen(step, rows)
        assert all(chosen(step, rows, lacks, room)) == drafts
