"""Noise is uniform, independent across its keys, and the same everywhere for ever."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specrt.sampling import noise as module
from specrt.sampling.distribution import Distribution
from specrt.sampling.noise import Noise, Purpose

# Seeds are fixed, so a test either always passes or always fails; a correct generator with other
# seeds would fail one of these with the probability given here.
ALPHA = 1e-4


def uniforms(noise: Noise, purpose: Purpose, count: int, first: int = 0) -> np.ndarray:
    return np.array([noise.uniform(purpose, first + i) for i in range(count)])


@pytest.mark.parametrize("purpose", list(Purpose))
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63])
def test_uniform_numbers_are_uniform_over_positions(seed: int, purpose: Purpose) -> None:
    drawn = uniforms(Noise(seed), purpose, 5000)
    assert stats.kstest(drawn, "uniform").pvalue > ALPHA
    assert ((drawn > 0) & (drawn < 1)).all()


def test_uniform_numbers_are_uniform_over_seeds() -> None:
    drawn = np.array([Noise(seed).uniform(Purpose.ACCEPT, 7) for seed in range(5000)])
    assert stats.kstest(drawn, "uniform").pvalue > ALPHA


@pytest.mark.parametrize("seed", [0, 12345])
def test_noise_is_exponential_over_tokens_and_over_positions(seed: int) -> None:
    noise = Noise(seed)
    tokens = np.arange(50_000)
    assert stats.kstest(noise.exponential(Purpose.TOKEN, 3, tokens), "expon").pvalue > ALPHA
    one = np.concatenate([noise.exponential(Purpose.TOKEN, i, tokens[8:9]) for i in range(5000)])
    assert stats.kstest(one, "expon").pvalue > ALPHA


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbouring_positions_are_independent(lag: int) -> None:
    drawn = uniforms(Noise(9), Purpose.ACCEPT, 5000)
    held_independent(drawn[:-lag], drawn[lag:])


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbouring_tokens_are_independent(lag: int) -> None:
    drawn = Noise(9).exponential(Purpose.TOKEN, 5, np.arange(50_000))
    held_independent(drawn[:-lag], drawn[lag:])


def test_purposes_are_independent_of_one_another() -> None:
    noise, tokens = Noise(4), np.arange(20_000)
    drawn = [noise.exponential(purpose, 11, tokens) for purpose in Purpose]
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            held_independent(one, other)


def test_neighbouring_positions_give_independent_noise_to_the_same_token() -> None:
    noise, tokens = Noise(4), np.arange(20_000)
    for shift in (0, 1):
        here = noise.exponential(Purpose.TOKEN, 11, tokens)
        there = noise.exponential(Purpose.TOKEN, 12, tokens + shift)
        held_independent(here, there)


def test_neighbouring_seeds_are_independent() -> None:
    tokens = np.arange(20_000)
    one, other = (Noise(seed).exponential(Purpose.TOKEN, 0, tokens) for seed in (7, 8))
    held_independent(one, other)


KEYS = ("seed", "request", "purpose", "position", "token")


def number(key: dict[str, int]) -> float:
    noise = Noise(key["seed"], key["request"])
    purpose, tokens = Purpose(key["purpose"]), np.array([key["token"]])
    return float(noise.exponential(purpose, key["position"], tokens)[0])


@given(
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**64 - 1),
            "request": st.integers(0, 2**63 - 1) | st.integers(0, 9),
            "purpose": st.sampled_from([int(purpose) for purpose in Purpose]),
            "position": st.integers(0, 2**40) | st.integers(0, 9),
            "token": st.integers(0, 2**20),
        }
    ),
    st.data(),
)
@settings(deadline=None, max_examples=300)
def test_every_part_of_the_key_counts(key: dict[str, int], data: st.DataObject) -> None:
    """Chance makes two numbers of 52 bits equal in one of 10^15 examples."""
    for name in KEYS:
        most = 3 if name == "purpose" else 9
        other = {**key, name: key[name] + data.draw(st.integers(1, most), label=name)}
        if name == "purpose":
            other[name] %= len(Purpose)
        if name == "request":
            other[name] %= 2**63
        if other != key:
            assert number(other) != number(key)


def test_no_key_is_that_of_another() -> None:
    """Small keys of all kinds, which are likeliest to meet: all streams differ."""
    streams = {
        Noise(seed, request).uniform(purpose, position)
        for seed in range(-4, 5) for request in range(12) for purpose in Purpose
        for position in range(25)
    }  # fmt: skip
    assert len(streams) == 9 * 12 * len(Purpose) * 25


def test_request_0_is_what_there_was_before_there_were_requests() -> None:
    for seed in (0, -1, 42):
        one, other = Noise(seed), Noise(seed, 0)
        assert one.uniform(Purpose.ACCEPT, 3) == other.uniform(Purpose.ACCEPT, 3)


def test_neighbouring_requests_are_independent() -> None:
    tokens = np.arange(20_000)
    drawn = [Noise(7, r).exponential(Purpose.TOKEN, 0, tokens) for r in (0, 1, 2, 9)]
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            held_independent(one, other)


def test_uniform_numbers_are_uniform_over_requests() -> None:
    drawn = np.array([Noise(3, request).uniform(Purpose.ACCEPT, 7) for request in range(5000)])
    assert stats.kstest(drawn, "uniform").pvalue > ALPHA


PROBS = Distribution(np.array([2, 3, 5, 90]), np.array([0.4, 0.3, 0.2, 0.1]))


def chance(noises: Iterable[Noise], position: int = 11) -> float:
    """Return how likely so uneven counts are, where tokens are drawn as often as they should."""
    drawn = [PROBS.draw(noise, Purpose.TOKEN, position) for noise in noises]
    counts = [drawn.count(token) for token in PROBS.ids]
    return float(stats.chisquare(counts, PROBS.probs * len(drawn)).pvalue)


@pytest.mark.parametrize("seed", [0, 42, -1])
def test_requests_draw_each_token_as_often_as_it_should_come(seed: int) -> None:
    assert chance(Noise(seed, request) for request in range(8000)) > ALPHA


@pytest.mark.parametrize("position", [0, 11, 4096])
def test_pairs_of_requests_draw_each_pair_as_often_as_it_should_come(position: int) -> None:
    drawn = [
        [PROBS.draw(Noise(seed, request), Purpose.TOKEN, position) for request in (0, 1)]
        for seed in range(6000)
    ]
    cells = np.array([[drawn.count([a, b]) for b in PROBS.ids] for a in PROBS.ids])
    expected = np.outer(PROBS.probs, PROBS.probs) * len(drawn)
    assert stats.chisquare(cells.ravel(), expected.ravel()).pvalue > ALPHA


def test_the_check_of_draws_notices_requests_that_share_their_noise() -> None:
    assert chance(Noise(0, 0 * request) for request in range(8000)) < ALPHA
    assert chance(Noise(0, request % 40) for request in range(8000)) < ALPHA


def held_independent(one: np.ndarray, other: np.ndarray) -> None:
    assert stats.spearmanr(one, other).pvalue > ALPHA
    cells = np.histogram2d(stats.rankdata(one), stats.rankdata(other), bins=8)[0]
    assert stats.chi2_contingency(cells).pvalue > ALPHA


def test_the_check_of_independence_notices_dependence() -> None:
    drawn = uniforms(Noise(9), Purpose.ACCEPT, 5000)
    with pytest.raises(AssertionError):
        held_independent(drawn, np.where(drawn < 0.1, drawn, drawn[::-1]))


def test_a_number_does_not_depend_on_what_else_is_asked() -> None:
    noise = Noise(3)
    whole = noise.exponential(Purpose.TOKEN, 17, np.arange(1000))
    noise.uniform(Purpose.TOKEN, 17)
    some = np.array([999, 5, 0, 5])
    assert (noise.exponential(Purpose.TOKEN, 17, some) == whole[some]).all()
    assert (Noise(3).exponential(Purpose.TOKEN, 17, some) == whole[some]).all()


@pytest.mark.parametrize(
    ("seed", "purpose", "position", "expected"),
    [
        (0, Purpose.TOKEN, 0, 0.13870941014555427),
        (0, Purpose.DRAFT, 0, 0.5026230818294767),
        (0, Purpose.TOKEN, 1, 0.18383979100743952),
        (42, Purpose.ACCEPT, 1000, 0.6170130726043958),
        (-1, Purpose.CORRECTION, 131071, 0.3017334518536362),
        (18446744073709551623, Purpose.ACCEPT, 3, 0.8889827299685024),
    ],
)
def test_uniform_numbers_never_change(
    seed: int, purpose: Purpose, position: int, expected: float
) -> None:
    assert Noise(seed).uniform(purpose, position) == expected


@pytest.mark.parametrize(
    ("seed", "purpose", "position", "expected"),
    [
        (
            0,
            Purpose.TOKEN,
            0,
            [-0.6807578025137786, 3.5293597414235305, -0.871617950288359, 0.7760041021181258],
        ),
        (
            42,
            Purpose.TOKEN,
            1000,
            [1.8074841549462008, 2.2552849973662457, 0.6424622907228125, -0.28938879371501003],
        ),
        (
            -1,
            Purpose.DRAFT,
            131071,
            [-0.5967936492822175, 2.1716033660163174, -0.22799857513097166, 1.3262938590601216],
        ),
        (
            18446744073709551623,
            Purpose.CORRECTION,
            3,
            [-0.6376012300553462, -0.22990503892463693, 2.3854522323598855, 0.8339836546406529],
        ),
    ],
)
def test_the_noise_of_tokens_never_changes(
    seed: int, purpose: Purpose, position: int, expected: list[float]
) -> None:
    tokens = np.array([0, 1, 8191, 262143])
    # The last bits are those of the platform's logarithm.
    gumbel = -np.log(Noise(seed).exponential(purpose, position, tokens))
    np.testing.assert_allclose(gumbel, expected, rtol=1e-13)


def test_seeds_count_modulo_two_to_the_64() -> None:
    for seed in (0, 5, 2**63):
        expected = Noise(seed).uniform(Purpose.TOKEN, 0)
        assert Noise(seed - 2**64).uniform(Purpose.TOKEN, 0) == expected
        assert Noise(seed + 2**64).uniform(Purpose.TOKEN, 0) == expected
    assert len({Noise(s).uniform(Purpose.TOKEN, 0) for s in (0, -1, 1, 2**63, 10**18)}) == 5


@pytest.mark.parametrize("bits", [0, 1, 2**63, 2**64 - 1])
def test_the_ends_of_the_range_are_never_reached(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_mix", lambda x: bits)
    monkeypatch.setattr(module, "_mix_array", lambda x: np.full_like(x, bits))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert 0.0 < Noise(0).uniform(Purpose.TOKEN, 0) < 1.0
        assert math.isfinite(Noise(0).exponential(Purpose.TOKEN, 0, np.array([0]))[0])
