"""Calls of functions of numbers, with what the Python runtime answers.

Cases in which a threshold is met within rounding are left out: there the last bits of an
exponential decide, and those are the library's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpp.native_calls import Case, Document, plain
from specrt.errors import EngineError, RequestError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, ranked, residual
from specrt.sampling.noise import Noise, Purpose
from specrt.sampling.processors import LogitsProcessors, build_processors, likeliest
from specrt.speculation.round import Proposal
from specrt.speculation.target import rejection

Row = NDArray[np.float32]
HEATS = [1e-30, 1e-26, 1e-10, 1e-3, 0.1, 0.7, 1.0, 1.5, 3.0, 100.0, 1e10, 1e30, 1e38, 1e300]
ENGINE: Document = {"status": 5}
"""The answer of what fails as an engine does."""


def small(rng: np.random.Generator) -> Row:
    """Return a short row of any kind."""
    size = int(rng.integers(1, 40))
    row = rng.standard_normal(size) * rng.choice([1e-3, 0.1, 1.0, 3.0, 50.0, 1e4, 1e30])
    if rng.random() < 0.4:
        row = np.round(row * 2) / 2
    if rng.random() < 0.1:
        row[:] = row[0]
    row[rng.random(size) < rng.choice([0.0, 0.0, 0.3])] = -np.inf
    return row.astype(np.float32)


def large(rng: np.random.Generator, size: int) -> Row:
    """Return a row of a real vocabulary: some have ties, some have ids that are ruled out."""
    row = rng.standard_normal(size) * rng.choice([0.01, 1.0, 6.0, 15.0, 200.0])
    if rng.random() < 0.5:
        row = np.round(row * 8) / 8
    row[rng.random(size) < rng.choice([0.0, 0.5, 0.99])] = -np.inf
    return row.astype(np.float32)


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
    row: Row, options: Document, reach: float, position: int, *, exact: bool = False
) -> Iterator[Case]:
    """Yield one case, or none where rounding decides."""
    params = SamplingParams(**options)
    call = {"call": "process", "scores": row, "params": options, "reach": reach,
            "position": position}  # fmt: skip
    try:
        found = process(row, params, reach)
    except EngineError:
        yield call, ENGINE
        return
    rows = reach == math.inf and not 0 < params.top_k < len(row)
    others = () if exact else _nudged(params, rows)
    same = all(process(row, other, reach).ids.tolist() == found.ids.tolist() for other in others)
    if same and (exact or not _blurred(row, params)):
        with np.errstate(over="ignore"):  # of a probability near the least number
            draws = [found.draw(Noise(position), p, position + int(p)) for p in Purpose]
        yield call, {**_pair(found), "draws": draws, "chance": found.prob(draws[0])}


def _options(rng: np.random.Generator, size: int) -> Document:
    options: Document = {"temperature": float(rng.choice(HEATS if rng.random() < 0.5 else [0.7]))}
    if rng.random() < 0.5:
        options["top_k"] = int(rng.choice([-1, 1, 2, 5, 50, max(1, size // 2), size]))
    if rng.random() < 0.5:
        shares = [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, rng.random()]
        options["top_p"] = float(rng.choice(shares)) or 1.0
    if rng.random() < 0.3:
        options["min_p"] = float(rng.choice([1e-6, 0.05, 0.3, 1.0, rng.random()]))
    if rng.random() < 0.4:
        options["typical_p"] = float(rng.choice([1e-9, 0.2, 0.9, 0.95, rng.random()])) or 1.0
    return options


def sampling() -> Iterator[Case]:
    """Yield rows of logits, and what is drawn from them."""
    rng = np.random.default_rng(20261122)
    exact = (("top_p", 0.5), ("top_p", 0.25), ("min_p", 1.0), ("top_k", 3))
    for size, (name, value) in product((1, 2, 3, 8, 17, 1024, 5000), exact):
        row = np.full(size, 0.5, np.float32)
        for options in ({name: value}, {name: value, "top_k": 2}):
            yield from _sampled(row, {"temperature": 2.0, **options}, math.inf, size, exact=True)
    for scores in ([math.nan, 1.0], [-math.inf] * 20, [1.0, math.inf], [1.0] * 40 + [math.nan]):
        yield from _sampled(np.array(scores, np.float32), {"temperature": 1.0}, math.inf, 0)
    sizes = [0] * 1200 + [1000] * 10 + [5000] * 10 + [50_257, 151_936]
    for position, size in enumerate(sizes):
        row = large(rng, size) if size else small(rng)
        reach = float(rng.choice([math.inf, math.inf, 7.0, 0.5]))
        yield from _sampled(row, _options(rng, len(row)), reach, position << 12)


def logprobs() -> Iterator[Case]:
    """Yield rows, and what they say of a token and of the likeliest."""
    rng = np.random.default_rng(3)
    rows = [small(rng) for _ in range(300)] + [large(rng, n) for n in (1000, 5000, 50_257)]
    for row, k in product(rows, (0, 1, 20)):
        token = int(rng.integers(len(row)))
        call = {"call": "ranked", "scores": row, "token": token, "k": k}
        try:
            found = ranked(row[None], [token], k)
        except EngineError:
            yield call, ENGINE
            continue
        yield call, {
            "token": token, "logprob": found.logprobs[0, 0], "rank": found.ranks[0],
            "ids": found.ids[0, 1:], "logprobs": found.logprobs[0, 1:],
        }  # fmt: skip


# ---- verdicts ----


def _pair(found: Distribution) -> Document:
    return {"ids": found.ids, "probs": found.probs}


def _mixture(rng: np.random.Generator, vocabulary: int) -> Distribution:
    row = (rng.standard_normal(vocabulary) * rng.choice([0.5, 2.0])).astype(np.float32)
    if rng.random() < 0.3:
        row = np.round(row)
    options = {"temperature": 1.0, "top_k": int(rng.choice([0, 2, 5]))}
    return process(row, SamplingParams(**options))


def verify() -> Iterator[Case]:
    """Yield rounds of rejection, and what is left of distributions."""
    rng = np.random.default_rng(2)
    for i in range(400):
        vocabulary, gamma = int(rng.integers(1, 20)), int(rng.integers(0, 6))
        targets = [_mixture(rng, vocabulary) for _ in range(gamma + 1)]
        drafts = [_mixture(rng, vocabulary) for _ in range(gamma)]
        drafted = [q.draw(Noise(i), Purpose.DRAFT, place) for place, q in enumerate(drafts)]
        if rng.random() < 0.3:  # every token was certain
            drafts = []
        request, proposal = int(rng.integers(3)), Proposal(drafted, drafts or None)
        seed = i << 55  # to the largest
        verdict = rejection(proposal, targets.__getitem__, Noise(seed, request), i)
        pairs = {"distributions": [*map(_pair, drafts)], "targets": [*map(_pair, targets)]}
        call = {"call": "rejection", "drafted": drafted, **pairs, "seed": str(seed)}
        yield {**call, "request": request, "position": i}, [verdict.accepted, verdict.next]
        p, token = targets[0], int(rng.integers(vocabulary))
        q = [None, p, _mixture(rng, vocabulary)][int(rng.integers(3))]
        call = {"call": "residual", "target": _pair(p), "draft": [_pair(q)] if q else []}
        yield {**call, "token": token}, _pair(residual(p, q, token))


# ---- logits processors ----


def _halve(tokens: list[int], row: Row) -> Row:
    return row * np.float32(0.5)


def _lean(tokens: list[int], row: Row) -> Row:
    row[len(tokens) % len(row)] += np.float32(0.25) * np.float32(sum(tokens) % 7)
    row[tokens[-1]] = -np.inf
    return row


FUNCTIONS = {"halve": _halve, "lean": _lean}
"""Processors of an application; those in C++ are in native/sampling.cpp."""


class Spelled:
    """Encodes the words that it was given tokens for."""

    def __init__(self, words: dict[str, list[int]]) -> None:
        self._words = words

    def encode(self, text: str, *, special: bool = True, behind: int = 0) -> list[int]:
        """Return the tokens of a word."""
        assert not special
        return self._words[f"\n{text[behind:]}" if behind else text]


def _options_of_rules(rng: np.random.Generator, vocabulary: int) -> Document:
    """Return options of every kind, each of them now and then."""

    def ids(count: int) -> list[int]:
        return rng.integers(0, vocabulary, count).tolist()

    made: Document = {
        "allowed_token_ids": ids(max(1, vocabulary // 2)),
        "bad_words": ["one", "two", "three"][: int(rng.integers(1, 4))],
        "min_tokens": int(rng.integers(0, 12)),
        "stop_token_ids": ids(2),
        "logit_bias": {token: float(rng.normal() * 3) for token in ids(3)},
        "repetition_penalty": float(rng.choice([1.3, 0.7, 100.0, 0.01, 1.0, 1 + 1e-12])),
        "presence_penalty": float(rng.choice([0.3, -2.0, 0.0])),
        "frequency_penalty": float(rng.choice([0.7, -0.1, 0.0])),
        "no_repeat_ngram_size": int(rng.choice([1, 2, 3, 5, 2**40])),
    }
    share = rng.choice([0.15, 0.5, 1.0])
    return {name: value for name, value in made.items() if rng.random() < share}


def _steps(rng: np.random.Generator, rules: LogitsProcessors, vocabulary: int) -> Iterator[Case]:
    """Yield rounds: a text that grows, and rows after drafted tokens, edited."""
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
            step = {"text": list(text), "path": path, "scores": plain(row)}
            with np.errstate(over="ignore", invalid="ignore"):
                yield step, plain(rules.edit(row, path))
        text = [*text, *rng.integers(0, vocabulary, int(rng.integers(0, 5))).tolist()]


REFUSED: tuple[tuple[Document, tuple[str, ...], int, str], ...] = (
    ({"stop_token_ids": [3, 9]}, (), 1, "stop_token_ids holds 9; expected ids of the vocabulary"),
    ({"logit_bias": [[2**62, 1.0]]}, (), 1, f"logit_bias holds {2**62}; expected ids of the voc"),
    ({"json_schema": "{}"}, (), 7, "json_schema was given"),
    ({"regex": "a+"}, (), 7, "use the hosted"),
    ({"choice": ["a", "b"]}, (), 7, "choice was given"),
    ({"grammar": "start: A"}, (), 7, "grammar was given"),
    ({}, ("halve", "refuse"), 9, "returned 3; expected 0"),
)


def rules() -> Iterator[Case]:
    """Yield texts that grow, and the rows behind them as requests edit them."""
    rng = np.random.default_rng(4)
    call: Document = {"call": "edited", "vocabulary": 9, "ends": [], "spelled": {}}
    steps = [{"text": [1], "path": [2], "scores": [0.0] * 9}]
    for params, processors, status, says in REFUSED:
        case = {**call, "params": params, "processors": processors, "steps": steps}
        yield case, {"status": status, "message": says}
    for _ in range(250):
        vocabulary = int(rng.choice([3, 8, 20]))
        options = _options_of_rules(rng, vocabulary)
        names = rng.choice([*FUNCTIONS], int(rng.integers(0, 3))).tolist()
        spelled = {
            space + word: rng.integers(0, vocabulary + 2, int(rng.integers(0, 4))).tolist()
            for word, space in product(("one", "two", "three"), ("", " ", "\n"))
        }
        ends = rng.integers(0, vocabulary + 2, int(rng.integers(0, 3))).tolist()
        functions = tuple(FUNCTIONS[name] for name in names)
        tokenizer: Any = Spelled(spelled)
        params = SamplingParams(**options, logits_processors=functions)
        made = build_processors(params, tokenizer, ends, vocabulary)
        if "logit_bias" in options:
            options["logit_bias"] = [*options["logit_bias"].items()]
        answers = [] if made is None else [*_steps(rng, made, vocabulary)]
        case = {"call": "edited", "vocabulary": vocabulary, "params": options, "ends": ends,
                "processors": names, "spelled": spelled}  # fmt: skip
        edited = None if made is None else [row for _, row in answers]
        yield {**case, "steps": [step for step, _ in answers]}, edited
    rows: list[list[float]] = [[-math.inf], [-math.inf] * 40, [math.nan, 1.0], [1.0] * 33]
    rows += [rng.integers(0, 9, int(rng.integers(1, 60))).tolist() for _ in range(50)]
    for scores in rows:
        answer: Any = {"status": 1}
        with contextlib.suppress(RequestError):
            answer = likeliest(np.array(scores, np.float32))
        yield {"call": "likeliest", "scores": scores}, answer
