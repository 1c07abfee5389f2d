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

from specrt.errors import EngineError, RequestError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, ranked, residual
from specrt.sampling.noise import Noise, Purpose
from specrt.sampling.processors import LogitsProcessors, build_processors, likeliest
from specrt.speculation.round import Proposal
from specrt.speculation.target import match, rejection

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


def described(found: Distribution) -> Vector:
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
    return {**case, **described(found), "draws": draws}


def _options(rng: np.random.Generator, size: int) -> Vector:
    options: Vector = {"temperature": float(rng.choice(HEATS if rng.random() < 0.5 else [0.7, 1]))}
    if rng.random() < 0.5:
        options["top_k"] = int(rng.choice([-1, 1, 2, 5, 50, max(1, size // 2), size]))
    if rng.random() < 0.5:
        shares = [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, rng.random() + 1e-3]
        options["top_p"] = float(rng.choice(shares))
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
        {**known, **{name: str(known[name] % 2**64) for name in ("seed", "request", "position")},
         "purpose": int(Purpose[known["purpose"]])}
        for known in known_numbers()["numbers"]
    ]  # fmt: skip
    rng = np.random.default_rng(1)
    for _ in range(300):
        seed, position = (int(rng.integers(0, 2**63)) << int(rng.integers(0, 2)) for _ in "ab")
        request = int(rng.integers(0, 2**63) >> rng.integers(0, 63))
        token = int(rng.integers(2**18))
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


# ---- verdicts ----


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
    """Return rounds of both verifiers, and what is left of distributions."""
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


# ---- logits processors ----


def _halve(tokens: list[int], row: Row) -> Row:
    return row * np.float32(0.5)


def _lean(tokens: list[int], row: Row) -> Row:
    row[len(tokens) % len(row)] += np.float32(0.25) * np.float32(sum(tokens) % 7)
    row[tokens[-1]] = -np.inf
    return row


FUNCTIONS = {"halve": _halve, "lean": _lean}
"""Processors of an application; those in C++ are in native/sampling_check.cpp."""


class Spelled:
    """Encodes the words that it was given tokens for."""

    def __init__(self, words: dict[str, list[int]]) -> None:
        self._words = words

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a word."""
        assert not special
        return self._words[text]


def _options_of_rules(rng: np.random.Generator, vocabulary: int) -> Vector:
    """Return options of every kind, each of them now and then."""

    def ids(count: int) -> list[int]:
        return rng.integers(0, vocabulary, count).tolist()

    bias = {token: float(rng.normal() * 3) for token in ids(3)}
    made: Vector = {
        "allowed_token_ids": ids(max(1, vocabulary // 2)),
        "bad_words": ["one", "two", "three"][: int(rng.integers(1, 4))],
        "min_tokens": int(rng.integers(0, 12)),
        "stop_token_ids": ids(2),
        "logit_bias": [[next(iter(bias)), 9.0], *([token, added] for token, added in bias.items())],
        "processors": rng.choice([*FUNCTIONS], int(rng.integers(1, 3))).tolist(),
        "repetition_penalty": float(rng.choice([1.3, 0.7, 100.0, 0.01, 1.0, 1 + 1e-12])),
        "presence_penalty": float(rng.choice([0.3, -2.0, 0.0])),
        "frequency_penalty": float(rng.choice([0.7, -0.1, 0.0])),
        "no_repeat_ngram_size": int(rng.choice([1, 2, 3, 5, 2**40])),
    }
    share = rng.choice([0.15, 0.5, 1.0])
    return {name: value for name, value in made.items() if rng.random() < share}


def _params(given: Vector) -> SamplingParams:
    options = {name: value for name, value in given.items() if name != "processors"}
    options["logit_bias"] = dict(given.get("logit_bias", ()))
    functions = tuple(FUNCTIONS[name] for name in given.get("processors", ()))
    return SamplingParams(**options, logits_processors=functions)


def _steps(rng: np.random.Generator, rules: LogitsProcessors, vocabulary: int) -> Iterator[Vector]:
    """Yield rounds: a text that grows, and rows behind drafted tokens, edited."""
    text = rng.integers(0, vocabulary, int(rng.integers(1, 12))).tolist()
    for _ in range(6):
        rules.learn(text)
        for count in (0, int(rng.integers(0, 7))):
            path = rng.integers(0, vocabulary, count).tolist()
            size = vocabulary if rng.random() < 0.8 else int(rng.integers(1, vocabulary + 1))
            row = (rng.standard_normal(size) * rng.choice([1.0, 30.0])).astype(np.float32)
            row[rng.random(size) < 0.1] = -np.inf
            if rng.random() < 0.1:
                row[0] = 3e38
            yield {
                "text": list(text), "path": path, "scores": plain(row),
                "edited": plain(rules.edit(row, path)),
            }  # fmt: skip
        text = [*text, *rng.integers(0, vocabulary, int(rng.integers(0, 5))).tolist()]


def _refused() -> Iterator[Vector]:
    """Yield requests that are refused, and processors that fail, with the status and its words."""
    for params, status, message in (
        ({"stop_token_ids": [3, 9]}, 1, "stop_token_ids holds 9; expected ids of the vocabulary, 0 "
         "to 8"),
        ({"allowed_token_ids": [-1]}, 1, "allowed_token_ids holds -1; expected ids of the vocab"),
        ({"logit_bias": [[2**62, 1.0]]}, 1, f"logit_bias holds {2**62}; expected ids of the voc"),
        ({"json_schema": "{}"}, 7, "json_schema was given"),
        ({"regex": "a+"}, 7, "use the hosted"),
        ({"choice": ["a", "b"]}, 7, "choice was given"),
        ({"grammar": "start: A"}, 7, "grammar was given"),
        ({"processors": ["halve", "refuse"]}, 9, "returned 3; expected 0"),
        ({"processors": ["raise"]}, 9, "the application gave up"),
        ({"processors": ["nothing"]}, 1, "left NaN or infinity"),
        ({"processors": ["boundless"]}, 1, "left NaN or infinity"),
    ):  # fmt: skip
        steps = [{"text": [1], "path": [2], "scores": [0.0] * 9, "edited": [0.0] * 9}]
        yield {"vocabulary": 9, "params": params, "ends": [], "spelled": {}, "steps": steps,
               "status": status, "message": message}  # fmt: skip


def rules() -> Vector:
    """Return texts that grow, and the rows behind them as requests edit them."""
    rng = np.random.default_rng(4)
    cases = [*_refused()]
    for _ in range(250):
        vocabulary = int(rng.choice([3, 8, 20]))
        options = _options_of_rules(rng, vocabulary)
        spelled = {
            space + word: rng.integers(0, vocabulary + 2, int(rng.integers(0, 4))).tolist()
            for word in ("one", "two", "three")
            for space in ("", " ")
        }
        ends = rng.integers(0, vocabulary + 2, int(rng.integers(0, 3))).tolist()
        case = {"vocabulary": vocabulary, "params": options, "ends": ends, "spelled": spelled}
        tokenizer: Any = Spelled(spelled)
        made = build_processors(_params(options), tokenizer, ends, vocabulary)
        with np.errstate(over="ignore", invalid="ignore"):
            found = {"none": True} if made is None else {"steps": [*_steps(rng, made, vocabulary)]}
        cases.append({**case, **found})
    return {"cases": cases, "likeliest": [*_likeliest(rng)]}


def _likeliest(rng: np.random.Generator) -> Iterator[Vector]:
    rows: list[list[float]] = [[-math.inf], [-math.inf] * 40, [math.nan, 1.0], [1.0] * 33]
    rows += [rng.integers(0, 9, int(rng.integers(1, 60))).tolist() for _ in range(50)]
    for scores in rows:
        try:
            token = likeliest(np.array(scores, np.float32))
        except RequestError:
            token = None
        yield {"scores": plain(scores), "token": token}
