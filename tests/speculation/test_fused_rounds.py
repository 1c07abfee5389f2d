"""Greedy rounds in one launch: plain decoding's tokens, and costs that tell their parts apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.toy import TableEngine, near, plain
from specrt.engine.protocol import OffsetRounds
from specrt.engine.tensorrt.engine import TensorRtEngine
from specrt.engine.tensorrt.fused_round import fused_rounds
from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import CascadeDrafter
from specrt.speculation.gamma import BuiltGamma, DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.pool import as_one_launch
from specrt.speculation.round import NOTHING, Drafter, Round, run_alone, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from support.cuda_double import DoubleDevice
from support.tensorrt_double import (
    GAMMAS,
    GREEDY,
    LENGTH,
    PREFILL,
    PROMPT,
    Pair,
    draft_profiles,
    opened,
)


class Random:
    """Any gamma and any weight, as long as both are of a policy."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self) -> int:
        return int(self._rng.integers(0, 9))

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        return list(DraftDecision)[self._rng.choice(3, p=[0.1, 0.2, 0.7])]

    def observe(self, round_: Round) -> None:
        assert round_.draft_ns >= 0
        assert round_.verify_ns >= 0


positions = st.sets(st.integers(1, LENGTH), max_size=40)


@given(
    seed=st.integers(0, 1000),
    gamma=st.sampled_from((*range(9), "random", "built")),
    prompt=st.integers(1, 40),
    new=st.integers(1, LENGTH),
    wrong=positions,
    broken=positions,
    cascade=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_whole_rounds_are_plain_decoding(
    seed: int, gamma: Any, prompt: int, new: int, wrong: set[int], broken: set[int], cascade: bool
) -> None:
    target = TableEngine(seed, max_length=LENGTH, memory=1 if cascade else None)
    draft = near(target, seed, 1.0, wrong_at=wrong)
    pair = Pair(target, draft, broken)
    policy: GammaPolicy = Random(seed)
    if gamma == "built":
        policy = BuiltGamma(policy, (0, 2, 3, 8))
    elif gamma != "random":
        policy = FixedGamma(gamma)
    drafter: Drafter = pair.drafter(policy)
    if cascade:
        drafter = CascadeDrafter(NgramDrafter(FixedGamma(3)), drafter)
    text = [(seed + 7 * i) % 29 for i in range(prompt)]
    found, rounds = pair.run(drafter, text, new)
    assert found == plain(target, text, new)
    for round_ in rounds:
        assert len(round_.confidences) == round_.drafted
        assert bool(round_.source) is bool(round_.drafted)
    pair.draft.close()
    pair.target.close()
    assert pair.device.live == []


@pytest.mark.parametrize("place", range(5))
def test_a_draft_without_a_number_is_cut_where_it_begins(place: int) -> None:
    """A round after the prompt drafts 4; the draft has no number to choose the one at `place`."""
    target = TableEngine(2, max_length=LENGTH)
    first = len(PROMPT) + 1 + 5  # the first round keeps 4 and adds one
    pair = Pair(target, near(target, 3, 1.0), {first + place})
    assert pair.rounds is not None
    drafter = pair.drafter(FixedGamma(4))
    tokens = list(PROMPT)
    going = run_rounds(
        speculate(EngineTarget(KVCache(pair.target), GREEDY, Noise(3)), drafter, tokens, 60)
    )
    next(going)
    assert next(going).accepted == 4
    assert len(tokens) == first
    proposal = run_alone(drafter.propose(tokens, 30))
    assert pair.rounds.ran == [(2, 4)]
    kept = min(place, 4)
    assert list(proposal.tokens) == plain(target, tokens, kept)
    assert (proposal == NOTHING) is (place == 0)
    assert proposal.scored is (place == 4)
    wanted = plain(target, PROMPT, 40)
    found, _ = pair.run(pair.drafter(FixedGamma(4)), PROMPT, 40)
    assert found == wanted


def test_tokens_of_other_drafters_are_caught_up_with_pass_by_pass() -> None:
    target = TableEngine(4, max_length=LENGTH)
    pair = Pair(target, near(target, 5, 1.0))
    assert pair.rounds is not None
    drafter = pair.drafter(FixedGamma(3))
    tokens = [*PROMPT, *plain(target, PROMPT, 1)]
    told: list[tuple[bool, bool]] = []
    for more in (0, 0, 1, 2, 0, 3, 0):
        tokens += plain(target, tokens, more)  # somebody else's round
        for at in range(0, len(tokens) - 1, PREFILL):
            pair.target.forward([tokens[at : min(at + PREFILL, len(tokens) - 1)]], at, 1)
        proposal = run_alone(drafter.propose(tokens, 20))
        assert list(proposal.tokens) == plain(target, tokens, 3)
        told.append((proposal.scored, proposal.caught_up))
        tokens += plain(target, tokens, 1)  # none of them was kept, whatever they were
        drafter.observe(tokens, Round(tokens[-1:], 3, 0, 1, 1, "model"))
    whole, late = (True, False), (False, True)
    assert told == [late, whole, whole, late, whole, late, whole]
    assert pair.rounds.ran == [(1, 3), (2, 3), (1, 3), (1, 3)]


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_near_the_end_of_the_buffers_passes_run_one_by_one(gamma: int) -> None:
    target = TableEngine(6, max_length=LENGTH)
    pair = Pair(target, near(target, 7, 0.8))
    assert pair.rounds is not None
    found, rounds = pair.run(pair.drafter(FixedGamma(gamma)), PROMPT, LENGTH)
    assert found == plain(target, PROMPT, LENGTH)
    assert len(found) == LENGTH + 1 - len(PROMPT)
    assert rounds[-1].drafted <= gamma
    assert pair.rounds.ran


def test_no_round_runs_beyond_the_buffers_of_either_engine() -> None:
    target = TableEngine(6, max_length=LENGTH)
    pair, short = Pair(target, target), Pair(target, TableEngine(7, max_length=60))
    assert pair.rounds is not None
    assert short.rounds is not None
    for gamma in GAMMAS:
        last = LENGTH - gamma - 1
        assert pair.rounds.fits(gamma, 1, last, last)
        assert not pair.rounds.fits(gamma, 1, last, last + 1)
        assert pair.rounds.fits(gamma, 2, last - 1, last)
        assert not pair.rounds.fits(gamma, 3, last - 2, last)
        later = OffsetRounds(pair.rounds, 10)
        assert later.fits(gamma, 1, last - 10, last - 10)
        assert not later.fits(gamma, 1, last - 9, last - 9)
        least = 60 - gamma  # what is drafted last is not fed to the draft
        assert short.rounds.fits(gamma, 1, least, least)
        assert short.rounds.fits(gamma, 2, least - 1, least)
        assert not short.rounds.fits(gamma, 1, least + 1, least + 1)
        assert not short.rounds.fits(gamma, 2, least, least + 1)


@pytest.mark.parametrize("vocabulary", [20, 29, 40])
def test_vocabularies_of_other_sizes(vocabulary: int) -> None:
    target = TableEngine(8, max_length=LENGTH, memory=1)
    draft = TableEngine(9, max_length=LENGTH, vocab=vocabulary, memory=1)
    pair = Pair(target, draft)
    assert (pair.rounds is None) is (vocabulary > 29)
    for seed in range(6):
        text = [(seed * 5 + i) % min(29, vocabulary) for i in range(6)]
        found, rounds = pair.run(pair.drafter(FixedGamma(3)), text, 50)
        assert found == plain(target, text, 50)
        assert any(round_.drafted for round_ in rounds[1:]) or max(found[:1]) >= vocabulary
    if pair.rounds is not None:
        assert pair.rounds.ran


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_sampling_takes_its_passes_one_by_one(verifier: str) -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 0.9))
    assert pair.rounds is not None
    params = SamplingParams(temperature=1.0, verifier=verifier)
    pair.run(pair.drafter(FixedGamma(4), params), PROMPT, 40, params)
    assert pair.rounds.ran == []


class Watched:
    """A policy that only notes what it is told."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.confidences: list[float] = []

    def choose(self) -> int:
        return 3

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        self.confidences.append(confidence)
        return DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)


def test_a_policy_hears_of_rounds_in_one_piece() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 0.7))
    told = Watched()
    _, rounds = pair.run(pair.drafter(told), PROMPT, 60)
    assert [r.tokens for r in told.rounds] == [r.tokens for r in rounds[1:]]
    for on_update, ran in zip(told.rounds, rounds[1:], strict=True):
        assert on_update.draft_ns + on_update.verify_ns == ran.draft_ns + ran.verify_ns
        assert (on_update.verify_ns == 0) is on_update.caught_up
        assert on_update.draft_ns == 0 or on_update.caught_up
    assert [r.caught_up for r in told.rounds] == [True] + [False] * (len(told.rounds) - 1)
    assert set(told.confidences) == {1.0}  # nothing that a launch could not act on


def test_later_rounds_run_further_on_in_both_engines() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 1.0))
    assert pair.rounds is not None
    for model in (pair.target, pair.draft):
        model.forward([PROMPT[:10]], 0, 1)
    later = OffsetRounds(pair.rounds, 7)
    found = later.run(PROMPT[9:10], 2, PROMPT[9], 2, 2)
    assert found.tokens == plain(target, PROMPT[:10], 2)
    verified = pair.target.forward([[PROMPT[9], *found.tokens]], 9)
    assert verified.argmax[0].tolist() == plain(target, PROMPT[:10], 3)


def test_an_engine_of_another_kind_has_no_whole_rounds() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, target)
    assert fused_rounds(pair.target, None) is None
    assert fused_rounds(pair.target, target) is None
    assert fused_rounds(target, pair.draft) is None
    lone: TensorRtEngine = opened(DoubleDevice(1 << 20), target, draft_profiles(PREFILL))
    assert fused_rounds(pair.target, lone) is None  # another device
    assert fused_rounds(pair.draft, pair.draft) is None  # no gamma was built
    assert isinstance(as_one_launch(Costs((1.0,), (0.0,))), Costs)
