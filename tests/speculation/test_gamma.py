"""Gamma policies: the regret of `auto` on every family of traces, and every policy's protocol."""

from __future__ import annotations

from functools import cache
from math import exp
from statistics import mean
from typing import Any

import pytest
import replay_gamma
from gamma_traces import (
    LARGEST,
    MACHINES,
    REGRETS,
    Drafts,
    Trace,
    all_traces,
    best_fixed,
    draft,
    fixed_rate,
    ride,
)

from specrt.speculation.auto_gamma import AutoGamma
from specrt.speculation.compiled_gamma import auto_factory
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import BuiltGamma, DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Round
from speculation.support import Script

INT8 = MACHINES["206 M int8"]
AUTO: Any = auto_factory().policy
"""The one that decides here: compiled, or Python's, which comes to the same."""
traces = cache(all_traces)


def one_of(family: str) -> Trace:
    return traces()[family][len(traces()[family]) // 2]


def regret(trace: Trace, policy: Any = AUTO) -> float:
    """Return how far a policy falls behind the best fixed gamma."""
    return 1 - ride(*replay_gamma.start(policy, trace)).rate() / best_fixed(trace)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", REGRETS)
def test_auto_falls_behind_the_best_fixed_gamma_by_little(family: str, every: bool) -> None:
    chosen = traces()[family] if every else [one_of(family), traces()[family][-1]]
    worst = max((regret(trace), trace.name) for trace in chosen)
    assert worst[0] <= REGRETS[family], worst


class Resigned(AutoGamma):
    """Never drafts again once drafting did not pay."""

    def choose(self) -> int:
        return super().choose() if self.fallback() is None else 0


class Settled(AutoGamma):
    """Learns from its first rounds only."""

    rounds = 0

    def observe(self, round_: Round) -> None:
        self.rounds += 1
        if self.rounds < 300:
            super().observe(round_)


class Deaf(AutoGamma):
    """Learns nothing."""

    def observe(self, round_: Round) -> None: ...


@pytest.mark.parametrize(
    ("policy", "family"),
    [(Resigned, "recovering"), (Settled, "alternating"), (Deaf, "always wrong")],
)
def test_a_policy_with_a_part_missing_falls_further_behind(
    policy: type[AutoGamma], family: str
) -> None:
    """Without this the bounds would test nothing."""
    assert regret(one_of(family), policy) > REGRETS[family]


# Rounds by hand.


def judged(
    policy: GammaPolicy, rounds: int, right: int, costs: Costs = INT8, caught_up: bool = False
) -> list[int]:
    """Let a policy draft, a few tokens of each round being right; return how many it had judged."""
    judged = []
    for _ in range(rounds):
        _, kept, accepted = draft(policy, Drafts([right], [[1.0] * 16]), 0)
        judged.append(kept)
        ns = round(costs.draft(kept)), round(costs.verify(kept))
        policy.observe(Round([0] * (accepted + 1), kept, accepted, *ns, caught_up=caught_up))
    return judged


def test_it_tells_why_nothing_is_drafted_until_that_is_over() -> None:
    policy = AutoGamma(INT8, LARGEST)
    judged(policy, 10, 8)
    assert policy.fallback() is None
    judged(policy, 1000, 0)
    assert "times as long" in (policy.fallback() or "")
    judged(policy, 1000, 8)
    assert policy.fallback() is None


@pytest.mark.parametrize("end", [DraftDecision.DISCARD, DraftDecision.STOP])
def test_a_policy_is_kept_to_the_gammas_that_were_built(end: DraftDecision) -> None:
    built = (0, 2, 5)
    for chosen in range(8):
        least = min((g for g in built if g >= chosen), default=5)
        assert BuiltGamma(Script(chosen), built).choose() == least
    for stop in range(1, 6):
        decisions = [DraftDecision.CONTINUE] * (stop - 1) + [end] * 9
        policy = BuiltGamma(Script(5, *decisions), built)
        _, kept, _ = draft(policy, Drafts([9], [[0.5] * 9]), 0)
        assert kept in built
        assert kept >= stop - (end is DraftDecision.DISCARD)


def test_it_goes_on_after_a_long_draft_of_ever_surer_tokens_that_are_all_right() -> None:
    most = 144
    policy = AutoGamma(Costs.assume(most), most)
    for _ in range(3):
        assert policy.choose() == most
        for place in range(1, most + 1):
            policy.decide(place, 1 / (1 + exp(36 - place / 2)))
        policy.observe(Round([7] * (most + 1), most, most, 10**4 * most, 10**7))
    assert policy.choose() == most


def test_without_drafts_there_is_nothing_to_fall_back_from() -> None:
    policy = AutoGamma(INT8, 0)
    for _ in range(300):
        assert policy.choose() == 0
        policy.observe(Round([0], 0, 0, 0, 1000))
    assert policy.fallback() is None


@pytest.mark.parametrize("family", ["recorded", "steady", "busy"])
def test_the_best_fixed_gamma_is_counted_as_it_rides(family: str) -> None:
    for trace in (one_of(family), traces()[family][-1]):
        second = 2 if trace.second is not None else 0
        found = fixed_rate(trace, 4, second, 100, trace.length)
        assert found == pytest.approx(ride(FixedGamma(4), trace, FixedGamma(second)).rate(100))


def test_a_draft_of_one_pass_goes_as_far_as_verifying_pays() -> None:
    """What a long draft costs is spent before its first token is known."""
    verify = tuple(100.0 + gamma for gamma in range(8))
    chain = Costs(verify, tuple(30.0 * gamma for gamma in range(8)))
    block = Costs(verify, (0.0, *([30.0] * 7)), one_pass=True)
    drafted = [judged(AutoGamma(costs, 7), 200, 2, costs)[100:] for costs in (chain, block)]
    assert mean(drafted[1]) > mean(drafted[0]) + 1
