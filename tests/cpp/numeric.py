"""Vectors of the parts of the runtime that are functions of numbers, for native_check to replay.

Each function returns what one check reads. Floats are written with all their digits, those that
JSON does not know as texts. Cases in which a threshold is met within rounding are left out: there
the last bits of an exponential decide, and those are the library's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, ranked
from specrt.sampling.noise import Noise, Purpose

Row = NDArray[np.float32]
Vector = dict[str, Any]
KNOWN = Path(__file__).parents[1] / "sampling" / "vectors" / "noise.json"
GOLDEN = 0x9E3779B97F4A7C15
WHOLE, SOME = 300, 100
"""Distributions of up to so many tokens are written whole; of others, so many places."""
HEATS = [1e-30, 1e-26, 1e-10, 1e-3, 0.1, 0.7, 1.0, 1.5, 3.0, 100.0, 1e10, 1e30, 1e38, 1e300]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers that it does not know become texts."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, np.floating | float):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    return int(value) if isinstance(value, np.integer) else value


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def large(seed: int, size: int, scale: float, step: int, ruled: int) -> tuple[Vector, Row]:
    """Return a row that is made from a few numbers, on both sides alike; and those.

    Scores are bell-shaped between -2 and 2 times `scale`; a `step` above 1 makes ties, and so many
    percent are ruled out.
    """
    made = {"seed": seed, "size": size, "scale": scale, "step": step, "ruled": ruled}
    places = np.arange(1, size + 1, dtype=np.uint64)
    bits = _mixed(np.uint64(seed) + places * np.uint64(GOLDEN))
    parts = [(bits >> np.uint64(at)) & np.uint64(0xFFFF) for at in (0, 16, 32, 48)]
    whole = np.sum(parts, axis=0).astype(np.int64) // step * step
    row = ((whole - 131070) / 65536.0 * scale).astype(np.float32)
    row[_mixed(bits) % np.uint64(100) < ruled] = -np.inf
    return {"made": made}, row


def small(rng: np.random.Generator) -> tuple[Vector, Row]:
    """Return a short row of any kind, and what stands for it."""
    size = int(rng.integers(1, 40))
    row = rng.standard_normal(size) * rng.choice([1e-3, 0.1, 1.0, 3.0, 50.0, 1e4, 1e30])
    if rng.random() < 0.4:
        row = np.round(row * 2) / 2
    if rng.random() < 0.1:
        row[:] = row[0]
    row[rng.random(size) < rng.choice([0.0, 0.0, 0.3])] = -np.inf
    scores = row.astype(np.float32)
    return {"scores": plain(scores)}, scores


def told(found: Distribution) -> Vector:
    """Return a distribution as vectors have it."""
    count = len(found.ids)
    places = np.arange(count) if count <= WHOLE else np.linspace(0, count - 1, SOME).astype(int)
    hashed = 0xCBF29CE484222325
    for token in found.ids.tolist():
        hashed = (hashed ^ token) * 0x100000001B3 % 2**64
    return {
        "count": count,
        "hash": str(hashed),
        "places": [[int(i), int(found.ids[i]), plain(found.probs[i])] for i in places],
    }


def _nudged(params: SamplingParams, rows: bool) -> Iterator[SamplingParams]:
    """Yield the same options with each threshold moved by what rounding may come to."""
    most = math.nextafter(1.0, 0.0)
    for sign in (-1, 1):
        if params.top_p < 1.0:
            far = 1 + sign * (2e-6 if rows else 1e-11)
            yield replace(params, top_p=min(params.top_p * far, most))
        if params.typical_p < 1.0:
            yield replace(params, typical_p=min(params.typical_p * (1 + sign * 1e-11), most))
        if 0.0 < params.min_p < 1.0:
            yield replace(params, min_p=min(params.min_p * (1 + sign * 1e-12), 1.0))


def _blurred(row: Row, params: SamplingParams) -> bool:
    """Tell whether different scores weigh the same but for their last bits."""
    scores = np.unique(row[np.isfinite(row)]).astype(np.float64)
    with np.errstate(over="ignore"):
        gaps = np.diff(scores) / params.temperature
    return bool(((gaps > 1e-18) & (gaps < 1e-13)).any())


def _sampled(
    stands: Vector, row: Row, options: Vector, reach: float, position: int, exact: bool = False
) -> Vector | None:
    """Return one case; None where rounding decides."""
    params = SamplingParams(**options)
    case = {"row": stands, "params": options, "reach": plain(reach), "position": position}
    try:
        found = process(row, params, reach)
    except EngineError:
        return {**case, "fails": True}
    if not exact and _blurred(row, params):
        return None
    rows = reach == math.inf and not 0 < params.top_k < len(row)
    for other in [] if exact else _nudged(params, rows):
        if process(row, other, reach).ids.tolist() != found.ids.tolist():
            return None
    noise = Noise(position)
    with np.errstate(over="ignore"):  # of a probability near the least number
        draws = [found.draw(noise, p, position + int(p)) for p in Purpose]
    return {**case, **told(found), "draws": draws}


def _options(rng: np.random.Generator, size: int) -> Vector:
    options: Vector = {"temperature": float(rng.choice(HEATS if rng.random() < 0.5 else [0.7, 1]))}
    if rng.random() < 0.5:
        options["top_k"] = int(rng.choice([-1, 1, 2, 5, 50, max(1, size // 2), size]))
    if rng.random() < 0.5:
        options["top_p"] = float(
            rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, rng.random() + 1e-3])
        )
    if rng.random() < 0.3:
        options["min_p"] = float(rng.choice([1e-6, 0.05, 0.3, 1.0, rng.random()]))
    if rng.random() < 0.4:
        options["typical_p"] = float(rng.choice([1e-9, 0.2, 0.9, 0.95, rng.random() + 1e-3]))
    return {name: min(value, 1.0) if name == "top_p" else value for name, value in options.items()}


def _edges() -> Iterator[Vector | None]:
    """Yield cases on a threshold exactly, in numbers that are added without rounding."""
    for size in (1, 2, 3, 8, 17, 1024, 5000):
        stands, row = {"scores": [0.5] * size}, np.full(size, 0.5, np.float32)
        for name, value in (("top_p", 0.5), ("top_p", 0.25), ("min_p", 1.0), ("top_k", 3)):
            options = {"temperature": 2.0, name: value}
            yield _sampled(stands, row, options, math.inf, size, exact=True)
            yield _sampled(stands, row, {**options, "top_k": 2}, math.inf, size, exact=True)
    for scores in ([math.nan, 1.0], [-math.inf] * 20, [1.0, math.inf], [1.0] * 40 + [math.nan]):
        stands, row = {"scores": plain(scores)}, np.array(scores, np.float32)
        yield _sampled(stands, row, {"temperature": 1.0}, math.inf, 0)


def sampling() -> Vector:
    """Return rows of logits, and what is drawn from them."""
    rng = np.random.default_rng(20261122)
    cases = [*_edges()]
    for i in range(1500):
        stands, row = small(rng)
        reach = float(rng.choice([math.inf, math.inf, 7.0, 0.5]))
        cases.append(_sampled(stands, row, _options(rng, len(row)), reach, i))
    for i in range(60):
        size = int(rng.choice([1000, 5000, 50_257, 151_936]))
        scale = float(rng.choice([0.01, 1.0, 6.0, 15.0, 200.0]))
        step, ruled = int(rng.choice([1, 1, 2048, 16384])), int(rng.choice([0, 0, 50, 99]))
        stands, row = large(i, size, scale, step, ruled)
        for _ in range(4):
            reach = float(rng.choice([math.inf, math.inf, math.inf, 7.0]))
            cases.append(_sampled(stands, row, _options(rng, size), reach, i << 16))
    return {"cases": [case for case in cases if case is not None], "left_out": cases.count(None)}


def known_numbers() -> Any:
    """Return the vectors of docs/randomness.md."""
    return json.loads(KNOWN.read_text())


def noise() -> Vector:
    """Return numbers of docs/randomness.md, and of keys drawn at random."""
    numbers = [
        {
            "seed": str(known["seed"] % 2**64),
            "request": str(known["request"]),
            "purpose": int(Purpose[known["purpose"]]),
            "position": str(known["position"]),
            "token": known["token"],
            "uniform": known["uniform"],
            "exponential": known["exponential"],
        }
        for known in known_numbers()["numbers"]
    ]
    rng = np.random.default_rng(1)
    for _ in range(300):
        seed, position = (int(rng.integers(0, 2**63)) << int(rng.integers(0, 2)) for _ in "ab")
        request, token = (
            int(rng.integers(0, 2**63) >> rng.integers(0, 63)),
            int(rng.integers(2**18)),
        )
        purpose = Purpose(int(rng.integers(4)))
        made = Noise(seed, request)
        wait = float(made.exponential(purpose, position, np.array([token]))[0])
        numbers.append({
            "seed": str(seed), "request": str(request), "purpose": int(purpose),
            "position": str(position), "token": token, "exponential": wait,
            "uniform": made.uniform(purpose, position) if token == 0 else math.exp(-wait),
        })  # fmt: skip
    return {"numbers": numbers}


def logprobs() -> Vector:
    """Return rows, and what they say of a token and of the likeliest."""
    rng = np.random.default_rng(3)
    rows = [small(rng) for _ in range(300)]
    for i, size in enumerate((1000, 50_257, 151_936)):
        rows += [large(i, size, scale, step, 20) for scale in (1.0, 9.0) for step in (1, 8192)]
    cases = []
    for stands, row in rows:
        for k in (0, 1, 5, 20):
            token = int(rng.integers(len(row)))
            case = {"row": stands, "token": token, "k": k}
            try:
                found = ranked(row[None], [token], k)
            except EngineError:
                cases.append({**case, "fails": True})
                continue
            cases.append({
                **case, "logprob": plain(found.logprobs[0, 0]), "rank": int(found.ranks[0]),
                "ids": found.ids[0, 1:].tolist(), "logprobs": plain(found.logprobs[0, 1:]),
            })  # fmt: skip
    return {"cases": cases}
