from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.speculation.acceptance import Acceptance

REFIT = 16


def feed(
    estimate: Acceptance, chances: list[list[float]], told: list[list[float]], seed: int = 0
) -> None:
    """Draft and judge: per round the chance of each token, and what its drafter says of it."""
    draw = random.Random(seed)
    for number, (round_, confidences) in enumerate(zip(chances, told, strict=True)):
        estimate.begin()
        for place, confidence in enumerate(confidences):
            estimate.expect(place, confidence)
        kept = 0
        while kept < len(round_) and draw.random() < round_[kept]:
            kept += 1
        estimate.learn(kept, min(len(round_), kept + 1))
        if number % REFIT == REFIT - 1:
            estimate.refit()


def expected(estimate: Acceptance, place: int, confidence: float = 1.0) -> float:
    estimate.begin()
    return estimate.expect(place, confidence)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
def test_a_steady_text_is_known_within_a_few_hundred_rounds(chance: float) -> None:
    estimate = Acceptance(4)
    found = []
    for seed in range(40):
        feed(estimate, [[chance] * 4] * 16, [[1.0] * 4] * 16, seed)
        found.append(expected(estimate, 0))
    mean = sum(found[10:]) / 30
    assert mean == pytest.approx(chance, abs=0.06)


def test_a_turn_is_followed_within_a_few_rounds() -> None:
    estimate = Acceptance(4)
    for seed in range(10):
        feed(estimate, [[0.95] * 4] * 40, [[1.0] * 4] * 40, seed)
        assert estimate.mean > 0.75
        feed(estimate, [[0.0] * 4] * 4, [[1.0] * 4] * 4, seed)
        assert estimate.mean < 0.3
        feed(estimate, [[0.0] * 4] * 40, [[1.0] * 4] * 40, seed)
        assert estimate.mean < 0.1
        feed(estimate, [[1.0] * 4] * 3, [[1.0] * 4] * 3, seed)
        assert estimate.mean > 0.6


def test_later_places_are_told_apart_and_places_never_seen_follow_them() -> None:
    estimate = Acceptance(8)
    found = [0.0] * 8
    for seed in range(30):
        feed(estimate, [[0.9, 0.9, 0.3, 0.3]] * 32, [[1.0] * 4] * 32, seed)
        found = [f + expected(estimate, place) / 30 for place, f in enumerate(found)]
    assert min(found[:2]) > 0.8
    assert max(found[2:4]) < 0.5
    assert max(found[4:]) < 0.6


@pytest.mark.parametrize("warp", [0.3, 1.0, 3.0])
def test_confidence_is_calibrated_whatever_the_drafter_makes_of_it(warp: float) -> None:
    draw = random.Random(3)
    estimate = Acceptance(4)
    asked = (0.3, 0.5, 0.7, 0.9)
    found = [0.0] * len(asked)
    for seed in range(60):
        chances = [[draw.random() for _ in range(4)] for _ in range(32)]
        feed(estimate, chances, [[chance**warp for chance in round_] for round_ in chances], seed)
        found = [f + expected(estimate, 0, c**warp) / 60 for c, f in zip(asked, found, strict=True)]
    assert found == pytest.approx(asked, abs=0.2)
    assert found == sorted(found)


def test_confidence_that_says_nothing_is_soon_given_no_weight() -> None:
    draw = random.Random(4)
    estimate = Acceptance(4)
    told = [[draw.random() for _ in range(4)] for _ in range(1500)]
    feed(estimate, [[0.7] * 4] * 1500, told)
    assert expected(estimate, 0, 0.95) - expected(estimate, 0, 0.25) < 0.25


def test_surer_is_never_held_less_likely() -> None:
    """Even of a drafter that is right when unsure and wrong when sure."""
    draw = random.Random(5)
    estimate = Acceptance(4)
    told = [[draw.random() for _ in range(4)] for _ in range(800)]
    feed(estimate, [[1 - c for c in round_] for round_ in told], told)
    found = [expected(estimate, 0, i / 100) for i in range(100)]
    assert found == sorted(found)


@pytest.mark.parametrize("confidence", [math.nan, math.inf, -math.inf, -0.5, 1.0, 1.5, 1e300])
def test_a_confidence_that_is_no_probability_tells_nothing(confidence: float) -> None:
    estimate = Acceptance(2)
    assert expected(estimate, 0, confidence) == expected(estimate, 0)


ROUND = st.tuples(
    st.integers(1, 8), st.integers(0, 8), st.lists(st.floats(0, 1), min_size=8, max_size=8)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROUND, max_size=8), st.integers(1, 200))
def test_no_run_of_rounds_breaks_it(rounds: list[tuple[int, int, list[float]]], times: int) -> None:
    estimate = Acceptance(8)
    for _ in range(times):
        for drafted, most, confidences in rounds:
            kept = min(most, drafted)
            estimate.begin()
            for place in range(drafted):
                assert 0 < estimate.expect(place, confidences[place]) < 1
            estimate.learn(kept, kept + (kept < drafted))
        estimate.refit()
    assert 0 < estimate.mean < 1
    assert all(abs(offset) < 20 for offset in (*estimate.places, *estimate.bands))
    offset, share = estimate.surest(0.4)
    assert 0.4 <= share <= 1.000001
    assert offset >= -1e-9


def test_a_drafter_that_never_asked_is_learned_from_all_the_same() -> None:
    estimate = Acceptance(4)
    for _ in range(30):
        estimate.begin()
        estimate.learn(4, 4)
        estimate.refit()
    assert estimate.mean > 0.85
