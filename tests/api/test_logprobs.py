"""Log-probabilities are the target's own, one entry for each token, however it was come by."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy.special import log_softmax

from scheduler.support import Build, alone, rows, target_of
from specrt.completion import Completion
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.distribution import LEAST, Entry, Logprob, ranked
from specrt.text.tokenizer import Tokenizer
from support.rows import packed, padded
from support.toy import TableEngine, generator, near


def check(entry: Entry | None, row: NDArray[np.float32], token: int, k: int) -> None:
    """Hold an entry to a row of scores, by sorting all of it: of equal ones the lower id first."""
    assert entry is not None
    order: list[int] = np.argsort(-row, kind="stable").tolist()
    logprobs = log_softmax(row.astype(np.float64))
    assert list(entry) == list(dict.fromkeys([token, *order[:k]]))
    for one, told in entry.items():
        assert told.rank == order.index(one) + 1
        assert told.logprob == pytest.approx(float(logprobs[one]), abs=1e-12, rel=1e-12)


SCORES = st.floats(-50, 50, width=32) | st.sampled_from([0.0, 1.0, -math.inf, 2.0**100, -(2.0**99)])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.tuples(st.integers(1, 4), st.integers(1, 30)), k=st.integers(0, 20))
def test_rows_are_ranked_as_by_sorting(data: st.DataObject, shape: tuple[int, int], k: int) -> None:
    lines = data.draw(arrays(np.float32, shape, elements=SCORES))
    lines[lines.max(-1) == -math.inf] = 0
    tokens = data.draw(st.tuples(*[st.integers(0, shape[1] - 1) for _ in lines]))
    kept = lines.copy()
    found = ranked(lines, tokens, k).entries(len(lines), str)
    np.testing.assert_array_equal(lines, kept)
    for entry, line, one in zip(found, lines, tokens, strict=True):
        check(entry, line, one, k)
        assert all(told.decoded_token == str(one) for one, told in entry.items())
    lines[-1, 0] = math.nan
    with pytest.raises(EngineError, match="not numbers"):
        ranked(lines, tokens, k)


def made(tokenizer: Tokenizer, **options: Any) -> Generator:
    target = TableEngine(4, vocab=tokenizer.size, **options)
    return generator(target, near(target, 5, 0.7), tokenizer)


def check_all(target: Any, prompt: Sequence[int], done: Completion, params: SamplingParams) -> None:
    """Hold a completion to the rows of the table after each of its tokens."""
    text = [*prompt, *done.token_ids]
    for entries, k, first, count in (
        (done.logprobs, params.logprobs, len(prompt), len(done.token_ids)),
        (done.prompt_logprobs, params.prompt_logprobs, 0, len(prompt)),
    ):
        assert (entries is None) is (k is None)
        assert entries is None or len(entries) == count
        for at, entry in enumerate(entries or [], first):
            assert (entry is None) is (at == 0)
            if at and k is not None:
                check(entry, target.row(np.array(text[:at])), text[at], k)


BIASED = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {7: 3.0}}
SAMPLED = {"temperature": 0.9, "top_p": 0.9}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("model", BIASED),
    ("model", {"allowed_token_ids": (65, 66, 67, 68, 69), **SAMPLED}),
    ("cascade", {"logits_processors": lambda _, row: -row, "no_repeat_ngram_size": 2, **SAMPLED}),
    ("model", {**BIASED, "stop": ("\x00", "q"), "temperature": 0.9, "verifier": "rejection"}),
    ("model", {"stop_token_ids": range(0, 256, 9), "temperature": 1.0}),
]


@pytest.mark.parametrize(("drafter", "options"), CASES, ids=range(len(CASES)))
def test_as_in_plain_decoding(tokenizer: Tokenizer, drafter: str, options: dict[str, Any]) -> None:
    one = made(tokenizer, memory=1)
    prompt, accepted = [*b"to be or not to be"], 0
    for gamma, seed in ((1, 3), (8, 3), (8, 5)):
        silent = SamplingParams(max_tokens=50, seed=seed, **options)
        params = replace(silent, logprobs=4)
        stream = one.stream(prompt, params, gamma=gamma, drafter=drafter)
        chunks = list(stream)
        done = stream.completion
        assert all(len(c.token_ids) == len(c.logprobs or []) for c in chunks)
        assert [e for c in chunks for e in c.logprobs or []] == done.logprobs
        check_all(one.models.target, prompt, done, params)
        for token, said in (item for e in done.logprobs or [] for item in e.items()):
            assert said.decoded_token == tokenizer.decode([token])
        if params.verifier == "match":
            plain = one.generate(prompt, params, gamma=0)
            assert done.token_ids == plain.token_ids
            assert done.logprobs == plain.logprobs  # to the bit
        without = one.generate(prompt, silent, gamma=gamma, drafter=drafter)
        assert (without.token_ids, without.logprobs) == (done.token_ids, None)
        accepted += done.speculation.accepted
    assert accepted


@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 250), width=st.sampled_from([1, 7, 16, 64, 100]), k=st.integers(0, 20),
    gamma=st.sampled_from([0, 3]), repeat=st.booleans(),
)  # fmt: skip
def test_a_prompt_is_scored_token_by_token(
    tokenizer: Tokenizer, length: int, width: int, k: int, gamma: int, repeat: bool
) -> None:
    one = made(tokenizer, max_width=max(width, 9) if gamma else width)
    prompt = [(17 * i * i + i) % 256 for i in range(length)]
    silent = SamplingParams(max_tokens=5)
    params = replace(silent, prompt_logprobs=k)
    if repeat:  # the buffers hold it already
        one.generate(prompt, SamplingParams(max_tokens=1), gamma=0)
    done = one.generate(prompt, params, gamma=gamma)
    check_all(one.models.target, prompt, done, params)
    assert done.cached_tokens == 0
    assert done.token_ids == one.generate(prompt, silent, gamma=gamma).token_ids


OPTIONS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 40), "temperature": st.sampled_from([0.0, 0.9]),
        "stop": st.sampled_from([(), ("a", "q")]), "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, None, 0, 3]), "n": st.integers(1, 2),
    }
)  # fmt: skip
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=60)


@pytest.mark.parametrize("build", [padded, packed])
@settings(max_examples=5, deadline=None)
@given(batch=st.integers(2, 4), many=st.lists(st.tuples(PROMPTS, OPTIONS), min_size=2, max_size=7))
def test_rows_tell_theirs(build: Build, tokenizer: Tokenizer, batch: int, many: list[Any]) -> None:
    params = [SamplingParams(**options) for _, options in many]
    prompts = [prompt for prompt, _ in many]
    found = rows(build, batch, tokenizer).generate_many(prompts, params, gamma=3)
    target = target_of(alone(tokenizer))
    for prompt, own, completions in zip(prompts, params, found, strict=True):
        for _, done in zip(range(own.n), completions, strict=True):
            check_all(target, prompt, done, own)


def test_json_says_what_was_asked_for_and_nothing_else(tokenizer: Tokenizer) -> None:
    def corrupt(_: int, logits: NDArray[np.float32]) -> None:
        logits[..., 100:] = -math.inf

    one = made(tokenizer, corrupt=corrupt)
    silent = one.generate([1, 2], SamplingParams(max_tokens=3)).to_json()
    assert not {"logprobs", "prompt_logprobs"} & set(silent)
    params = SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=0, logit_bias={})
    done = one.generate([1, 200], params)
    said = json.loads(json.dumps(done.to_json(), allow_nan=False))
    assert [list(map(int, entry)) for entry in said["logprobs"]] == [[t] for t in done.token_ids]
    assert said["prompt_logprobs"][1]["200"]["logprob"] == LEAST
    lost = {200: Logprob(-math.inf, 201, tokenizer.decode([200]))}
    assert done.prompt_logprobs == [None, lost]
