"""The suffix structure against a search of the whole text, after every token."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.errors import RequestError
from specrt.speculation.ngram import Match, Suffixes


def searched(text: list[int], least: int, most: int) -> Match | None:
    """Find the most recent earlier occurrence of the longest suffix by looking everywhere."""
    size = len(text)
    for length in range(min(most, size - 1), least - 1, -1):
        for end in range(size - 1, length - 1, -1):
            if text[end - length : end] == text[size - length :]:
                return Match(length, end)
    return None


def check(text: list[int], least: int, most: int) -> set[int]:
    """Hold every prefix of a text to the search; return the lengths that matched."""
    suffixes = Suffixes(least, most)
    lengths = set()
    for size, token in enumerate(text, 1):
        suffixes.extend([token])
        found = suffixes.longest()
        assert found == searched(text[:size], least, most)
        lengths.add(found.length if found else 0)
    assert len(suffixes) == len(text)
    return lengths


BOUNDS = st.tuples(st.integers(1, 5), st.integers(0, 8)).map(lambda b: (b[0], b[0] + b[1]))
LETTERS = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, n - 1), max_size=80))
PIECES = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=3)
"""Texts made of a few pieces over and over: matches far longer than `most`, and their ends."""
COPIES = PIECES.flatmap(
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=14).map(
        lambda chosen: [token for piece in chosen for token in piece]
    )
)


@settings(max_examples=300, deadline=None)
@given(text=LETTERS | COPIES, bounds=BOUNDS)
def test_the_match_is_the_longest_and_of_those_the_most_recent(
    text: list[int], bounds: tuple[int, int]
) -> None:
    check(text, *bounds)


@pytest.mark.parametrize("letters", [1, 2, 3, 20])
@pytest.mark.parametrize("bounds", [(1, 1), (1, 4), (2, 16), (3, 3), (5, 40)], ids=str)
def test_long_texts_match_at_every_length(letters: int, bounds: tuple[int, int]) -> None:
    rng = random.Random(letters)
    text = [rng.randrange(letters) for _ in range(150)]
    text += text[20:100] + [rng.randrange(letters) for _ in range(30)] + text[90:180]
    assert check(text, *bounds) >= set(range(bounds[0], bounds[1] + 1))


@given(text=COPIES, bounds=BOUNDS, cuts=st.lists(st.integers(0, 200), max_size=6))
def test_it_does_not_matter_how_many_tokens_come_at_once(
    text: list[int], bounds: tuple[int, int], cuts: list[int]
) -> None:
    suffixes = Suffixes(*bounds)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in pairwise(edges):
        suffixes.extend(text[start:end])
        assert suffixes.longest() == searched(text[:end], *bounds)


def test_a_text_without_repetition_matches_nothing() -> None:
    suffixes = Suffixes(1, 8)
    assert suffixes.longest() is None
    suffixes.extend(range(1000))
    assert suffixes.longest() is None
    suffixes.extend([500])
    assert suffixes.longest() == Match(1, 501)
    suffixes.extend([501])
    assert suffixes.longest() == Match(2, 502)


def test_recency_decides_among_matches_of_the_full_length() -> None:
    # The first occurrence agrees on five tokens, the later one on three: with three asked for,
    # the later one is taken.
    text = [1, 2, 3, 4, 5, 9, 7, 3, 4, 5, 8, 1, 2, 3, 4, 5]
    for most, found in ((5, Match(5, 5)), (4, Match(4, 5)), (3, Match(3, 10))):
        suffixes = Suffixes(2, most)
        suffixes.extend(text)
        assert suffixes.longest() == found


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


@pytest.mark.parametrize("name", texts(4))
def test_a_token_takes_a_few_hundred_bytes_at_most(name: str) -> None:
    text = texts(8000)[name]
    tracemalloc.start()
    try:
        suffixes = Suffixes(2, 16)
        suffixes.extend(text)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held <= 500 * len(suffixes)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (-1, 4), (5, 4), (0, 0)])
def test_lengths_that_cannot_be_are_refused(least: int, most: int) -> None:
    with pytest.raises(RequestError, match=rf"suffixes of {least} to {most} tokens .* at least 1"):
        Suffixes(least, most)
