"""From logits to a distribution: what transformers' warpers keep, and what may never be drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, typical
from specrt.sampling.noise import Noise, Purpose

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.31},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.123},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "min_p": 0.07},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]


def full(distribution: Distribution, size: int) -> NDArray[np.float64]:
    probs = np.zeros(size)
    probs[distribution.ids] = distribution.probs
    return probs


def warped(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    torch = pytest.importorskip("torch")
    generation = pytest.importorskip("transformers.generation.logits_process")
    chain = [generation.TemperatureLogitsWarper(params.temperature)]
    if params.top_k > 0:
        chain.append(generation.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(generation.TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(generation.MinPLogitsWarper(params.min_p))
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    for warper in chain:
        scores = warper(None, scores)
    probs: NDArray[np.float64] = scores.softmax(-1)[0].numpy()
    return probs


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_distribution_is_that_of_transformers(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    rng = np.random.default_rng(0)
    for scale in (0.5, 3.0, 12.0):
        for size in (2, 50, 500):
            logits = (rng.standard_normal(size) * scale).astype(np.float32)
            logits[rng.random(size) < 0.1] = -np.inf
            logits[0] = 1.0
            found = full(process(logits, params), size)
            np.testing.assert_allclose(found, warped(logits, params), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tied_logits_are_kept_in_the_number_transformers_keeps(options: dict[str, Any]) -> None:
    # Which of several equal tokens a nucleus leaves out is not specified, how many is.
    params = SamplingParams(**options)
    rng = np.random.default_rng(1)
    for size in (2, 50, 300):
        logits = rng.integers(-3, 4, size).astype(np.float32)
        found, expected = full(process(logits, params), size), warped(logits, params)
        np.testing.assert_allclose(np.sort(found), np.sort(expected), rtol=1e-9, atol=1e-15)


def test_top_k_keeps_what_ties_with_the_last() -> None:
    logits = np.array([1, 3, 2, 2, 2, 0], np.float32)
    found = process(logits, SamplingParams(temperature=1.0, top_k=2))
    assert found.ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_top_k_keeps_all(top_k: int) -> None:
    found = process(np.zeros(9, np.float32), SamplingParams(temperature=1.0, top_k=top_k))
    assert found.ids.tolist() == list(range(9))


def test_candidates_ascend_and_their_probabilities_sum_to_one() -> None:
    rng = np.random.default_rng(2)
    for options in OPTIONS:
        found = process(rng.standard_normal(300).astype(np.float32), SamplingParams(**options))
        assert (np.diff(found.ids) > 0).all()
        assert (found.probs > 0).all()
        assert found.probs.sum() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-300}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str
)
def test_the_narrowest_options_leave_the_most_likely_token(options: dict[str, Any]) -> None:
    logits = np.array([0, 1, 5, 2], np.float32)
    found = process(logits, SamplingParams(temperature=1.0, **options))
    assert (found.ids.tolist(), found.probs.tolist()) == ([2], [1.0])


def test_a_masked_token_is_no_candidate() -> None:
    logits = np.array([-np.inf, 1, -np.inf, 1], np.float32)
    found = process(logits, SamplingParams(temperature=1.0, top_k=3))
    assert (found.ids.tolist(), found.probs.tolist()) == ([1, 3], [0.5, 0.5])
    assert found.prob(0) == 0.0
    assert found.prob(3) == 0.5


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-308, 5e-324])
def test_a_very_low_temperature_leaves_the_most_likely_token(temperature: float) -> None:
    logits = np.array([-3e38, 1, 5, 2, -np.inf], np.float32)
    found = process(logits, SamplingParams(temperature=temperature))
    assert (found.ids.tolist(), found.probs.tolist()) == ([2], [1.0])


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([3e38, 3e38, -3e38], np.float32)
    assert process(logits, SamplingParams(temperature=1.0)).probs.tolist() == [0.5, 0.5]
    for temperature in (0.5, 1.0):
        params = SamplingParams(temperature=temperature, top_p=0.9)
        assert process(logits, params).probs.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("temperature", [1.0, 1e39, 1e300])
def test_a_masked_token_weighs_nothing_however_hot_it_is(temperature: float) -> None:
    logits = np.array([0, -np.inf, 0, 0], np.float32)
    found = process(logits, SamplingParams(temperature=temperature, top_p=0.9))
    assert found.ids.tolist() == [0, 2, 3]


@pytest.mark.parametrize("temperature", [1e-46, 1e39, 1e300])
@pytest.mark.parametrize("reach", [7.0, np.inf])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_no_temperature_is_too_extreme(temperature: float, reach: float, top_p: float) -> None:
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    found = process(logits, SamplingParams(temperature=temperature, top_p=top_p), reach)
    assert len(found.ids) == (1 if temperature < 1 else 50 if top_p == 1.0 else 45)


BROKEN = {
    "NaN": [0.0, np.nan, 1.0],
    "infinity": [0.0, np.inf, 1.0],
    "both infinities": [-np.inf, np.inf, 1.0],
    "NaN among masked": [-np.inf, np.nan, -np.inf],
    "all masked": [-np.inf, -np.inf, -np.inf],
}


@pytest.mark.parametrize("values", BROKEN.values(), ids=BROKEN)
def test_what_is_not_a_number_is_never_sampled_from(values: list[float]) -> None:
    row = np.array(values, np.float32)
    for options in OPTIONS:
        with pytest.raises(EngineError, match=r"not numbers .* Check the checkpoint"):
            process(row, SamplingParams(**options))


def test_the_logits_are_not_written_to() -> None:
    logits = np.arange(9, dtype=np.float32)
    logits.setflags(write=False)
    process(logits, SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1))


def test_a_draw_is_a_candidate_and_depends_on_the_position_only() -> None:
    found = process(np.arange(9, dtype=np.float32), SamplingParams(temperature=2.0, top_k=4))
    drawn = [found.draw(Noise(1), Purpose.TOKEN, i) for i in range(200)]
    assert set(drawn) == set(found.ids.tolist())
    assert drawn == [found.draw(Noise(1), Purpose.TOKEN, i) for i in range(200)]


def sorted_typical(weights: NDArray[np.float64], mass: float) -> NDArray[np.bool_]:
    """Mark the typical tokens by sorting all of them, as their definition reads."""
    total = weights.sum()
    probs = weights / total
    surprise = np.log(total) - np.log(weights)
    away = np.abs(surprise - (probs * surprise).sum())
    order = np.argsort(away, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    count = max(1, int(np.count_nonzero(before < mass)))
    mask: NDArray[np.bool_] = away <= away[order[count - 1]]
    return mask


SHAPES = ("normal", "ties", "uniform", "one-hot", "two values", "underflow", "zipf", "halves")


def shaped(shape: str, rng: np.random.Generator, size: int) -> NDArray[np.float64]:
    """Return logits of a kind that is hard on sums or on order."""
    made = {
        "normal": rng.standard_normal(size) * rng.choice([0.1, 1, 10, 300]),
        "ties": rng.integers(-3, 4, size) * 1.0,
        "uniform": np.zeros(size),
        "one-hot": np.where(np.arange(size) == 0, rng.choice([50.0, 500.0, 5e4]), 0.0),
        "two values": rng.integers(0, 2, size) * rng.choice([1e-6, 1.0, 700.0]),
        "underflow": rng.random(size) * -744.0,
        "zipf": np.log1p(np.arange(size)) * -rng.choice([0.5, 1, 2]),
        "halves": np.log(2.0) * -np.arange(size),
    }
    found: NDArray[np.float64] = made[shape]
    return found


@given(
    st.sampled_from(SHAPES),
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 3, 10, 64, 700, 5000]),
    st.sampled_from([1e-3, 0.05, 0.7, 1.0, 3.0, 100.0]),
    st.sampled_from([1e-9, 0.1, 0.25, 0.3, 0.5, 0.75, 0.9, 0.999, 1 - 1e-12]),
)
@settings(deadline=None, max_examples=400)
def test_typical_tokens_are_those_that_sorting_finds(
    shape: str, seed: int, size: int, temperature: float, mass: float
) -> None:
    logits = shaped(shape, np.random.default_rng(seed), size)
    weights = np.exp((logits - logits.max()) / temperature)
    weights = weights[weights > 0]
    np.testing.assert_array_equal(typical(weights, mass), sorted_typical(weights, mass))


def test_typical_tokens_where_the_mass_is_met_to_the_last_bits() -> None:
    for seed in range(2000):
        weights = np.random.default_rng(seed).integers(1, 6, 3 + seed % 57) / 8
        for mass in (0.1, 0.2, 0.3, 0.5, 0.6, 0.9):
            expected = sorted_typical(weights, mass)
            np.testing.assert_array_equal(typical(weights, mass), expected)


@pytest.mark.parametrize("mass", [0.2, 0.9, 0.99])
def test_typical_tokens_of_a_large_vocabulary(mass: float) -> None:
    for scale in (0.1, 3.0):
        logits = (np.random.default_rng(3).standard_normal(150_000) * scale).astype(np.float32)
        found = process(logits, SamplingParams(temperature=0.9, typical_p=mass))
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / 0.9)
        expected = np.flatnonzero(sorted_typical(weights, mass))
        np.testing.assert_array_equal(found.ids, expected)
        np.testing.assert_allclose(found.probs, weights[expected] / weights[expected].sum())
