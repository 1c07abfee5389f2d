"""Lookup: which earlier passage is found, what is copied from it, and how far."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.speculation.gamma import FixedGamma
from specrt.speculation.ngram import Match, NgramDrafter, Suffixes
from specrt.speculation.round import NOTHING, Proposal, run_alone

# What is copied


def test_a_proposal_tells_how_sure_it_is_by_the_tokens_that_agree() -> None:
    drafter = NgramDrafter(FixedGamma(2))
    expected = Proposal([6, 4], None, "ngram", [2 / 4, 3 / 5])
    assert run_alone(drafter.propose([4, 5, 6, 4, 5], 9)) == expected
    assert run_alone(drafter.propose([1, 2, 3, 9, 3], 9)) is NOTHING
    # A match longer than the 16 tokens looked at is worth no more than one of 16.
    far = run_alone(drafter.propose([*range(30), *range(20)], 9))
    assert far.confidences == [16 / 18, 17 / 19]


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
    """Counts the transitions looked up."""

    work = 0

    def _after(self, state: int, token: int) -> int:
        self.work += 1
        return super()._after(state, token)


def texts(size: int) -> dict[str, list[int]]:
    rng = random.Random(0)
    return {
        "one letter": [7] * size,
        "two letters": [rng.randrange(2) for _ in range(size)],
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

    assert work(8000) <= min(10, 1.2 * work(1000))
