"""The generator over toy engines: streams, refusals, and what is left after a failure."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.toy import TableEngine, generator, near

PARAMS = SamplingParams(max_tokens=30)


@pytest.fixture
def target(tokenizer: Tokenizer) -> TableEngine:
    return TableEngine(4, vocab=tokenizer.size)


@pytest.fixture
def made(target: TableEngine, tokenizer: Tokenizer) -> Generator:
    return generator(target, near(target, 5, 0.7), tokenizer)


def test_what_is_no_prompt_is_refused(made: Generator, target: TableEngine) -> None:
    wrong: list[tuple[Any, str]] = [
        *(([1, bad, 2], f"token id {bad!r} is not in the vocabulary of 0 to 264")
          for bad in (-1, 265, 1.0, True, np.array([1]))),
        ([], "the prompt has no tokens; give at least one"),
        (b"abc", "the prompt is of type bytes; expected text or token ids"),
    ]  # fmt: skip
    for prompt, told in wrong:
        with pytest.raises(RequestError, match=f"^{re.escape(told)}"):
            made.stream(prompt)
    with pytest.raises(RequestError, match="expected SamplingParams"):
        made.stream([1, 2], {"max_tokens": 5})  # type: ignore[arg-type]
    assert target.calls == []


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"max_tokens": 2}, r"max_tokens is 2.* pass SamplingParams\(max_tokens=2\)"),
        ({"guided_regex": "a"}, r"pass SamplingParams\(regex='a'\)"),
        ({"gama": 2}, "unknown option 'gama'; did you mean 'gamma'"),
    ],
)
def test_an_option_of_the_wrong_place_is_told_the_right_one(
    made: Generator, target: TableEngine, option: dict[str, Any], told: str
) -> None:
    for call in (made.generate, made.stream, made.astream, made.astreams, made.generate_each):
        with pytest.raises(RequestError, match=told):
            call([1, 2], PARAMS, **option)  # type: ignore[operator]
    with pytest.raises(RequestError, match=told):
        asyncio.run(made.agenerate([1, 2], PARAMS, **option))
    assert target.calls == []


def test_a_seed_is_drawn_and_reported_when_none_is_given(made: Generator) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0)
    first, second = made.generate("a", params), made.generate("a", params)
    assert first.seed != second.seed
    again = SamplingParams(max_tokens=20, temperature=1.0, seed=first.seed)
    assert made.generate("a", again).token_ids == first.token_ids
