"""docs/randomness.md, built a second time from its words alone, and the numbers both must give."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process
from specrt.sampling.noise import Noise, Purpose
from specrt.speculation.round import Proposal
from specrt.speculation.target import rejection

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
