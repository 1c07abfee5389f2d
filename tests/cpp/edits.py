"""Vectors of what requests say about the next token besides temperature: edits of rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from cpp.numeric import Row, Vector, plain
from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.sampling.processors import LogitsProcessors, build_processors, likeliest


def _halve(tokens: list[int], row: Row) -> Row:
    return row * np.float32(0.5)


def _lean(tokens: list[int], row: Row) -> Row:
    row[len(tokens) % len(row)] += np.float32(0.25) * np.float32(sum(tokens) % 7)
    row[tokens[-1]] = -np.inf
    return row


FUNCTIONS = {"halve": _halve, "lean": _lean}
"""Processors of an application; those in C++ are in native/rules_check.cpp."""


class Spelled:
    """Encodes the words that it was given tokens for."""

    def __init__(self, words: dict[str, list[int]]) -> None:
        self._words = words

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a word."""
        assert not special
        return self._words[text]


def _asked(rng: np.random.Generator, vocabulary: int) -> Vector:
    """Return options of every kind, each asked for now and then."""

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


def _params(asked: Vector) -> SamplingParams:
    options = {name: value for name, value in asked.items() if name != "processors"}
    options["logit_bias"] = dict(asked.get("logit_bias", ()))
    functions = tuple(FUNCTIONS[name] for name in asked.get("processors", ()))
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
    for asked, status, message in (
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
        yield {"vocabulary": 9, "params": asked, "ends": [], "spelled": {}, "steps": steps,
               "status": status, "message": message}  # fmt: skip


def rules() -> Vector:
    """Return texts that grow, and the rows behind them as requests edit them."""
    rng = np.random.default_rng(4)
    cases = [*_refused()]
    for _ in range(250):
        vocabulary = int(rng.choice([3, 8, 20]))
        asked = _asked(rng, vocabulary)
        spelled = {
            space + word: rng.integers(0, vocabulary + 2, int(rng.integers(0, 4))).tolist()
            for word in ("one", "two", "three")
            for space in ("", " ")
        }
        ends = rng.integers(0, vocabulary + 2, int(rng.integers(0, 3))).tolist()
        case = {"vocabulary": vocabulary, "params": asked, "ends": ends, "spelled": spelled}
        tokenizer: Any = Spelled(spelled)
        made = build_processors(_params(asked), tokenizer, ends, vocabulary)
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
