"""Several completions at once on codelet's engines are those that each would be alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import specrt
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt_export.builder import build
from specrt_export.recipe import read_recipe

ROWS = 3
RECIPE = Path(__file__).parents[2] / "engines/codelet/recipe.toml"
PROMPTS = [
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\n\ndef walk(root):\n    " * 12,
    "x = [",
    "# A queue of jobs, the oldest first.\n",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generator]:
    out = tmp_path_factory.mktemp("batch") / "bundle"
    recipe = read_recipe(RECIPE)
    build(replace(recipe, engine=replace(recipe.engine, batch=ROWS)), out)
    with specrt.load(out) as generator:
        yield generator


@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade", "none"])
@pytest.mark.parametrize("gamma", [0, 3, "auto"])
def test_neighbours_change_no_token(
    rows: Generator, generator: Generator, drafter: str, gamma: specrt.params.Gamma
) -> None:
    params = [
        SamplingParams(max_tokens=40 + 9 * i, temperature=0.7 * (i % 2), seed=i)
        for i in range(len(PROMPTS))
    ]
    found = rows.generate_many(PROMPTS, params, gamma=gamma, drafter=drafter)
    for prompt, own, (done,) in zip(PROMPTS, params, found, strict=True):
        generator.forget()
        assert done.token_ids == generator.generate(prompt, own, gamma=0).token_ids


def test_completions_of_one_prompt_read_it_once(rows: Generator) -> None:
    rows.forget()
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=5, n=ROWS)
    (done,) = rows.generate_many([PROMPTS[2]], params)
    read = done[0].prompt_tokens
    assert read > 100
    assert [c.cached_tokens for c in done] == [0, read - 1, read - 1]
    assert len({c.text for c in done}) == ROWS
    alone = rows.generate(PROMPTS[2], replace(params, n=1), gamma=0)
    assert alone.token_ids == done[0].token_ids


def test_the_next_turn_of_a_text_is_the_same_as_read_whole(generator: Generator) -> None:
    params, text = SamplingParams(max_tokens=30), generator.tokenizer.encode(PROMPTS[1])
    for turn in range(3):
        done = generator.generate(text, params, gamma=3)
        assert turn == 0 or done.cached_tokens > 0
        generator.forget()
        assert generator.generate(text, params, gamma=3).token_ids == done.token_ids
        text = [*text, *done.token_ids, *generator.tokenizer.encode("\n# and\n")]
