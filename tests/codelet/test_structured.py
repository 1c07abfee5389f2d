"""Codelet's real engines keep to structures, and draft within them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specrt.completion import Completion
from specrt.generator import Generator
from specrt.params import SamplingParams
from support.schemas import NESTED, nested, valid

pytest.importorskip("llguidance", reason="needs the structured extra")

PROMPT = 'def load(path):\n    """Read the settings of a user.\n\n    '
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {
            "type": "array",
            "items": {"type": "string", "minLength": 0, "maxLength": 10},
            "minItems": 1,
            "maxItems": 3,
        },
        "kind": {"enum": ["user", "group", None]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ASKED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"json_schema": PERSON}, lambda text: valid(PERSON, json.loads(text))),
    "json": ({"json_schema": True}, lambda text: json.loads(text) is not ...),
    "regex": ({"regex": r"[A-Z][a-z]{2,9}( [a-z]{1,9}){2,6}\."}, lambda text: text.endswith(".")),
    "choice": ({"choice": ["return", "raise", "yield from"]}, lambda text: text[0] in "ry"),
    "grammar": ({"grammar": NESTED}, nested),
}


def check(done: Completion, holds: Callable[[str], bool]) -> None:
    if done.finish_reason == "stop":
        assert holds(done.text), done.text
    else:
        assert done.finish_reason == "length"


@pytest.mark.parametrize(("option", "holds"), ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("seeds", [1, pytest.param(6, marks=pytest.mark.nightly)])
def test_speculation_changes_no_token_and_texts_keep_to_it(
    generator: Generator, option: dict[str, Any], holds: Callable[[str], bool], seeds: int
) -> None:
    for seed in range(seeds):
        params = SamplingParams(max_tokens=48, temperature=0.8 * (seed % 3), seed=seed, **option)
        plain = generator.generate(PROMPT, params, gamma=0)
        check(plain, holds)
        for gamma, drafter in ((2, "model"), (8, "cascade")):
            found = generator.generate(PROMPT, params, gamma=gamma, drafter=drafter)
            assert found.token_ids == plain.token_ids
            assert found.finish_reason == plain.finish_reason
        params = replace(params, temperature=0.8, verifier="rejection")
        check(generator.generate(PROMPT, params, gamma=3), holds)


def test_what_a_structure_forces_is_drafted_for_nothing(generator: Generator) -> None:
    option: dict[str, Any] = {
        "regex": r'\{"identifier": [0-9]{1,3}, "description": "[a-z ]{3,9}"\}'
    }
    params = SamplingParams(max_tokens=60, **option)
    done = generator.generate(PROMPT, params, gamma=4, drafter="model")
    assert re.fullmatch(option["regex"], done.text)
    drafted, accepted = done.speculation.sources["forced"]
    assert accepted >= 8
    assert accepted / drafted > 0.8
    params = SamplingParams(max_tokens=100, json_schema={"type": "array", "minItems": 30})
    done = generator.generate(PROMPT, params, gamma=3, drafter="model")
    assert done.speculation.acceptance_rate > 0.3
