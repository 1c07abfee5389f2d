"""Whatever a request asks of rows, speculation emits what plain decoding would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.toy import TableEngine, byte_level, generator, near
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text import Tokenizer

VOCABULARY, PROMPT = 256, [5, 9, 9, 4, 7, 5, 9]


def shifted(tokens: list[int], row: Any) -> Any:
    """Depend on all that came before, and on how much."""
    return np.roll(row, sum(tokens) % 3 + len(tokens) % 2)


ASKED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "no repeats": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {3: 4.0, "8": -3.0}},
    "allowed": {"allowed_token_ids": list(range(40, 90))},
    "bad words": {"bad_words": ["a", "to"]},
    "min tokens": {"min_tokens": 17, "stop_token_ids": list(range(0, 200, 2))},
    "function": {"logits_processors": [shifted]},
    "all": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.4, "no_repeat_ngram_size": 3,
        "logit_bias": {7: 2.0}, "min_tokens": 5, "stop_token_ids": [65, 66],
        "logits_processors": [shifted], "allowed_token_ids": list(range(20, 200)),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def pair(tokenizer: Tokenizer) -> Callable[[int], Generator]:
    """Makes a generator whose draft is like its target, and sometimes wrong."""

    def made(seed: int) -> Generator:
        target = TableEngine(seed, vocab=VOCABULARY, memory=3)
        return generator(target, near(target, seed + 1, 0.8), tokenizer)

    return made


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@given(seed=st.integers(0, 9), gamma=st.integers(1, 6))
@settings(
    deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_speculation_changes_no_token(
    pair: Callable[[int], Generator], asked: dict[str, Any], temperature: float, seed: int,
    gamma: int,
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, **asked)
    plain = pair(seed).generate(PROMPT, params, gamma=0)
    for drafter in ("model", "ngram", "cascade"):
        found = pair(seed).generate(PROMPT, params, gamma=gamma, drafter=drafter)
        assert found.token_ids == plain.token_ids
        assert found.finish_reason == plain.finish_reason


def test_a_draft_that_follows_the_rules_is_accepted(pair: Callable[[int], Generator]) -> None:
    """Masked as the target is, a draft like it stays as good as it was."""
    rates = []
    for asked in ({}, {"allowed_token_ids": list(range(10, 60))}):
        params = SamplingParams(max_tokens=120, temperature=0.8, seed=3, **asked)
        done = pair(2).generate(PROMPT, params, gamma=4, drafter="model")
        rates.append(done.speculation.acceptance_rate)
    assert rates[1] > rates[0] - 0.1


@pytest.mark.parametrize("gamma", [0, 3])
def test_what_was_asked_for_holds(pair: Callable[[int], Generator], gamma: int) -> None:
    def text(**asked: Any) -> list[int]:
        params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, **asked)
        return pair(4).generate(PROMPT, params, gamma=gamma).token_ids

    assert set(text(allowed_token_ids=[7, 8, 9])) <= {7, 8, 9}
    assert 50 in text(logit_bias={50: 100.0})
    whole = [*PROMPT, *text(no_repeat_ngram_size=2, allowed_token_ids=list(range(90)))]
    assert max(Counter(pairwise(whole[len(PROMPT) - 1 :])).values()) == 1
    ended = text(min_tokens=21, stop_token_ids=list(range(0, VOCABULARY, 2)))
    assert all(token % 2 for token in ended[:21])
    assert len(ended) > 21
    assert ended[-1] % 2 == 0


def test_nothing_left_is_said_and_ends_no_other(pair: Callable[[int], Generator]) -> None:
    one = pair(0)
    params = SamplingParams(max_tokens=30, allowed_token_ids=[5], no_repeat_ngram_size=2)
    with pytest.raises(RequestError, match="no token is left that the request allows"):
        one.generate([3], params, gamma=3)
    assert one.generate([3], SamplingParams(max_tokens=4), gamma=3).token_ids


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"allowed_token_ids": [1, 900]}, "allowed_token_ids holds 900; expected ids of the voc"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias holds -1"),
        ({"min_tokens": 3, "stop_token_ids": [999]}, "stop_token_ids holds 999"),
        ({"logits_processors": [lambda t, r: r[:3]]}, "returned shape"),
        ({"logits_processors": [lambda t, r: r * np.inf]}, "returned NaN or infinity"),
    ],
)
def test_bad_requests_are_refused(
    pair: Callable[[int], Generator], asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        pair(0).generate(PROMPT, SamplingParams(**asked))


def test_a_function_cannot_use_the_generator_that_runs_it(
    pair: Callable[[int], Generator],
) -> None:
    one = pair(0)
    calls: list[Callable[[], Any]] = [lambda: one.generate([3]), one.close, lambda: one.stream([3])]
    for call in calls:

        def inside(tokens: list[int], row: Any, call: Callable[[], Any] = call) -> Any:
            call()
            return row

        with pytest.raises(RequestError, match="cannot use the generator that runs it"):
            one.generate([3], SamplingParams(max_tokens=3, logits_processors=[inside]))
    assert one.generate([3], SamplingParams(max_tokens=3)).token_ids


def test_what_the_model_cannot_say_needs_no_ban(tokenizer: Tokenizer) -> None:
    small = generator(TableEngine(0, vocab=29), None, tokenizer, eos=[300])
    params = SamplingParams(max_tokens=8, min_tokens=3, bad_words=["z"])
    assert len(small.generate([5], params, gamma=0).token_ids) == 8


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 0.0}, {"repetition_penalty": 200}, {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")}, {"typical_p": 0.0}, {"no_repeat_ngram_size": -1},
        {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8}, {"allowed_token_ids": []},
        {"bad_words": [""]}, {"bad_words": [3]}, {"logits_processors": [3]}, {"logit_bias": [1]},
        {"logit_bias": {"x": 1.0}}, {"logit_bias": {3: "much"}},
        {"logit_bias": {3: 1e39}}, {"repetition_penalty": 1e-50},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**asked)


def test_params_can_be_a_key_and_one_word_is_a_list_of_it() -> None:
    assert len({SamplingParams(), SamplingParams(logit_bias={3: 1.0}), SamplingParams()}) == 2
    assert SamplingParams(bad_words="to").bad_words == ("to",)  # type: ignore[arg-type]
    assert len(SamplingParams(logits_processors=shifted).logits_processors) == 1  # type: ignore[arg-type]
