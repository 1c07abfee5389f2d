"""Vectors of what is kept of drafts, and of what is left of distributions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cpp.numeric import Row, Vector, known_numbers, plain
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, residual
from specrt.sampling.noise import Noise, Purpose
from specrt.speculation.round import Proposal
from specrt.speculation.target import match, rejection


def _row_of(known: Any, name: str) -> Row:
    return np.array([-math.inf if x is None else x for x in known["rows"][name]], np.float32)


def _pair(found: Distribution) -> Vector:
    return {"ids": found.ids.tolist(), "probs": plain(found.probs)}


def _mixture(rng: np.random.Generator, vocabulary: int) -> Distribution:
    row = (rng.standard_normal(vocabulary) * rng.choice([0.5, 2.0])).astype(np.float32)
    if rng.random() < 0.3:
        row = np.round(row)
    options = {"temperature": 1.0, "top_k": int(rng.choice([0, 2, 5]))}
    return process(row, SamplingParams(**options))


def _rejected(
    proposal: Proposal, targets: list[Distribution], seed: int, request: int, position: int
) -> Vector:
    verdict = rejection(proposal, lambda i: targets[i], Noise(seed, request), position)
    return {
        "tokens": list(proposal.tokens),
        "distributions": [_pair(q) for q in proposal.distributions or ()],
        "targets": [_pair(p) for p in targets],
        "seed": str(seed % 2**64), "request": str(request), "position": position,
        "accepted": verdict.accepted, "next": verdict.next,
    }  # fmt: skip


def _known_rejections(known: Any) -> Iterator[Vector]:
    for vector in known["rejections"]:
        params = SamplingParams(temperature=vector["temperature"])
        p, draft = process(_row_of(known, vector["target"]), params), vector["draft"]
        for base, (tokens, accepted, following) in enumerate(vector["rounds"], vector["first"]):
            q = None
            if draft is not None:
                q = [process(_row_of(known, draft), params)] * len(tokens)
            targets = [p] * (len(tokens) + 1)
            made = _rejected(Proposal(tokens, q), targets, vector["seed"], vector["request"], base)
            assert (made["accepted"], made["next"]) == (accepted, following)
            yield made


def _residual(rng: np.random.Generator, vocabulary: int) -> Vector:
    p = _mixture(rng, vocabulary)
    q = [None, p, _mixture(rng, vocabulary)][int(rng.integers(3))]
    token = int(rng.integers(vocabulary))
    case = {"target": _pair(p), "draft": None if q is None else _pair(q), "token": token}
    return {**case, **_pair(residual(p, q, token))}


def verify() -> Vector:
    """Return rounds of both rules, and what is left of distributions."""
    rng = np.random.default_rng(2)
    known = known_numbers()
    rejections = [*_known_rejections(known)]
    matches, residuals = [], []
    for i in range(400):
        vocabulary, gamma = int(rng.integers(1, 20)), int(rng.integers(0, 6))
        residuals.append(_residual(rng, vocabulary))
        targets = [_mixture(rng, vocabulary) for _ in range(gamma + 1)]
        drafts = [_mixture(rng, vocabulary) for _ in range(gamma)]
        tokens = [q.draw(Noise(i), Purpose.DRAFT, place) for place, q in enumerate(drafts)]
        certain = gamma == 0 or rng.random() < 0.3
        proposal = Proposal(tokens, None if certain else drafts)
        rejections.append(_rejected(proposal, targets, i, int(rng.integers(3)), i))
        choices = [t if rng.random() < 0.8 else t + 1 for t in [*tokens, 0]]
        verdict = match(tokens, lambda at, choices=choices: choices[at])  # type: ignore[misc]
        matches.append({"drafted": tokens, "choices": choices, "accepted": verdict.accepted,
                        "next": verdict.next})  # fmt: skip
    draws = []
    for vector in known["draws"]:
        row, options = _row_of(known, vector["logits"]), vector["params"]
        draws.append({
            "row": {"scores": plain(row)}, "params": options, "seed": str(vector["seed"] % 2**64),
            "request": str(vector["request"]), "first": vector["first"],
            "tokens": vector["tokens"],
        })  # fmt: skip
    return {"matches": matches, "rejections": rejections, "residuals": residuals, "draws": draws}
