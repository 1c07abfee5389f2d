"""The policy on texts whose acceptance is known, against every fixed gamma in hindsight."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import traces
from runtime.traces import COSTS, LARGEST, Text
from specrt.speculation import gamma as adaptive
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import AutoGamma, DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Round

STEADY = (0.0, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
INT8 = COSTS["206 M int8"]


@cache
def steady(chance: float, seed: int = 1) -> Text:
    return traces.steady(chance, 6000, seed)


@cache
def alternating(easy: float, hard: float, seed: int = 1) -> Text:
    return traces.alternating(easy, hard, 8000, seed)


def rate(policy: GammaPolicy, text: Text, costs: Costs) -> float:
    return traces.ride(policy, text, costs).rate


def regret(policy: GammaPolicy, text: Text, costs: Costs) -> float:
    return 1 - rate(policy, text, costs) / traces.best_fixed(text, costs)


@pytest.mark.parametrize("chance", STEADY)
@pytest.mark.parametrize("name", COSTS)
def test_on_steady_texts_it_is_within_3_percent_of_the_best_gamma(name: str, chance: float) -> None:
    costs = COSTS[name]
    assert regret(AutoGamma(costs, LARGEST), steady(chance), costs) < 0.03


@pytest.mark.parametrize("name", COSTS)
def test_where_chances_fade_along_the_draft_too(name: str) -> None:
    for fade in (0.6, 0.9):
        text = traces.steady(0.9, 6000, 2, fade)
        assert regret(AutoGamma(COSTS[name], LARGEST), text, COSTS[name]) < 0.03


@pytest.mark.parametrize(("easy", "hard"), [(0.95, 0.0), (0.9, 0.05), (0.85, 0.1)])
@pytest.mark.parametrize("name", COSTS)
def test_on_texts_that_alternate_it_beats_every_gamma(name: str, easy: float, hard: float) -> None:
    costs = COSTS[name]
    for seed in (1, 2):
        text = alternating(easy, hard, seed)
        assert rate(AutoGamma(costs, LARGEST), text, costs) > traces.best_fixed(text, costs)


@pytest.mark.parametrize("length", [300, 4000])
@pytest.mark.parametrize("name", COSTS)
def test_where_the_draft_is_always_wrong_it_keeps_97_percent_of_plain(
    name: str, length: int
) -> None:
    costs = COSTS[name]
    for seed in range(3):
        text = traces.steady(0.0, length, seed)
        plain = traces.fixed_rates(text, costs)[0]
        assert rate(AutoGamma(costs, LARGEST), text, costs) >= 0.97 * plain
        draw = random.Random(seed)
        sure = replace(text, confidences=[draw.uniform(0.6, 1) for _ in text.chances])
        assert rate(AutoGamma(costs, LARGEST), sure, costs) >= 0.97 * plain


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("warp", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("shape", [(1.0, 1.0), (2.0, 1.0)])
def test_confidence_that_tells_something_pays(
    name: str, warp: float, shape: tuple[float, float]
) -> None:
    text, costs = traces.telling(5000, 1, shape, warp), COSTS[name]
    told = rate(AutoGamma(costs, LARGEST), text, costs)
    untold = rate(AutoGamma(costs, LARGEST), text.untold(), costs)
    assert told > untold * (0.995 if name in ("stairs", "expensive draft") else 1.004)
    assert told > 0.99 * traces.best_fixed(text, costs)


@pytest.mark.parametrize("name", COSTS)
def test_confidence_that_tells_nothing_costs_next_to_nothing(name: str) -> None:
    draw, costs = random.Random(2), COSTS[name]
    for chance in (0.3, 0.7, 0.9):
        text = replace(steady(chance), confidences=[draw.random() for _ in range(6000)])
        assert regret(AutoGamma(costs, LARGEST), text, costs) < 0.05


def noisy(seed: int) -> traces.Clock:
    """A busy machine: passes vary by an eighth, and one in a hundred takes ten times as long."""
    draw = random.Random(seed)

    def clock(ns: float, engine: str, number: int) -> float:
        return ns * draw.lognormvariate(0, 0.12) * (10 if draw.random() < 0.01 else 1)

    return clock


def true_regret(policy: GammaPolicy, text: Text, costs: Costs, clock: traces.Clock) -> float:
    """Return the regret by what passes cost on average, whatever the clock said."""
    done = traces.ride(policy, text, costs, clock)
    ns = sum(costs.round_ns(r.drafted) for r in done.rounds)
    return 1 - done.tokens / ns * 1e9 / traces.best_fixed(text, costs)


@pytest.mark.parametrize("chance", STEADY[1::2])
@pytest.mark.parametrize("name", COSTS)
def test_clocks_may_be_noisy(name: str, chance: float) -> None:
    policy = AutoGamma(COSTS[name], LARGEST)
    assert true_regret(policy, steady(chance), COSTS[name], noisy(1)) < 0.035


@pytest.mark.parametrize("chance", STEADY[1::2])
@pytest.mark.parametrize(("verify", "draft"), [(0.5, 1.0), (2.0, 1.0), (1.0, 3.0), (1.0, 1 / 3)])
@pytest.mark.parametrize("name", ["206 M int8", "expensive draft"])
def test_costs_that_were_measured_wrong_are_found_out(
    name: str, verify: float, draft: float, chance: float
) -> None:
    policy = AutoGamma(COSTS[name].scaled(verify, draft), LARGEST)
    assert true_regret(policy, steady(chance), COSTS[name], traces.exact) < 0.04


def test_one_pass_held_up_a_hundredfold_does_not_flip_it() -> None:
    def held_up(ns: float, engine: str, number: int) -> float:
        return ns * (100 if number == 500 else 1)

    text = steady(0.7)
    done = traces.ride(AutoGamma(INT8, LARGEST), text, INT8, held_up)
    after = [r.drafted for r in done.rounds[501:560]]
    assert after.count(0) <= 2
    policy = AutoGamma(INT8, LARGEST)
    assert true_regret(policy, text, INT8, held_up) < 0.03


def test_a_plain_step_is_timed_now_and_then_while_drafting_pays() -> None:
    done = traces.ride(AutoGamma(INT8, LARGEST), steady(0.9), INT8)
    drafted = [r.drafted for r in done.rounds]
    plain = [i for i, n in enumerate(drafted) if n == 0]
    gaps = [after - before for before, after in pairwise(plain)]
    assert plain
    assert max(gaps) <= adaptive.CHECK + 1


# What makes these tests tests: policies with a part missing fail them.


def test_without_probing_it_never_comes_back() -> None:
    with patch("specrt.speculation.gamma.PROBING", 1e-9):
        worse = [
            rate(AutoGamma(costs, LARGEST), text, costs) < traces.best_fixed(text, costs)
            for costs in COSTS.values()
            for text in [alternating(0.9, 0.05)]
        ]
    assert all(worse)


def test_without_costs_it_drafts_too_much() -> None:
    flat = Costs((1e6,) * 9, (0.0,) * 9)
    dear = [COSTS[name] for name in ("expensive draft", "206 M int4", "16 M int8")]
    found = [regret(AutoGamma(flat, LARGEST), steady(0.5), costs) for costs in dear]
    assert min(found) > 0.03


@pytest.mark.parametrize("name", COSTS)
def test_without_forgetting_it_gains_less_on_texts_that_alternate(name: str) -> None:
    text, costs = alternating(0.9, 0.05), COSTS[name]
    whole = rate(AutoGamma(costs, LARGEST), text, costs)
    with patch.multiple("specrt.speculation.acceptance", CHANGE=1e-12, EVER=1e-12):
        assert rate(AutoGamma(costs, LARGEST), text, costs) < 0.98 * whole


# Rounds by hand.


def round_of(drafted: int, accepted: int, costs: Costs = INT8, source: str = "model") -> Round:
    return Round(
        [0] * (accepted + 1),
        drafted,
        accepted,
        round(costs.draft(drafted)),
        round(costs.verify(drafted)),
        source if drafted else "",
    )


def judged(policy: AutoGamma, rounds: int, accepted: int) -> list[int]:
    """Let a policy draft, all tokens after the first few being wrong; return what it drafted."""
    drafted = []
    for _ in range(rounds):
        most = policy.choose()
        done = 0
        while done < most:
            done += 1
            if policy.decide(done, 1.0) is not DraftDecision.CONTINUE:
                break
        policy.observe(round_of(done, min(accepted, done)))
        drafted.append(done)
    return drafted


def test_what_was_learned_stays_for_the_next_text() -> None:
    policy = AutoGamma(INT8, LARGEST)
    assert policy.choose() > 0
    judged(policy, 50, 0)
    assert sum(judged(policy, 50, 0)) <= 5


def test_misses_are_neither_probes_nor_rejections() -> None:
    policy = AutoGamma(COSTS["lookup"], LARGEST)
    before = policy.choose()
    assert before > 0
    for _ in range(500):
        assert policy.choose() == before
        policy.observe(round_of(0, 0))
    judged(policy, 30, 0)
    while not policy.choose():
        policy.observe(round_of(0, 0))
    for _ in range(50):
        policy.observe(round_of(0, 0))
        assert policy.choose() == 1, "the probe is still to be made"


def test_the_clock_of_rounds_that_others_drafted_is_not_its_own() -> None:
    """In a cascade a policy hears of them as rounds in which nothing was drafted."""
    policy = AutoGamma(INT8, LARGEST)
    judged(policy, 200, 3)
    before = policy.rate
    for _ in range(500):
        policy.observe(Round([0], 0, 0, 0, round(INT8.verify(0) * 9)))
    policy.choose()
    assert policy.rate == pytest.approx(before, rel=0.1)


@pytest.mark.parametrize("caught_up", [False, True])
def test_what_catching_up_takes_is_no_price_of_drafting(caught_up: bool) -> None:
    policy = AutoGamma(INT8, LARGEST)
    judged(policy, 200, 3)
    before = policy.rate
    for _ in range(200):
        done = policy.choose()
        slow = round_of(done, min(3, done))
        policy.observe(slow._replace(draft_ns=3 * slow.draft_ns, caught_up=caught_up))
    policy.choose()
    assert (policy.rate > 0.98 * before) == caught_up


def test_a_rival_is_what_there_is_to_beat() -> None:
    """A copy that would beat a plain step gives way to a draft model that does better."""
    model = AutoGamma(INT8, LARGEST)
    judged(model, 300, 8)
    assert model.rate > 2.5 / INT8.plain_ns
    alone, cascaded = AutoGamma(INT8, LARGEST), AutoGamma(INT8, LARGEST, model)
    assert sum(judged(alone, 300, 1)[200:]) > 80
    assert sum(judged(cascaded, 300, 1)[200:]) < 20
    assert sum(judged(cascaded, 2000, 8)[1900:]) > 600


def test_it_says_once_why_nothing_is_drafted_until_that_is_over() -> None:
    policy = AutoGamma(INT8, LARGEST)
    judged(policy, 100, 0)
    assert policy.fallback is None
    judged(policy, 1500, 0)
    reason = policy.fallback
    assert reason is not None
    assert reason.startswith("acceptance 0.00 over the last ")
    judged(policy, 100, 0)
    assert policy.fallback == reason
    judged(policy, 400, 8)
    assert policy.fallback is None


def test_costs_that_no_acceptance_pays_for_are_said_at_once() -> None:
    costs = Costs(tuple(1e6 * (1 + g) for g in range(9)), tuple(1e6 * g for g in range(9)))
    policy = AutoGamma(costs, LARGEST)
    assert policy.fallback == (
        "drafting and verifying one token takes 2.0 times as long as a plain step here: no "
        "acceptance pays for that"
    )
    assert sum(judged(policy, 200, 8)) <= 4


def test_the_draft_stops_where_its_confidence_says_the_rest_is_wasted() -> None:
    policy = AutoGamma(INT8, LARGEST)
    traces.ride(policy, traces.telling(5000, 1), INT8)
    assert policy.choose() == LARGEST
    assert policy.decide(1, 0.97) is DraftDecision.CONTINUE
    assert policy.decide(2, 0.97) is DraftDecision.CONTINUE
    assert policy.decide(3, 0.1) is not DraftDecision.CONTINUE


def test_tokens_left_out_are_verified_now_and_then_to_learn_whether_that_was_right() -> None:
    policy = AutoGamma(INT8, LARGEST)
    traces.ride(policy, traces.telling(5000, 1), INT8)
    weights = []
    for _ in range(320):
        policy.choose()
        weights.append(policy.decide(1, 0.001))
    assert weights.count(DraftDecision.STOP) == 10
    assert weights.count(DraftDecision.DISCARD) == 310


def test_a_drafter_that_never_asks_is_served_all_the_same() -> None:
    policy, costs = AutoGamma(INT8, LARGEST), INT8
    for _ in range(150):
        most = policy.choose()
        policy.observe(round_of(most, min(most, 2), costs))
    assert 2 <= policy.choose() <= 4


@pytest.mark.parametrize("most", [0, 1, 16])
def test_any_largest_gamma_will_do(most: int) -> None:
    policy = AutoGamma(INT8, most)
    drafted = judged(policy, 200, 16)
    assert max(drafted) == most


CONFIDENCE = st.floats(0, 1) | st.sampled_from([float("nan"), 7.0])
NS = st.integers(0, 10**12)
TURN = st.tuples(
    st.lists(CONFIDENCE, min_size=LARGEST, max_size=LARGEST), st.integers(0, 8), NS, NS
)


@settings(max_examples=50, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=10), st.sampled_from(sorted(COSTS)), st.integers(1, 60))
def test_no_run_of_rounds_breaks_it(
    turns: list[tuple[list[float], int, int, int]], name: str, times: int
) -> None:
    policy = AutoGamma(COSTS[name], LARGEST)
    for _ in range(times):
        for confidences, accepted, draft_ns, verify_ns in turns:
            most = policy.choose()
            assert 0 <= most <= LARGEST
            kept = []
            for place in range(most):
                weight = policy.decide(place + 1, confidences[place])
                if weight is DraftDecision.DISCARD:
                    break
                kept.append(confidences[place])
                if weight is DraftDecision.STOP:
                    break
            right = min(accepted, len(kept))
            tokens = [0] * (right + 1)
            policy.observe(Round(tokens, len(kept), right, draft_ns, verify_ns, "model", kept))
    assert policy.rate > 0


def test_a_fixed_gamma_rides_as_counted() -> None:
    text = steady(0.6)
    rates = traces.fixed_rates(text, INT8)
    for gamma in (0, 3):
        assert rate(FixedGamma(gamma), text, INT8) == pytest.approx(rates[gamma], rel=0.002)
