"""Whatever is drafted, a structured text keeps to its structure and is the plain one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.schemas import NESTED, STRUCTURES, Asked
from runtime.toy import TableEngine, byte_fallback, generator, near
from specrt.completion import Completion
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text import Tokenizer

pytest.importorskip("llguidance", reason="needs the structured extra")

VOCABULARY, EOS = 272, 263
PROMPT = list(b"the thing in")
DRAFTERS = ("model", "ngram", "cascade")
SLOW = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def pair(tokenizer: Tokenizer) -> Callable[[int], Generator]:
    """Makes a generator whose draft is like its target, and sometimes wrong."""

    def made(seed: int) -> Generator:
        target = TableEngine(seed, vocab=VOCABULARY, memory=3)
        return generator(target, near(target, seed + 1, 0.8), tokenizer, eos=[EOS])

    return made


def check(asked: Asked, done: Completion) -> None:
    assert done.finish_reason in ("stop", "length")
    if done.finish_reason == "stop":
        assert done.token_ids[-1] == EOS
        assert asked.holds(done.text), done.text


@given(
    asked=STRUCTURES,
    seed=st.integers(0, 9),
    gamma=st.integers(1, 8),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    drafter=st.sampled_from(DRAFTERS),
    most=st.integers(1, 120),
)
@SLOW
def test_speculation_changes_no_token(
    pair: Callable[[int], Generator], asked: Asked, seed: int, gamma: int, temperature: float,
    drafter: str, most: int,
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=most, temperature=temperature, seed=seed, **asked.option)
    one = pair(seed)
    plain = one.generate(PROMPT, params, gamma=0)
    found = one.generate(PROMPT, params, gamma=gamma, drafter=drafter)
    assert found.token_ids == plain.token_ids
    assert found.finish_reason == plain.finish_reason
    assert plain.speculation.drafted == 0
    check(asked, found)


@given(
    asked=STRUCTURES, seed=st.integers(0, 99), gamma=st.integers(0, 8),
    drafter=st.sampled_from(DRAFTERS),
)  # fmt: skip
@SLOW
def test_under_rejection_the_text_keeps_to_it_too(
    pair: Callable[[int], Generator], asked: Asked, seed: int, gamma: int, drafter: str
) -> None:
    params = SamplingParams(
        max_tokens=90, temperature=1.0, seed=seed, verifier="rejection", **asked.option
    )
    check(asked, pair(seed % 7).generate(PROMPT, params, gamma=gamma, drafter=drafter))


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 1.0},
        {"no_repeat_ngram_size": 3},
        {"logit_bias": {99: 50.0, EOS: 50.0}},
        {"min_tokens": 8},
        {"logits_processors": [lambda tokens, row: row * 0 + len(tokens) % 3]},
        {"allowed_token_ids": [*range(256), EOS]},
        {"bad_words": ["b", "ab"]},
        {"top_k": 2, "temperature": 1.0, "seed": 3},
    ],
    ids="-".join,
)
def test_other_options_hold_within_it(
    pair: Callable[[int], Generator], more: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=40, regex="[a-c]{2,30}", **more)
    plain = pair(3).generate(PROMPT, params, gamma=0)
    found = pair(3).generate(PROMPT, params, gamma=4, drafter="model")
    assert found.token_ids == plain.token_ids
    assert set(found.text) <= set("abc")
    assert 2 <= len(found.text) <= 30
    if "min_tokens" in more:
        assert len(found.token_ids) > 8
    if "bad_words" in more:
        assert "b" not in found.text


@pytest.mark.parametrize("gamma", [0, 4])
@pytest.mark.parametrize(
    "more", [{"min_tokens": 9}, {"allowed_token_ids": [1, 2]}, {"bad_words": ["b"]}], ids=str
)
def test_a_dead_end_is_said(
    pair: Callable[[int], Generator], gamma: int, more: dict[str, Any]
) -> None:
    one = pair(0)
    with pytest.raises(RequestError, match="no token is left that the request allows"):
        one.generate(PROMPT, SamplingParams(max_tokens=20, regex="ab", **more), gamma=gamma)
    assert one.generate(PROMPT, SamplingParams(regex="ab"), gamma=gamma).text == "ab"


def test_stop_strings_and_stop_tokens_cut_and_are_named(
    pair: Callable[[int], Generator],
) -> None:
    asked: dict[str, Any] = {"choice": ["abcdef"]}
    for gamma in (0, 3, 8):
        cut = pair(1).generate(PROMPT, SamplingParams(stop=("cd",), **asked), gamma=gamma)
        assert (cut.text, cut.finish_reason, cut.stop_reason) == ("ab", "stop", "cd")
        cut = pair(1).generate(PROMPT, SamplingParams(stop_token_ids=(99,), **asked), gamma=gamma)
        assert (cut.text, cut.finish_reason, cut.stop_reason) == ("ab", "stop", 99)
        cut = pair(1).generate(PROMPT, SamplingParams(max_tokens=3, **asked), gamma=gamma)
        assert (cut.text, cut.finish_reason) == ("abc", "length")


def test_a_draft_that_keeps_to_it_is_accepted(pair: Callable[[int], Generator]) -> None:
    """Masked as the target is, a draft like it stays as good as it was."""
    rates = []
    for expression in (None, "[a-z ]{110}[0-9]*"):
        params = SamplingParams(max_tokens=100, temperature=0.8, seed=3, regex=expression)
        done = pair(2).generate(PROMPT, params, gamma=4, drafter="model")
        rates.append(done.speculation.acceptance_rate)
    assert rates[1] > rates[0] - 0.1


def test_a_draft_that_knows_fewer_tokens_keeps_to_it(tokenizer: Tokenizer) -> None:
    target, draft = TableEngine(1, vocab=VOCABULARY), TableEngine(1, vocab=120)
    one = generator(target, draft, tokenizer, eos=[EOS])
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=2, regex="[a-z0-9]{20}")
    plain, found = (one.generate(PROMPT, params, gamma=g, drafter="model") for g in (0, 4))
    assert found.token_ids == plain.token_ids
    assert len(found.text) == 20
    assert found.speculation.drafted


def test_rows_of_a_batch_keep_to_structures_of_their_own(tokenizer: Tokenizer) -> None:
    """One comes to a dead end, one is free; none disturbs the others."""
    target = TableEngine(3, vocab=VOCABULARY, memory=3, batch=3)
    draft = TableEngine(3, vocab=VOCABULARY, memory=2, batch=3)
    one = generator(target, draft, tokenizer, eos=[EOS])
    asked = [
        SamplingParams(max_tokens=40, json_schema={"enum": ["the thing", 12345]}),
        SamplingParams(max_tokens=40, regex="[a-z]{9,12}", temperature=0.9, seed=4),
        SamplingParams(max_tokens=40, regex="abcd", bad_words=("c",)),
        SamplingParams(max_tokens=12),
        SamplingParams(max_tokens=40, grammar=NESTED, temperature=0.9, seed=5),
    ]
    found = [done for (done,) in one.generate_many([PROMPT] * 5, asked, gamma=4)]
    for params, done in zip(asked, found, strict=True):
        if done.error is None:
            assert done.token_ids == one.generate(PROMPT, params, gamma=0).token_ids
    assert [done.finish_reason for done in found][2:4] == ["error", "length"]
    assert "no token is left" in str(found[2].error)


def test_a_vocabulary_of_pieces_and_bytes_keeps_to_it(tmp_path: Path) -> None:
    """Llama 2's way: spaces are within pieces, and rare characters are bytes."""
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    target = TableEngine(1, vocab=tokenizer.size + 7, memory=3)
    one = generator(target, near(target, 2, 0.8), tokenizer, eos=[2])
    expression = "[a-e](hello|[a-e ]|é|😀){5,9}"
    for seed in range(8):
        params = SamplingParams(max_tokens=80, temperature=1.0, seed=seed, regex=expression)
        plain, found = (one.generate([5, 6], params, gamma=gamma) for gamma in (0, 4))
        assert found.token_ids == plain.token_ids
        assert re.fullmatch(expression, found.text)
