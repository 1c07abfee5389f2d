"""Noise is uniform, independent across its keys, and the same everywhere for ever."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from scipy import stats

from specrt import noise as module
from specrt.noise import Noise, Purpose

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
