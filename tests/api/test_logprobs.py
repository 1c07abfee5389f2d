"""Log-probabilities are the target's own, one entry for each token, however it was come by."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax

from specrt.completion import Completion
from specrt.engine.protocol import Engine
from specrt.errors import EngineError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.distribution import LEAST, Entry, Logprob, joined, ranked
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from support.rows import packed, padded
from support.toy import TableEngine, generator, near

VOCABULARY = 263


def check(entry: Entry | None, row: NDArray[np.float32], token: int, k: int) -> None:
    """Hold an entry to a row of scores, by sorting all of it: of equal ones the lower id first."""
    assert entry is not None
    order: list[int] = np.argsort(-row, kind="stable").tolist()
    logprobs = log_softmax(row.astype(np.float64))
    assert list(entry) == list(dict.fromkeys([token, *order[:k]]))
    for one, told in entry.items():
        assert told.rank == order.index(one) + 1
        assert told.logprob == pytest.approx(float(logprobs[one]), abs=1e-12, rel=1e-12)


SCORES = st.one_of(
    st.floats(-50, 50, width=32),
    st.sampled_from([0.0, 1.0, 1.0, -math.inf]),
    st.floats(-(2.0**100), 2.0**100, width=32),
)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), vocabulary=st.integers(1, 60), rows=st.integers(1, 5), k=st.integers(0, 20))
def test_rows_are_ranked_as_by_sorting_all_of_them(
    data: st.DataObject, vocabulary: int, rows: int, k: int
) -> None:
    row = st.lists(SCORES, min_size=vocabulary, max_size=vocabulary)
    scores = row.filter(lambda r: max(r) > -math.inf)
    logits = np.array([data.draw(scores) for _ in range(rows)], np.float32)
    tokens = [data.draw(st.integers(0, vocabulary - 1)) for _ in range(rows)]
    kept = logits.copy()
    found = ranked(logits, tokens, k).entries(rows, str)
    np.testing.assert_array_equal(logits, kept)
    for entry, line, token in zip(found, logits, tokens, strict=True):
        check(entry, line, token, k)
        assert all(told.decoded_token == str(one) for one, told in entry.items())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_scores_that_are_no_numbers_have_no_logarithms(wrong: float) -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[1, 2] = wrong
    with pytest.raises(EngineError, match="not numbers"):
        ranked(logits, [0, 0, 0], 2)
    assert joined([]).entries(0, str) == []


def pair(vocabulary: int = VOCABULARY, **options: Any) -> tuple[TableEngine, TableEngine]:
    target = TableEngine(4, vocab=vocabulary, **options)
    return target, near(target, 5, 0.7)


def made(tokenizer: Tokenizer, **options: Any) -> Generator:
    target, draft = pair(tokenizer.size, **options)
    return generator(target, draft, tokenizer)


def check_all(target: Any, prompt: Sequence[int], done: Completion, params: SamplingParams) -> None:
    """Hold a completion to the rows of the table behind each of its tokens."""
    text = [*prompt, *done.token_ids]
    for entries, k, first, count in (
        (done.logprobs, params.logprobs, len(prompt), len(done.token_ids)),
        (done.prompt_logprobs, params.prompt_logprobs, 0, len(prompt)),
    ):
        assert (entries is None) is (k is None)
        if entries is None or k is None:
            continue
        assert len(entries) == count
        for at, entry in enumerate(entries, first):
            if at:
                check(entry, target.row(np.array(text[:at])), text[at], k)
            else:
                assert entry is None


def upside_down(_: list[int], logits: Any) -> Any:
    return -logits


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {7: 3.0}},
    {"allowed_token_ids": (65, 66, 67, 68, 69)},
    {"logits_processors": upside_down, "no_repeat_ngram_size": 2},
]
MANNERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.9, "verifier": "rejection"},
]


@pytest.mark.parametrize("edits", EDITS, ids=lambda e: "-".join(e) or "none")
@pytest.mark.parametrize("manner", MANNERS, ids=str)
@pytest.mark.parametrize("drafter", ["model", "ngram", "cascade"])
def test_they_are_those_of_plain_decoding(
    tokenizer: Tokenizer, manner: dict[str, Any], edits: dict[str, Any], drafter: str
) -> None:
    one = made(tokenizer, memory=1)
    params = SamplingParams(max_tokens=50, seed=3, logprobs=4, **manner, **edits)
    prompt = [*b"to be or not to be"]
    plain = one.generate(prompt, params, gamma=0)
    accepted = 0
    for gamma in (0, 1, 3, 8):
        done = one.generate(prompt, params, gamma=gamma, drafter=drafter)
        check_all(one.models.target, prompt, done, params)
        accepted += done.speculation.accepted
        if params.verifier == "match":
            assert done.token_ids == plain.token_ids
            assert done.logprobs == plain.logprobs  # to the bit
        silent = SamplingParams(max_tokens=50, seed=3, **manner, **edits)
        without = one.generate(prompt, silent, gamma=gamma, drafter=drafter)
        assert (without.token_ids, without.logprobs) == (done.token_ids, None)
    assert accepted or drafter == "ngram"


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 250),
    width=st.sampled_from([1, 7, 16, 64, 100]),
    k=st.integers(0, 20),
    gamma=st.sampled_from([0, 3]),
    repeat=st.booleans(),
)
def test_a_prompt_is_scored_token_by_token(
    tokenizer: Tokenizer, length: int, width: int, k: int, gamma: int, repeat: bool
) -> None:
    one = made(tokenizer, max_width=max(width, 9) if gamma else width)
    prompt = [(17 * i * i + i) % 256 for i in range(length)]
    params = SamplingParams(max_tokens=5, prompt_logprobs=k)
    if repeat:  # the buffers hold it already
        one.generate(prompt, SamplingParams(max_tokens=1), gamma=0)
    done = one.generate(prompt, params, gamma=gamma)
    check_all(one.models.target, prompt, done, params)
    assert done.cached_tokens == 0
    assert (
        done.token_ids == one.generate(prompt, SamplingParams(max_tokens=5), gamma=gamma).token_ids
    )


def test_few_shapes_of_passes_score_prompts(tokenizer: Tokenizer) -> None:
    """Engines keep the memory of each shape, and that of many rows is large."""
    one = made(tokenizer, max_width=128)
    target = one.models.target
    assert isinstance(target, TableEngine)
    for length in range(1, 200):
        target.calls.clear()
        one.generate([1] * length, SamplingParams(max_tokens=1, prompt_logprobs=0), gamma=0)
        assert {call.rows for call in target.calls} <= {1, 2, 4, 8, 16, 32, 64}
        assert len(target.calls) <= length / 64 + 3
        assert all(call.rows in (1, call.width) for call in target.calls)


@pytest.mark.parametrize("gamma", [0, 2, 8])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
@pytest.mark.parametrize("stop", [(), ("e",), ("t", "ab"), ("\x00", "q", "z")])
def test_there_is_one_entry_for_each_token_that_is_delivered(
    tokenizer: Tokenizer, gamma: int, verifier: str, stop: tuple[str, ...]
) -> None:
    target, draft = pair(tokenizer.size)
    one = generator(target, draft, tokenizer, eos=range(0, 256, 9) if not stop else ())
    for seed in range(8):
        params = SamplingParams(
            max_tokens=60, temperature=1.0, seed=seed, verifier=verifier, stop=stop, logprobs=2,
            prompt_logprobs=0,
        )  # fmt: skip
        stream = one.stream([1, 2, 3 + seed], params, gamma=gamma)
        chunks = list(stream)
        done = stream.completion
        assert all(len(c.token_ids) == len(c.logprobs or []) for c in chunks)
        assert [e for c in chunks for e in c.logprobs or []] == done.logprobs
        check_all(target, [1, 2, 3 + seed], done, params)
        for entry in done.logprobs or []:
            for token, said in entry.items():
                assert said.decoded_token == tokenizer.decode([token])


def test_what_was_held_back_comes_with_no_tokens(tokenizer: Tokenizer) -> None:
    one = made(tokenizer)
    target = one.models.target
    assert isinstance(target, TableEngine)
    target.script = {3: ord("a"), 4: ord("b")}
    params = SamplingParams(max_tokens=2, stop=("abc",), logprobs=1)
    *_, last = one.stream([1, 2, 3], params)
    assert (last.text, last.token_ids, last.logprobs) == ("ab", [], [])
    *_, last = one.stream([1, 2, 3], SamplingParams(max_tokens=2, stop=("abc",)))
    assert (last.text, last.token_ids, last.logprobs) == ("ab", [], None)


class Secretive(TableEngine):
    """An engine whose scores may not be read."""

    def forward(self, *args: Any) -> Any:
        output = super().forward(*args)

        class Unreadable:
            argmax, confidence, candidates = output.argmax, output.confidence, None

            @property
            def logits(self) -> NDArray[np.float32]:
                raise AssertionError("the scores were read")

        return Unreadable()


def test_nobody_reads_scores_who_is_not_asked_for_them(tokenizer: Tokenizer) -> None:
    target = Secretive(4, vocab=tokenizer.size)
    one = generator(target, near(target, 5, 0.8), tokenizer)
    assert len(one.generate([1, 2], SamplingParams(max_tokens=30)).token_ids) == 30
    for params in (SamplingParams(logprobs=0), SamplingParams(prompt_logprobs=0)):
        with pytest.raises(AssertionError, match="were read"):
            one.generate([1, 2], params)


ASKED = st.tuples(
    st.lists(st.integers(0, 255), min_size=1, max_size=90),
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 40),
            "temperature": st.sampled_from([0.0, 0.9]),
            "seed": st.integers(0, 3),
            "stop": st.sampled_from([(), ("e",), ("a", "q")]),
            "presence_penalty": st.sampled_from([0.0, 1.5]),
            "logprobs": st.sampled_from([None, 0, 3]),
            "prompt_logprobs": st.sampled_from([None, None, 0, 3]),
            "n": st.integers(1, 2),
        }
    ),
)


@pytest.mark.parametrize("build", [padded, packed])
@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(2, 4), many=st.lists(ASKED, min_size=1, max_size=7), gamma=st.integers(0, 8)
)
def test_rows_tell_theirs_and_no_others(
    build: Callable[[TableEngine, int], Engine], tokenizer: Tokenizer, batch: int, many: list[Any],
    gamma: int,
) -> None:  # fmt: skip
    target, draft = pair(tokenizer.size, max_length=200)
    models = Models(build(target, batch), build(draft, batch), tuple(range(9)), 4)
    params = [SamplingParams(**options) for _, options in many]
    prompts = [prompt for prompt, _ in many]
    found = Generator(models, tokenizer).generate_many(prompts, params, gamma=gamma)
    for prompt, own, completions in zip(prompts, params, found, strict=True):
        assert len(completions) == own.n
        for done in completions:
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
    (first, second) = said["prompt_logprobs"]
    assert first is None
    assert second["200"]["logprob"] == LEAST
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[1] == {200: Logprob(-math.inf, 201, tokenizer.decode([200]))}
