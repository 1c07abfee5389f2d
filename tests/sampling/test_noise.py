"""Noise is uniform, independent across its keys, and the same everywhere for ever."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specrt.params import SamplingParams
from specrt.sampling import noise as module
from specrt.sampling.distribution import Distribution, process
from specrt.sampling.noise import Noise, Purpose
from specrt.speculation.round import Proposal
from specrt.speculation.target import rejection

# Seeds are fixed, so a test either always passes or always fails; a correct generator with other
# seeds would fail one of these with the probability given here.
ALPHA = 1e-4


def uniforms(noise: Noise, purpose: Purpose, count: int, first: int = 0) -> np.ndarray:
    return np.array([noise.uniform(purpose, first + i) for i in range(count)])


def assert_uniform(drawn: np.ndarray) -> None:
    assert stats.kstest(drawn, "uniform").pvalue > ALPHA
    assert ((drawn > 0) & (drawn < 1)).all()


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_are_uniform_over_every_part_of_the_key(purpose: Purpose) -> None:
    for seed in (0, -1, 2**63):
        assert_uniform(uniforms(Noise(seed), purpose, 5000))
    assert_uniform(np.array([Noise(seed).uniform(purpose, 7) for seed in range(5000)]))
    assert_uniform(np.array([Noise(3, request).uniform(purpose, 7) for request in range(5000)]))


@pytest.mark.parametrize("seed", [0, 12345])
def test_noise_is_exponential_over_tokens_and_over_positions(seed: int) -> None:
    noise, tokens = Noise(seed), np.arange(50_000)
    assert stats.kstest(noise.exponential(Purpose.TOKEN, 3, tokens), "expon").pvalue > ALPHA
    one = np.concatenate([noise.exponential(Purpose.TOKEN, i, tokens[8:9]) for i in range(5000)])
    assert stats.kstest(one, "expon").pvalue > ALPHA


def assert_independent(one: np.ndarray, other: np.ndarray) -> None:
    assert stats.spearmanr(one, other).pvalue > ALPHA
    cells = np.histogram2d(stats.rankdata(one), stats.rankdata(other), bins=8)[0]
    assert stats.chi2_contingency(cells).pvalue > ALPHA


def test_the_check_of_independence_notices_dependence() -> None:
    drawn = uniforms(Noise(9), Purpose.ACCEPT, 5000)
    with pytest.raises(AssertionError):
        assert_independent(drawn, np.where(drawn < 0.1, drawn, drawn[::-1]))


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbouring_positions_and_tokens_are_independent(lag: int) -> None:
    positions = uniforms(Noise(9), Purpose.ACCEPT, 5000)
    tokens = Noise(9).exponential(Purpose.TOKEN, 5, np.arange(20_000))
    for drawn in (positions, tokens):
        assert_independent(drawn[:-lag], drawn[lag:])


@pytest.mark.parametrize("part", ["purpose", "position", "position and token", "seed", "request"])
def test_streams_of_neighbouring_keys_are_independent(part: str) -> None:
    tokens, count = np.arange(20_000), 4 if part in ("purpose", "request") else 2
    streams = [
        Noise(7 + i if part == "seed" else 4, i if part == "request" else 0).exponential(
            Purpose(i) if part == "purpose" else Purpose.TOKEN,
            11 + i if part.startswith("position") else 11,
            tokens + i if part.endswith("token") else tokens,
        )
        for i in range(count)
    ]
    for i, one in enumerate(streams):
        for other in streams[i + 1 :]:
            assert_independent(one, other)


def test_no_key_is_that_of_another() -> None:
    """Small keys of all kinds, which are likeliest to meet: all streams differ."""
    streams = {
        Noise(seed, request).uniform(purpose, position)
        for seed in range(-4, 5) for request in range(12) for purpose in Purpose
        for position in range(25)
    }  # fmt: skip
    assert len(streams) == 9 * 12 * len(Purpose) * 25


PROBS = Distribution(np.array([2, 3, 5, 90]), np.array([0.4, 0.3, 0.2, 0.1]))


def chance(noises: Iterable[Noise], position: int = 11) -> float:
    """Return how likely so uneven counts are, where tokens are drawn as often as they should."""
    drawn = [PROBS.draw(noise, Purpose.TOKEN, position) for noise in noises]
    counts = [drawn.count(token) for token in PROBS.ids]
    return float(stats.chisquare(counts, PROBS.probs * len(drawn)).pvalue)


@pytest.mark.parametrize("seed", [0, 42, -1])
def test_requests_draw_each_token_as_often_as_it_should_come(seed: int) -> None:
    assert chance(Noise(seed, request) for request in range(8000)) > ALPHA


@pytest.mark.parametrize("position", [0, 4096])
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


def test_a_number_does_not_depend_on_what_else_is_asked() -> None:
    noise = Noise(3)
    whole = noise.exponential(Purpose.TOKEN, 17, np.arange(1000))
    noise.uniform(Purpose.TOKEN, 17)
    some = np.array([999, 5, 0, 5])
    assert (noise.exponential(Purpose.TOKEN, 17, some) == whole[some]).all()
    assert (Noise(3).exponential(Purpose.TOKEN, 17, some) == whole[some]).all()


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


# docs/randomness.md, built a second time from its words alone, and the numbers both must give


VECTORS = json.loads((Path(__file__).parent / "vectors" / "noise.json").read_text())
DOCUMENT = Path(__file__).parents[2] / "docs" / "randomness.md"
ROWS: dict[str, list[float]] = {
    name: [-math.inf if value is None else value for value in row]
    for name, row in VECTORS["rows"].items()
}

# No NumPy and nothing of specrt in what follows, down to the tests.

TOKEN, DRAFT, ACCEPT, CORRECTION = range(4)
M = 2**64
G = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x %= M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % M
    return x ^ (x >> 31)


def root_of(seed: int, request: int) -> int:
    return mix(seed) if request == 0 else mix(mix(seed) - G * request)


def stream_of(root: int, purpose: int, position: int) -> int:
    return mix(mix(root + G * (purpose + 1)) + G * (position + 1))


def bits_of(stream: int, token: int) -> int:
    return mix(stream + G * (token + 1))


def uniform_of(bits: int) -> float:
    return (bits // 2**12 + 0.5) / 2**52


def plain_uniform(root: int, purpose: int, position: int, token: int = 0) -> float:
    return uniform_of(bits_of(stream_of(root, purpose, position), token))


Probabilities = dict[int, float]


def probabilities(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0
) -> Probabilities:
    peak = max(logits)
    weights = {i: math.exp((x - peak) / temperature) for i, x in enumerate(logits)}
    falling = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k:
        least = weights[falling[min(top_k, len(falling)) - 1]]
        falling = [i for i in falling if weights[i] >= least]
    total, before, kept = sum(weights[i] for i in falling), 0.0, []
    for i in falling:
        if before < top_p * total and weights[i] > 0 and weights[i] >= min_p:
            kept.append(i)
        before += weights[i]
    total = sum(weights[i] for i in kept)
    return {i: weights[i] / total for i in sorted(kept)}


def race(probs: Probabilities, root: int, purpose: int, position: int) -> int:
    return min(probs, key=lambda i: -math.log(plain_uniform(root, purpose, position, i)) / probs[i])


def drafts(probs: Probabilities, root: int, base: int, count: int) -> list[int]:
    return [race(probs, root, DRAFT, base * 65536 + place) for place in range(count)]


def judged(
    p: Probabilities, q: Probabilities | None, drafted: list[int], root: int, base: int
) -> tuple[int, int]:
    for place, x in enumerate(drafted):
        certain = q if q is not None else {x: 1.0}
        if plain_uniform(root, ACCEPT, base + place) >= p.get(x, 0.0) / certain[x]:
            left = {i: p[i] - certain.get(i, 0.0) for i in p}
            left = {i: rest for i, rest in left.items() if rest > 0} or p
            total = sum(left.values())
            left = {i: rest / total for i, rest in left.items()}
            return place, race(left, root, CORRECTION, base + place)
    return len(drafted), race(p, root, CORRECTION, base + len(drafted))


# The tests: the second implementation and specrt, each against the same file.


@pytest.mark.parametrize("vector", VECTORS["numbers"], ids=lambda v: str(list(v.values())[:5]))
def test_numbers(vector: dict[str, Any]) -> None:
    seed, request = vector["seed"], vector["request"]
    purpose, position, token = Purpose[vector["purpose"]], vector["position"], vector["token"]
    root = root_of(seed, request)
    stream = stream_of(root, int(purpose), position)
    bits = bits_of(stream, token)
    assert [vector[name] for name in ("root", "stream", "bits")] == [
        f"0x{number:016x}" for number in (root, stream, bits)
    ]
    assert vector["uniform"] == uniform_of(bits)
    # The last bits are those of the platform's logarithm.
    assert vector["exponential"] == pytest.approx(-math.log(uniform_of(bits)), rel=1e-13)
    noise = Noise(seed, request)
    waits = noise.exponential(purpose, position, np.array([token]))
    assert waits[0] == pytest.approx(vector["exponential"], rel=1e-13)
    if token == 0:
        assert noise.uniform(purpose, position) == vector["uniform"]


def sampled(row: str, **params: Any) -> Distribution:
    return process(np.array(ROWS[row], np.float32), SamplingParams(**params))


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda v: str(list(v.values())[:5]))
def test_draws(vector: dict[str, Any]) -> None:
    row, params, first = vector["logits"], vector["params"], vector["first"]
    root = root_of(vector["seed"], vector["request"])
    probs, positions = probabilities(ROWS[row], **params), range(first, first + 24)
    assert [race(probs, root, TOKEN, at) for at in positions] == vector["tokens"]
    noise, found = Noise(vector["seed"], vector["request"]), sampled(row, **params)
    assert [found.draw(noise, Purpose.TOKEN, at) for at in positions] == vector["tokens"]


@pytest.mark.parametrize("vector", VECTORS["rejections"], ids=lambda v: str(list(v.values())[:6]))
def test_rejections(vector: dict[str, Any]) -> None:
    target, draft, heat = vector["target"], vector["draft"], vector["temperature"]
    root = root_of(vector["seed"], vector["request"])
    noise = Noise(vector["seed"], vector["request"])
    p, found = probabilities(ROWS[target], heat), sampled(target, temperature=heat)
    for base, (tokens, accepted, following) in enumerate(vector["rounds"], vector["first"]):
        q, proposal = None, Proposal(tokens)
        if draft is not None:
            q = probabilities(ROWS[draft], heat)
            proposal = Proposal(tokens, [sampled(draft, temperature=heat)] * len(tokens))
            assert drafts(q, root, base, len(tokens)) == tokens
        assert judged(p, q, tokens, root, base) == (accepted, following)
        verdict = rejection(proposal, lambda i: found, noise, base)
        assert (verdict.accepted, verdict.next) == (accepted, following)


def test_the_document_shows_these_numbers() -> None:
    lines = DOCUMENT.read_text().splitlines()
    names = ("seed", "request", "purpose", "position", "token", "bits", "uniform")
    for vector in VECTORS["numbers"]:
        shown = [f"`{vector[n]}`" if n == "bits" else str(vector[n]) for n in names]
        assert f"| {' | '.join(shown)} |" in lines
    for vector in VECTORS["draws"]:
        shown = [", ".join(f"{k} {v}" for k, v in vector["params"].items())]
        shown = [vector["logits"], *shown, *(str(vector[n]) for n in ("seed", "request", "first"))]
        assert f"| {' | '.join(shown)} | {' '.join(map(str, vector['tokens']))} |" in lines
