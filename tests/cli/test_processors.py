"""The options of `specrt generate` that edit scores, over the real pair."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cli.ran import Run
from specrt.generator import Generator
from specrt.params import SamplingParams

PROMPT = "def fibonacci(n):\n"
OPTIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "penalties": (
        ["--repetition-penalty", 1.3, "--presence-penalty", 0.5, "--frequency-penalty", 0.25],
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ),
    "ngram": (["--no-repeat-ngram", 3], {"no_repeat_ngram_size": 3}),
    "bias": (
        ["--logit-bias", "50=-2.5", "--logit-bias", "300=4"],
        {"logit_bias": {50: -2.5, 300: 4.0}},
    ),
    "words": (["--bad-word", "name"], {"bad_words": ["name"]}),
    "typical": (
        ["--typical-p", 0.8, "--temperature", 0.9, "--seed", 3],
        {"typical_p": 0.8, "temperature": 0.9, "seed": 3},
    ),
}


@pytest.mark.parametrize(("asked", "params"), OPTIONS.values(), ids=OPTIONS)
def test_options_are_those_of_the_library_and_gamma_changes_nothing(
    cli: Run, codelet: Path, generator: Generator, asked: list[Any], params: dict[str, Any]
) -> None:
    wanted = generator.generate(PROMPT, SamplingParams(max_tokens=48, **params), gamma=0)
    plain = generator.generate(PROMPT, SamplingParams(max_tokens=48), gamma=0)
    assert wanted.token_ids != plain.token_ids, "the option does something"
    for gamma in (0, 3, "auto"):
        said = ["--prompt", PROMPT, "--max-tokens", 48, "--gamma", gamma, "--json", *asked]
        found = json.loads(cli("generate", codelet, *said).out)
        assert found["token_ids"] == wanted.token_ids


def test_no_three_tokens_come_twice(generator: Generator) -> None:
    params = SamplingParams(max_tokens=120, no_repeat_ngram_size=3)
    done = generator.generate(PROMPT, params, gamma=4)
    whole = [*generator.tokenizer.encode(PROMPT), *done.token_ids]
    runs = list(zip(pairwise(whole), whole[2:], strict=False))
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--logit-bias", "5=much"], "'5=much' is not a bias; expected a token id and a number"),
        (["--logit-bias", "99999=1"], "logit_bias holds 99999; expected ids of the vocabulary"),
        (["--allowed-token-id", 99999], "allowed_token_ids holds 99999"),
        (["--presence-penalty", 3], "presence_penalty is 3.0; expected a number from -2 to 2"),
        (["--min-tokens", 9, "--max-tokens", 8], "min_tokens is 9; expected up to max_tokens, 8"),
    ],
)
def test_bad_values_are_one_line(cli: Run, codelet: Path, asked: list[Any], said: str) -> None:
    ran = cli("generate", codelet, "--prompt", PROMPT, *asked)
    assert (ran.status, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1
