"""Lookup: which earlier passage is found, what is copied from it, and how far."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.errors import RequestError
from specrt.speculation.gamma import DraftDecision, FixedGamma
from specrt.speculation.ngram import Match, NgramDrafter, Suffixes
from specrt.speculation.round import NOTHING, Proposal, run_alone
from speculation.support import Script, loop
from support.toy import Call, TableEngine

PROMPT = [3, 1, 4, 1, 5]


# What is copied


def test_a_proposal_names_its_source_and_how_sure_it_is() -> None:
    drafter = NgramDrafter(FixedGamma(2))
    expected = Proposal([6, 4], None, "ngram", [2 / 4, 3 / 5])
    assert run_alone(drafter.propose([4, 5, 6, 4, 5], 9)) == expected
    assert run_alone(drafter.propose([1, 2, 3, 9, 3], 9)) is NOTHING


def test_a_miss_costs_a_plain_step() -> None:
    # Whatever text comes, 29 tokens in falling order have no pair twice.
    target = TableEngine(1)
    target.script = {len(PROMPT) + i: 28 - i for i in range(29)}
    done = loop(target, NgramDrafter(FixedGamma(8)), PROMPT, new=20)
    assert [(r.drafted, r.source) for r in done.rounds] == [(0, "")] * 20
    assert target.calls[1:] == [Call(len(PROMPT) + i, 1, 1) for i in range(19)]


@given(
    text=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    gamma=st.integers(0, 12),
    room=st.integers(-1, 12),
    least=st.integers(1, 5),
)
def test_a_draft_is_a_copy_of_what_the_text_would_be_if_it_went_on(
    text: list[int], gamma: int, room: int, least: int
) -> None:
    drafter = NgramDrafter(FixedGamma(gamma), least=least, most=6)
    drafted = run_alone(drafter.propose(text, room)).tokens
    match = searched(text, least, 6)
    if match is None or min(gamma, room) <= 0:
        assert not drafted
        return
    assert len(drafted) == min(gamma, room)
    whole, back = [*text, *drafted], len(text) - match.end
    assert all(whole[i] == whole[i - back] for i in range(len(text) - match.length, len(whole)))


def test_a_copied_passage_takes_few_rounds() -> None:
    target = TableEngine(1, vocab=400)
    passage = [*range(10, 110)]
    target.script = {101 + i: token for i, token in enumerate(passage[1:])}
    done = loop(target, NgramDrafter(FixedGamma(8)), [*passage, passage[0]], 99)
    assert done.tokens == passage[1:]
    # The prefill, then nine tokens a round, in a match that is there from the first one on.
    assert len(done.rounds) == 1 + 11
    assert all(r.accepted == r.drafted for r in done.rounds)


# The policy


def test_tokens_of_plain_rounds_are_read_later() -> None:
    policy = Script(0)
    drafter = NgramDrafter(policy)
    text = [1, 2, 3, 4, 5, 6, 7]
    for gamma, more, expected in (
        (0, [], []),
        (2, [], []),
        (0, [8, 9], []),
        (2, [8, 9, 2, 3], [4, 5]),
    ):
        policy.gamma = gamma
        assert list(run_alone(drafter.propose([*text, *more], 9)).tokens) == expected


@pytest.mark.parametrize("place", range(1, 6))
@pytest.mark.parametrize("decision", DraftDecision)
def test_what_the_policy_decides_about_a_token_is_done(place: int, decision: DraftDecision) -> None:
    before = (DraftDecision.CONTINUE,) * (place - 1)
    policy = Script(7, *before, decision)
    proposal = run_alone(NgramDrafter(policy).propose([*range(10, 20), 10, 11], 100))
    goes_on = decision is DraftDecision.CONTINUE
    kept = 7 if goes_on else place - (decision is DraftDecision.DISCARD)
    assert list(proposal.tokens) == [*range(12, 12 + kept)]
    assert [drafted for drafted, _ in policy.weighed] == [*range(1, (7 if goes_on else place) + 1)]
    assert list(proposal.confidences) == [c for _, c in policy.weighed][:kept]
    assert kept or proposal is NOTHING


def test_confidence_grows_with_the_tokens_that_agree() -> None:
    first = []
    for length in range(1, 20):
        text = [*range(100, 150), 50, *range(150 - 30 - length, 150 - 30)]
        proposal = run_alone(NgramDrafter(FixedGamma(8), least=1).propose(text, 100))
        assert all(0 < a < b < 1 for a, b in pairwise(proposal.confidences))
        first.append(proposal.confidences[0])
    # A match longer than the 16 tokens looked at is worth no more than one of 16.
    assert all(a < b for a, b in pairwise(first[:16]))
    assert first[15:] == [16 / 18] * 4


# The suffix structure against a search of the whole text, after every token


def searched(text: list[int], least: int, most: int) -> Match | None:
    """Find the most recent earlier occurrence of the longest suffix by looking everywhere."""
    size = len(text)
    for length in range(min(most, size - 1), least - 1, -1):
        for end in range(size - 1, length - 1, -1):
            if text[end - length : end] == text[size - length :]:
                return Match(length, end)
    return None


BOUNDS = st.tuples(st.integers(1, 5), st.integers(0, 8)).map(lambda b: (b[0], b[0] + b[1]))
LETTERS = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=80))
PIECES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=3)
"""Texts made of a few pieces over and over: matches far longer than `most`, and their ends."""
COPIES = PIECES.flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=14).map(
        lambda chosen: [token for piece in chosen for token in piece]
    )
)


@settings(max_examples=150, deadline=None)
@given(LETTERS | COPIES, BOUNDS, st.integers(1, 7))
def test_the_match_is_the_longest_and_of_those_the_most_recent(
    text: list[int], bounds: tuple[int, int], step: int
) -> None:
    """However many tokens come at once."""
    suffixes = Suffixes(*bounds)
    for start in range(0, len(text), step):
        suffixes.extend(text[start : start + step])
        known = text[: start + step]
        assert len(suffixes) == len(known)
        assert suffixes.longest() == searched(known, *bounds)


class Counted(Suffixes):
    """Counts the transitions looked up and made."""

    work = 0

    def _after(self, state: int, token: int) -> int:
        self.work += 1
        return super()._after(state, token)

    def _lead(self, state: int, token: int, to: int) -> None:
        self.work += 1
        super()._lead(state, token, to)


def texts(size: int) -> dict[str, list[int]]:
    rng = random.Random(0)
    block = [rng.randrange(5000) for _ in range(size // 4)]
    return {
        "one letter": [7] * size,
        "two letters": [rng.randrange(2) for _ in range(size)],
        "words": [min(int(rng.paretovariate(0.7)), 5000) for _ in range(size)],
        "copies": block * 4,
        "period": [1, 2, 3] * (size // 3),
        # The classic worst case of the automaton, a b^n: splits at every turn.
        "abbb": [0] + [1] * (size - 1),
    }


@pytest.mark.parametrize("name", texts(4))
def test_a_token_costs_as_much_in_a_long_text_as_in_a_short_one(name: str) -> None:
    def work(size: int) -> float:
        suffixes = Counted(2, 16)
        suffixes.extend(texts(size)[name])
        return suffixes.work / size

    # At most 3 transitions and 2 states a token are ever made; each is looked up a few times.
    assert work(8000) <= 10
    assert work(8000) <= 1.2 * work(1000)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (-1, 4), (5, 4), (0, 0)])
def test_suffixes_of_impossible_lengths_are_refused(least: int, most: int) -> None:
    with pytest.raises(RequestError, match=rf"suffixes of {least} to {most} tokens .* at least 1"):
        NgramDrafter(FixedGamma(4), least=least, most=most)
