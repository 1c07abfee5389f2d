"""Noise is independent across its keys, and the same everywhere for ever."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from specrt.params import SamplingParams
from specrt.sampling import noise as module
from specrt.sampling.distribution import Distribution, process
from specrt.sampling.noise import Noise, Purpose
from specrt.speculation.round import Proposal
from specrt.speculation.target import rejection

# Seeds are fixed, so a test either always passes or always fails; a correct generator with other
# seeds would fail one of these with the probability given here.
ALPHA, COUNT = 1e-4, 5000
TOKENS = np.arange(COUNT)

Numbers = NDArray[np.float64]


def assert_independent(one: Numbers, other: Numbers) -> None:
    assert stats.spearmanr(one, other).pvalue > ALPHA
    cells = np.histogram2d(stats.rankdata(one), stats.rankdata(other), bins=8)[0]
    assert stats.chi2_contingency(cells).pvalue > ALPHA


NEIGHBOURS: dict[str, Callable[[int], Numbers]] = {
    "purpose": lambda i: Noise(4).exponential(Purpose(i), 11, TOKENS),
    "position": lambda i: Noise(4).exponential(Purpose.TOKEN, 11 + i, TOKENS),
    "position and token": lambda i: Noise(4).exponential(Purpose.TOKEN, 11 + i, TOKENS + i),
    "seed": lambda i: Noise(7 + i).exponential(Purpose.TOKEN, 11, TOKENS),
    "request": lambda i: Noise(4, i).exponential(Purpose.TOKEN, 11, TOKENS),
}


@pytest.mark.parametrize("part", NEIGHBOURS)
def test_streams_of_neighbouring_keys_are_independent(part: str) -> None:
    for one, other in combinations(map(NEIGHBOURS[part], range(4)), 2):
        assert_independent(one, other)
    with pytest.raises(AssertionError):  # the check notices dependence
        assert_independent(one, np.where(one < 0.1, one, other))


@pytest.mark.parametrize("bits", [0, 1, 2**63, 2**64 - 1])
def test_the_ends_of_the_range_are_never_reached(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_mix", lambda x: bits)
    monkeypatch.setattr(module, "_mix_array", lambda x: np.full_like(x, bits))
    assert 0.0 < Noise(0).uniform(Purpose.TOKEN, 0) < 1.0
    assert math.isfinite(Noise(0).exponential(Purpose.TOKEN, 0, np.array([0]))[0])


# The steps of docs/randomness.md, and the numbers that every implementation must give


VECTORS = json.loads((Path(__file__).parent / "vectors" / "noise.json").read_text())
DOCUMENT = (Path(__file__).parents[2] / "docs" / "randomness.md").read_text()
ROWS: dict[str, list[float]] = {
    name: [-math.inf if value is None else value for value in row]
    for name, row in VECTORS["rows"].items()
}


M, G = 2**64, 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x %= M
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % M
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % M
    return x ^ (x >> 31)


@pytest.mark.parametrize("vector", VECTORS["numbers"], ids=lambda v: str(list(v.values())[:5]))
def test_numbers(vector: dict[str, Any]) -> None:
    seed, request = vector["seed"], vector["request"]
    purpose, position, token = Purpose[vector["purpose"]], vector["position"], vector["token"]
    root = mix(mix(seed) - G * request) if request else mix(seed)
    stream = mix(mix(root + G * (purpose + 1)) + G * (position + 1))
    bits = mix(stream + G * (token + 1))
    assert [int(vector[name], 16) for name in ("root", "stream", "bits")] == [root, stream, bits]
    assert vector["uniform"] == (bits // 2**12 + 0.5) / 2**52
    assert vector["exponential"] == pytest.approx(-math.log(vector["uniform"]), rel=1e-13)
    assert f"| {token} | `{vector['bits']}` | {vector['uniform']} |" in DOCUMENT
    noise = Noise(seed, request)
    waits = noise.exponential(purpose, position, np.array([token]))
    assert waits[0] == pytest.approx(vector["exponential"], rel=1e-13)
    if token == 0:
        assert noise.uniform(purpose, position) == vector["uniform"]


def sampled(row: str, **params: Any) -> Distribution:
    return process(np.array(ROWS[row], np.float32), SamplingParams(**params))


@pytest.mark.parametrize("vector", VECTORS["draws"], ids=lambda v: str(list(v.values())[:5]))
def test_draws(vector: dict[str, Any]) -> None:
    noise, first = Noise(vector["seed"], vector["request"]), vector["first"]
    found = sampled(vector["logits"], **vector["params"])
    drawn = [found.draw(noise, Purpose.TOKEN, at) for at in range(first, first + 24)]
    assert drawn == vector["tokens"]


@pytest.mark.parametrize("vector", VECTORS["rejections"], ids=lambda v: str(list(v.values())[:6]))
def test_rejections(vector: dict[str, Any]) -> None:
    noise, heat = Noise(vector["seed"], vector["request"]), vector["temperature"]
    p, draft = sampled(vector["target"], temperature=heat), vector["draft"]
    for base, (tokens, accepted, following) in enumerate(vector["rounds"], vector["first"]):
        proposal = Proposal(tokens)
        if draft is not None:
            q, first = sampled(draft, temperature=heat), base << 16
            drawn = [q.draw(noise, Purpose.DRAFT, first + i) for i in range(len(tokens))]
            assert drawn == tokens
            proposal = Proposal(tokens, [q] * len(tokens))
        verdict = rejection(proposal, lambda i: p, noise, base)
        assert (verdict.accepted, verdict.next) == (accepted, following)
