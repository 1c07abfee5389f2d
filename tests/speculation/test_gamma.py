"""Gamma policies: the regret of `auto` on every family of traces, and every policy's protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import gamma_traces
import pytest
import replay_gamma
from gamma_traces import LARGEST, MACHINES, REGRETS, Trace, all_traces, best_fixed, ride
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.speculation import auto_gamma
from specrt.speculation.auto_gamma import AutoGamma
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import BuiltGamma, DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Round

INT8 = MACHINES["206 M int8"]
TRACES = all_traces()


def regret(trace: Trace, policy: Callable[..., AutoGamma] = AutoGamma) -> float:
    """Return how far a policy falls behind the best fixed gamma."""
    return 1 - ride(*replay_gamma.start(policy, trace)).rate() / best_fixed(trace)


@pytest.mark.parametrize("family", REGRETS)
def test_auto_falls_behind_the_best_fixed_gamma_by_little(family: str) -> None:
    few = TRACES[family][-1 :: -max(1, len(TRACES[family]) // 3)]
    worst = max((regret(trace), trace.name) for trace in few)
    assert worst[0] <= REGRETS[family], worst


@pytest.mark.nightly
@pytest.mark.parametrize("family", REGRETS)
def test_on_no_trace_does_auto_fall_further_behind(family: str) -> None:
    worst = max((regret(trace), trace.name) for trace in TRACES[family])
    assert worst[0] <= REGRETS[family], worst


@pytest.mark.parametrize("step", [21, pytest.param(1, marks=pytest.mark.nightly)])
def test_after_500_tokens_wrong_costs_are_found_out(step: int) -> None:
    for trace in TRACES["wrong shape"][::step]:
        done = ride(AutoGamma(trace.known, LARGEST), trace)
        assert done.rate(500) >= 0.95 * best_fixed(trace, 500), trace.name


def test_one_pass_held_up_does_not_flip_it() -> None:
    jitter = [1.0] * 20000
    jitter[1001] = 100.0
    trace = Trace("held up", gamma_traces.steady(0.7, 6000, 1), INT8, jitter=jitter)
    done = ride(AutoGamma(INT8, LARGEST), trace)
    assert [r.drafted for r in done.rounds[501:560]].count(0) <= 2


# What makes the bounds tests: policies with a part missing do not keep them.


def test_without_probes_it_never_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_gamma, "PROBING", 1e-9)
    assert regret(TRACES["recovering"][0]) > REGRETS["recovering"]


def test_that_takes_no_text_to_turn_it_misses_what_alternating_texts_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto_gamma, "TURN", 1e-12)
    assert regret(TRACES["alternating"][-1]) > REGRETS["alternating"]


def test_without_true_costs_it_drafts_too_much() -> None:
    deaf = type("Deaf", (AutoGamma,), {"observe": lambda self, round_: None})
    flat = Costs((1e6,) * 9, (0.0,) * 9)
    for name in ("expensive draft", "206 M int4", "16 M int8"):
        trace = Trace(name, gamma_traces.steady(0.5, 6000, 1), MACHINES[name], tuned=flat)
        assert regret(trace, deaf) > 0.05


# Rounds by hand.


def judged(
    policy: GammaPolicy, rounds: int, accepted: int, costs: Costs = INT8, caught_up: bool = False
) -> list[int]:
    """Let a policy draft, a few tokens of each round being right; return how many it had judged."""
    judged = []
    for _ in range(rounds):
        most, steps, kept = policy.choose(), 0, 0
        while steps < most:
            steps += 1
            decision = policy.decide(steps, 1.0)
            kept = steps - (decision is DraftDecision.DISCARD)
            if decision is not DraftDecision.CONTINUE:
                break
        judged.append(kept)
        policy.observe(round_of(kept, min(accepted, kept), costs)._replace(caught_up=caught_up))
    return judged


def round_of(drafted: int, accepted: int, costs: Costs = INT8) -> Round:
    times = round(costs.draft(drafted)), round(costs.verify(drafted))
    return Round([0] * (accepted + 1), drafted, accepted, *times)


def test_it_tells_why_nothing_is_drafted_until_that_is_over() -> None:
    policy = AutoGamma(INT8, LARGEST)
    judged(policy, 10, 8)
    assert policy.fallback is None
    judged(policy, 1500, 0)
    assert policy.fallback is not None
    assert "times as long" in policy.fallback
    judged(policy, 1500, 8)
    assert policy.fallback is None


def test_costs_that_no_acceptance_pays_for_are_told_at_once() -> None:
    dear = Costs(tuple(1e6 * (1 + g) for g in range(9)), tuple(1e6 * g for g in range(9)))
    policy = AutoGamma(dear, LARGEST)
    assert policy.fallback is not None
    judged(policy, 200, 8, dear)  # perfect drafts make it try every width first
    assert sum(judged(policy, 200, 8, dear)) <= 4


def test_a_plain_step_is_timed_now_and_then_while_drafting_pays() -> None:
    drafted = judged(AutoGamma(INT8, LARGEST), 1000, 8)
    plain = [i for i, n in enumerate(drafted) if n == 0]
    assert max(after - before for before, after in pairwise(plain)) <= auto_gamma.CHECK + 1


def test_a_rival_is_what_there_is_to_beat() -> None:
    """A copy that would beat a plain step gives way to a draft model that does better."""
    model = AutoGamma(INT8, LARGEST)
    judged(model, 300, 8)
    alone, cascaded = AutoGamma(INT8, LARGEST), AutoGamma(INT8, LARGEST, model)
    assert sum(judged(alone, 300, 1)[200:]) > 80
    assert sum(judged(cascaded, 300, 1)[200:]) < 30


def test_what_catching_up_takes_is_no_cost_of_drafting() -> None:
    slow = INT8.scaled(draft=10.0)
    rates = []
    for costs, caught_up in ((INT8, False), (slow, True), (slow, False)):
        policy = AutoGamma(INT8, LARGEST)
        judged(policy, 200, 3)
        judged(policy, 200, 3, costs, caught_up)
        rates.append(policy.rate)
    assert rates[1] > 0.98 * rates[0]
    assert rates[2] < 0.95 * rates[0]


def test_more_rows_make_wide_passes_dear() -> None:
    load = 1
    policy = AutoGamma(INT8, LARGEST, load=lambda: load)
    narrow = sum(judged(policy, 300, 2)[200:])
    load = 8
    wide = sum(judged(policy, 300, 2, INT8.shared(8, LARGEST))[200:])
    assert wide < narrow


@pytest.mark.parametrize("most", [0, 1, 16])
def test_any_largest_gamma_will_do(most: int) -> None:
    assert max(judged(AutoGamma(INT8, most), 200, 16)) == most


CONFIDENCE = st.floats(0, 1) | st.sampled_from([float("nan"), 7.0])
NS = st.integers(0, 10**12)
TURN = st.tuples(
    st.lists(CONFIDENCE, min_size=LARGEST, max_size=LARGEST), st.integers(0, 8), NS, NS
)


@settings(max_examples=50, deadline=None)
@given(st.lists(TURN, min_size=1, max_size=10), st.sampled_from(sorted(MACHINES)))
def test_no_run_of_rounds_breaks_it(
    turns: list[tuple[list[float], int, int, int]], name: str
) -> None:
    policy = AutoGamma(MACHINES[name], LARGEST)
    for confidences, accepted, draft_ns, verify_ns in turns * 20:
        most, kept = policy.choose(), 0
        assert 0 <= most <= LARGEST
        for place in range(most):
            decision = policy.decide(place + 1, confidences[place])
            kept += decision is not DraftDecision.DISCARD
            if decision is not DraftDecision.CONTINUE:
                break
        right = min(accepted, kept)
        policy.observe(Round([0] * (right + 1), kept, right, draft_ns, verify_ns))
    assert policy.rate > 0


# The other policies.


def test_a_fixed_gamma_stays_whatever_comes() -> None:
    policy = FixedGamma(4)
    assert judged(policy, 4, 0) == [4] * 4
    assert policy.decide(4, 0.01) is DraftDecision.CONTINUE
    assert FixedGamma(0).choose() == 0


class Script:
    """Chooses one gamma, and ends every draft at one place."""

    def __init__(self, chosen: int, stop: int, end: DraftDecision) -> None:
        self.chosen, self.stop, self.end = chosen, stop, end

    def choose(self) -> int:
        return self.chosen

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        return self.end if drafted >= self.stop else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None: ...


@pytest.mark.parametrize("end", [DraftDecision.DISCARD, DraftDecision.STOP])
def test_a_policy_is_kept_to_the_gammas_that_were_built(end: DraftDecision) -> None:
    built = (0, 2, 5)
    for chosen in range(8):
        least = min((g for g in built if g >= chosen), default=5)
        assert BuiltGamma(Script(chosen, 9, end), built).choose() == least
    for stop in range(1, 6):
        policy = BuiltGamma(Script(5, stop, end), built)
        kept = next(
            k - (d is DraftDecision.DISCARD)
            for k in range(1, 9)
            if (d := policy.decide(k, 0.5)) is not DraftDecision.CONTINUE or k == 5
        )
        assert kept in built
        assert kept >= stop - (end is DraftDecision.DISCARD)


def test_rows_that_share_a_pass_pay_for_a_pass_of_all_their_tokens() -> None:
    """Of `load` rows that verify gamma tokens each a pass is load * (gamma + 1) tokens wide."""
    costs = Costs(tuple(100.0 + 7 * g * g for g in range(20)), (0.0, 3.0, 5.0), 2.0)
    assert costs.shared(1, 2) == replace(costs, verify_ns=costs.verify_ns[:3])
    for load in (2, 3, 4):
        shared = costs.shared(load, 2)
        assert shared.verify_ns == tuple(costs.verify_ns[load * (g + 1) - 1] for g in range(3))
        assert (shared.draft_ns, shared.outside_ns) == (costs.draft_ns, 2.0 * load)
