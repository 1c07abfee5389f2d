"""The stopping rule against every rule there is, where these can be counted."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.speculation.costs import NEVER, DraftPlan, RoundCosts, landings, plan

STEPS = st.lists(st.floats(0.0, 2.0), min_size=6, max_size=6)


def priced(wider: list[float], step: list[float], outside: float = 0.05) -> RoundCosts:
    verify = list(itertools.accumulate(wider, initial=1.0))
    draft = list(itertools.accumulate(step, initial=0.0))
    return RoundCosts.of(verify, draft, outside)


def blind(prices: RoundCosts, chance: float) -> DraftPlan:
    chances = [chance] * (len(prices.total) - 1)
    return plan(prices, chances, chances, 1.0, 1.0 / prices.total[0])


def stops_at(made: DraftPlan, chance: float) -> int:
    """Follow a plan whose tokens all look alike."""
    reach, k = 1.0, 0
    while reach >= made.more[k]:
        k += 1
        reach *= chance
        if reach < made.keep[k]:
            return k - 1
    return k


def rate(prices: RoundCosts, chance: float, gamma: int) -> float:
    return sum(chance**k for k in range(gamma + 1)) / prices.total[gamma]


@given(STEPS, STEPS, st.floats(0.0, 0.99))
def test_where_tokens_look_alike_the_best_gamma_is_planned(
    wider: list[float], step: list[float], chance: float
) -> None:
    chance = max(chance, 0.001)
    prices = priced(sorted(wider), step)
    made = blind(prices, chance)
    rates = [rate(prices, chance, g) for g in range(7)]
    assert rates[made.gamma] >= max(rates) * (1 - 1e-9)
    assert made.rate == pytest.approx(max(rates))


@given(STEPS, st.floats(0.01, 0.3), st.floats(0.01, 0.99))
def test_where_width_costs_ever_more_the_rule_stops_at_the_best_gamma(
    wider: list[float], step: float, chance: float
) -> None:
    prices = priced(sorted(wider), [step] * 6)
    best = max(rate(prices, chance, g) for g in range(7))
    assert rate(prices, chance, stops_at(blind(prices, chance), chance)) >= best * (1 - 1e-9)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("stair", [0.1, 0.4, 0.9])
def test_stairs_are_climbed_to_their_end_or_not_at_all(chance: float, stair: float) -> None:
    """Widths of 1 to 4 cost alike, and so do 5 to 9."""
    prices = priced([0.0, 0.0, 0.0, stair, 0.0, 0.0, 0.0, 0.0], [0.02] * 8)
    made = blind(prices, chance)
    best = max(rate(prices, chance, g) for g in range(9))
    assert rate(prices, chance, stops_at(made, chance)) >= best * 0.995


def test_nothing_is_divided_by_zero() -> None:
    prices = priced([0.0] * 6, [0.0] * 6, 0.0)
    for chance in (1e-9, 0.5, 1 - 1e-9):
        assert stops_at(blind(prices, chance), chance) == 6


def two_kinds(prices: RoundCosts, sure: float, poor: float, share: float, made: DraftPlan) -> float:
    """Return the tokens per time of a plan, where a drafted token is sure or poor."""
    tokens = time = 0.0
    # (probability, tokens drafted, reach, tokens gained)
    open_ = [(1.0, 0, 1.0, 1.0)]
    while open_:
        p, k, reach, gained = open_.pop()
        if reach < made.more[k]:
            tokens += p * gained
            time += p * prices.total[k]
            continue
        for part, chance in ((share, sure), (1 - share, poor)):
            after = reach * chance
            if after < made.keep[k + 1]:
                spent = prices.total[k] + prices.draft[k + 1] - prices.draft[k]
                tokens += p * part * gained
                time += p * part * spent
            else:
                open_.append((p * part, k + 1, after, gained + after))
    return tokens / time


def best_of_two_kinds(prices: RoundCosts, sure: float, poor: float, share: float) -> float:
    """Return the most tokens per time that any rule reaches: Dinkelbach's iteration."""
    worth = 1.0 / prices.total[0]
    for _ in range(30):
        tokens, time = _value(prices, sure, poor, share, worth, 0, 1.0)
        worth = (1.0 + tokens) / (prices.total[0] + time)
    return worth


def _value(
    prices: RoundCosts, sure: float, poor: float, share: float, worth: float, k: int, reach: float
) -> tuple[float, float]:
    """Return the tokens and the time that are best spent after k tokens of a reach."""
    best = (0.0, 0.0)
    if k + 1 == len(prices.total):
        return best
    tokens, time = 0.0, prices.step[k]
    for part, chance in ((share, sure), (1 - share, poor)):
        after = reach * chance
        more = _value(prices, sure, poor, share, worth, k + 1, after)
        kept = (after + more[0], prices.wider[k] + more[1])
        if kept[0] > worth * kept[1]:
            tokens, time = tokens + part * kept[0], time + part * kept[1]
    return (tokens, time) if tokens > worth * time else best


@pytest.mark.parametrize("seed", range(20))
def test_with_two_kinds_of_tokens_the_rule_is_nearly_the_best_there_is(seed: int) -> None:
    draw = random.Random(seed)
    prices = priced(
        sorted(draw.uniform(0.02, 0.3) for _ in range(6)), [draw.uniform(0.01, 0.2)] * 6
    )
    sure, poor = draw.uniform(0.7, 0.99), draw.uniform(0.05, 0.6)
    share = draw.uniform(0.3, 0.8)
    mean = share * sure + (1 - share) * poor
    made = plan(prices, [mean] * 6, [sure] * 6, share, 1.0 / prices.total[0])
    best = best_of_two_kinds(prices, sure, poor, share)
    assert two_kinds(prices, sure, poor, share, made) >= 0.98 * best
    assert best >= max(rate(prices, mean, g) for g in range(7)) * (1 - 1e-9)


@given(st.lists(st.floats(1.0, 10.0), min_size=1, max_size=9))
def test_landings_are_on_the_lower_hull(total: list[float]) -> None:
    ends = landings(total)
    assert len(ends) == len(total) - 1
    for k, end in enumerate(ends):
        assert k < end < len(total)
    corners = {0, *ends}
    for low, high in itertools.pairwise(sorted(corners)):
        for between in range(low, high):
            line = total[low] + (total[high] - total[low]) * (between - low) / (high - low)
            assert total[between] >= line - 1e-9


def test_after_the_most_there_is_no_more() -> None:
    assert blind(priced([0.0] * 3, [0.0] * 3), 0.9).more[3] == NEVER
