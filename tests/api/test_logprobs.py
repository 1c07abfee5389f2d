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

from specrt.completion import Completion
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.distribution import LEAST, Entry, Logprob, ranked
from specrt.text.tokenizer import Tokenizer
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
