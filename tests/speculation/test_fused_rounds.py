"""Greedy rounds in one launch: plain decoding's tokens, and costs that tell their parts apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.engine.protocol import OffsetRounds
from specrt.params import SamplingParams
from specrt.speculation.drafters import CascadeDrafter
from specrt.speculation.gamma import BuiltGamma, FixedGamma, GammaPolicy
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.round import Drafter
from specrt.speculation.target import VERIFIERS
from speculation.support import Whim
from support.gpu_double import LENGTH, PROMPT, Pair
from support.toy import TableEngine, near, plain

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
@settings(max_examples=20, deadline=None)
def test_fused_rounds_are_plain_decoding(
    seed: int, gamma: Any, prompt: int, new: int, wrong: set[int], broken: set[int], cascade: bool
) -> None:
    """Up to the ends of the buffers, with a draft that is wrong here and has no numbers there."""
    target = TableEngine(seed, max_length=LENGTH, memory=1 if cascade else None)
    pair = Pair(target, near(target, seed, 1.0, wrong_at=wrong), broken)
    policy: GammaPolicy = Whim(seed)
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


@pytest.mark.parametrize("place", [0, 3])
def test_a_draft_without_a_number_is_cut_where_it_begins(place: int) -> None:
    """The second round drafts 4; the draft has no number to choose the one at `place`."""
    target = TableEngine(2, max_length=LENGTH)
    tokens = [*PROMPT, *plain(target, PROMPT, 6)]
    pair = Pair(target, near(target, 3, 1.0), {len(tokens) + place})
    found, rounds = pair.run(pair.drafter(FixedGamma(4)), PROMPT, 40)
    assert found == plain(target, PROMPT, 40)
    assert [(r.drafted, r.accepted) for r in rounds[1:3]] == [(4, 4), (place, place)]


@pytest.mark.parametrize("vocabulary", [20, 40])
def test_vocabularies_of_other_sizes(vocabulary: int) -> None:
    target = TableEngine(8, max_length=LENGTH, memory=1)
    pair = Pair(target, TableEngine(9, max_length=LENGTH, vocab=vocabulary, memory=1))
    assert (pair.rounds is None) is (vocabulary > 29)
    for seed in range(6):
        text = [(seed * 5 + i) % min(29, vocabulary) for i in range(6)]
        found, rounds = pair.run(pair.drafter(FixedGamma(3)), text, 50)
        assert found == plain(target, text, 50)
        assert any(round_.drafted for round_ in rounds[1:]) or max(found[:1]) >= vocabulary
    assert pair.rounds is None or pair.rounds.ran


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_sampling_takes_its_passes_one_by_one(verifier: str) -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 0.9))
    assert pair.rounds is not None
    params = SamplingParams(temperature=1.0, verifier=verifier)
    pair.run(pair.drafter(FixedGamma(4), params), PROMPT, 40, params)
    assert pair.rounds.ran == []


def test_offset_rounds_run_further_on_in_both_engines() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 1.0))
    assert pair.rounds is not None
    for model in (pair.target, pair.draft):
        model.forward([PROMPT[:10]], 0, 1)
    later, last = OffsetRounds(pair.rounds, 7), LENGTH - 7 - 3
    assert later.fits(2, 1, last, last)
    assert not later.fits(2, 1, last + 1, last + 1)
    found = later.run(PROMPT[9:10], 2, PROMPT[9], 2, 2)
    assert found.tokens == plain(target, PROMPT[:10], 2)
    verified = pair.target.forward([[PROMPT[9], *found.tokens]], 9)
    assert verified.argmax[0].tolist() == plain(target, PROMPT[:10], 3)
