"""Processors are those of transformers and vLLM, and speculation cannot be seen in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams, TimestampRules
from specrt.sampling.processors import (
    PROCESSORS,
    AllowedTokens,
    BadWords,
    Custom,
    ForcedTokens,
    LogitBias,
    LogitsProcessors,
    MinTokens,
    NoRepeatNgram,
    OutputPenalties,
    Processor,
    RepetitionPenalty,
    SuppressTokens,
    Timestamps,
    build_processors,
)
from specrt.speculation.drafters import DRAFTERS
from specrt.text.tokenizer import Tokenizer
from support.toy import TableEngine, generator, near

SIZE = 12
Row = np.ndarray[Any, np.dtype[np.float32]]
texts = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=24)
paths = st.lists(st.integers(0, SIZE - 1), max_size=5)
words = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), min_size=1, max_size=3)


def shifted(tokens: list[int], row: Any) -> Any:
    """Depend on all that came before, and on how much."""
    return np.roll(row, sum(tokens) % 3 + len(tokens) % 2)


def every(bad: Sequence[Sequence[int]] = ((3,), (1, 2), (4, 4, 4))) -> dict[str, Processor]:
    """Return a processor of each entry, and some more."""
    return {
        "allowed_token_ids": AllowedTokens([1, 4, 4, 7]), "bad_words": BadWords(bad),
        "min_tokens": MinTokens(9, [2, 5]), "logit_bias": LogitBias({3: 2.5, 0: -1e4}),
        "logits_processors": Custom(shifted), "repetition_penalty": RepetitionPenalty(1.7),
        "presence_penalty": OutputPenalties(0.3, -0.7), "no_repeat_ngram_size": NoRepeatNgram(3),
        "bad_words_ids": BadWords(bad), "suppress_tokens": SuppressTokens([3, 8]),
        "begin_suppress_tokens": SuppressTokens([2, 3], 1),
        "forced_bos_token_id": ForcedTokens([4], 0, SIZE),
        "forced_eos_token_id": ForcedTokens([2, 5], 6, SIZE),
        "single tokens": NoRepeatNgram(1), "reward": RepetitionPenalty(0.6),
        "timestamp_rules": Timestamps(TimestampRules(8, 5, 1)),
    }  # fmt: skip


DENSE = ("allowed_token_ids", "logits_processors", "timestamp_rules")
"""Those that may change any score."""


def scores(seed: int = 0) -> Row:
    return (np.random.default_rng(seed).standard_normal(SIZE) * 3).astype(np.float32)


def read(processors: LogitsProcessors, row: Row, path: Sequence[int]) -> Row:
    """Read an edited row in place, and check that it was restored."""
    before = row.copy()
    found = processors.read(row, path, lambda edited: edited.copy())
    np.testing.assert_array_equal(row, before)
    return found


def edited(processor: Processor, text: Sequence[int], path: Sequence[int], cut: int = 1) -> Row:
    """Commit a prompt, then the rest token by token, as rounds do; edit a row after a path."""
    processors = LogitsProcessors([processor], SIZE)
    for end in range(min(cut, len(text)), len(text) + 1):
        processors.learn(text[:end])
    return read(processors, scores(), path)


# Each against its definition


def of_transformers(name: str, *arguments: Any) -> Callable[[Sequence[int]], Row]:
    torch = pytest.importorskip("torch", reason="needs the export extra")
    library = pytest.importorskip("transformers.generation.logits_process")
    processor = getattr(library, f"{name}LogitsProcessor")(*arguments)
    return lambda text: processor(torch.tensor([[*text]]), torch.tensor(scores()[None]))[0].numpy()


@given(texts, paths, words, st.integers(1, 12), st.integers(1, 6))
@settings(deadline=None, max_examples=30)
def test_processors_are_those_of_transformers_and_penalties_those_of_vllm(
    text: list[int], path: list[int], bad: list[list[int]], least: int, prompt: int
) -> None:
    prompt, penalty, size = min(prompt, len(text)), 0.3 + least / 6, 1 + least % 4

    def penalised(whole: Sequence[int]) -> Row:
        wanted = scores()
        for token, times in Counter(whole[prompt:]).items():  # the output alone
            wanted[token] -= 0.5 + 0.25 * times
        return wanted

    both: list[tuple[Processor, Any]] = [
        (RepetitionPenalty(penalty), of_transformers("RepetitionPenalty", penalty)),
        (NoRepeatNgram(size), of_transformers("NoRepeatNGram", size)),
        (BadWords(bad), of_transformers("NoBadWords", bad)),
        (MinTokens(least, [2, 5]), of_transformers("MinNewTokensLength", prompt, least, [2, 5])),
        (OutputPenalties(0.5, 0.25), penalised),
    ]
    for processor, expected in both:
        found = edited(processor, text, path, prompt)
        np.testing.assert_allclose(found, expected([*text, *path]), rtol=1e-5, atol=1e-6)


@given(texts, paths, st.integers(1, 24), st.booleans())
@settings(deadline=None, max_examples=30)
def test_what_generation_configs_force_and_suppress_is_as_in_transformers(
    text: list[int], path: list[int], most: int, forced: bool
) -> None:
    """A text begins with one token, as those of encoder-decoders do."""
    begin = 2 if forced else 1
    cases: dict[str, tuple[Any, Any]] = {
        "suppress_tokens": ([3, 8], of_transformers("SuppressTokens", [3, 8], "cpu")),
        "begin_suppress_tokens": (
            [2, 8],
            of_transformers("SuppressTokensAtBegin", [2, 8], begin, "cpu"),
        ),
        "forced_bos_token_id": (4, of_transformers("ForcedBOSToken", 4)),
        "forced_eos_token_id": ([2, 5], of_transformers("ForcedEOSToken", 1 + most, [2, 5])),
        "bad_words_ids": (
            [[5], [1, 2], [7]],
            of_transformers("NoBadWords", [[5], [1, 2], [7]], [5]),
        ),
    }
    for name, (value, expected) in cases.items():
        extra = {"forced_bos_token_id": 4} if forced and name.startswith("begin") else {}
        params = SamplingParams(**{name: value, **extra})
        built = build_processors(params, None, [5], SIZE, emitted=most)
        assert built is not None
        for end in range(1, len(text) + 1):
            built.learn(text[:end])
        found, wanted = read(built, scores(), path), expected([*text, *path])
        if extra and len([*text, *path]) == 1:
            wanted = of_transformers("ForcedBOSToken", 4)(text)
        np.testing.assert_array_equal(found, wanted)


@given(texts, paths, st.integers(1, 6), st.integers(3, 10), st.sampled_from([None, 0, 1, 5]))
@settings(deadline=None, max_examples=100)
def test_timestamps_are_those_of_transformers(
    text: list[int], path: list[int], prompt: int, begin: int, most: int | None
) -> None:
    prompt, end = min(prompt, len(text)), max(0, begin - 3)
    pytest.importorskip("transformers", reason="needs the export extra")
    settings = SimpleNamespace(
        no_timestamps_token_id=begin - 1, eos_token_id=end, bos_token_id=end,
        max_initial_timestamp_index=most,
    )  # fmt: skip
    wanted = of_transformers("WhisperTimeStamp", settings, prompt)([*text, *path])
    found = edited(Timestamps(TimestampRules(begin, end, most)), text, path, prompt)
    np.testing.assert_array_equal(found, wanted)


def test_bias_and_allowed_tokens_and_functions() -> None:
    wanted = scores()
    wanted[[3, 0]] += np.array([2.5, -100.0], np.float32)
    np.testing.assert_array_equal(edited(LogitBias({3: 2.5, 0: -100.0}), [1], []), wanted)
    row = scores()
    row[0] = np.inf
    allowed = LogitsProcessors([AllowedTokens([4, 4, 2])], SIZE)
    wanted = np.where(np.isin(np.arange(SIZE), (2, 4)), row, np.float32(-np.inf))
    np.testing.assert_array_equal(read(allowed, row, []), wanted)
    halve = Custom(lambda tokens, row: row / 2 if tokens == [3, 1, 4, 1, 5] else row)
    np.testing.assert_array_equal(edited(halve, [3, 1, 4], [1, 5]), scores() / 2)


# The contract


def test_every_entry_of_the_table_is_tested_here() -> None:
    assert set(PROCESSORS) <= set(every()) & {name for asked in ASKED.values() for name in asked}


@given(
    texts, paths, words, st.permutations(list(every())), st.integers(0, 8), st.booleans(),
    st.sampled_from([SIZE, SIZE, 5]),
)  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_a_drafted_token_counts_to_the_bit_as_a_committed_one(
    text: list[int], path: list[int], bad: list[list[int]], order: list[str], count: int,
    sparse: bool, known: int,
) -> None:  # fmt: skip
    """For its row, and for no other; in place, and in a copy, of rows that are not writable, too.

    A model may know fewer tokens than the tokenizer.
    """
    names = [n for n in order if not sparse or n not in DENSE][:count]
    ahead, after = (LogitsProcessors([every(bad)[n] for n in names], SIZE) for _ in range(2))
    after.learn(text[:1])  # the prompt
    after.learn([*text, *path])
    for end in range(1, len(text) + 1):
        ahead.learn(text[:end])
        row = scores(end)[:known]
        row.setflags(write=end % 4 > 0)
        before, expected = read(ahead, row, []), ahead.edit(row, path).copy()
        assert len(expected) == known
        np.testing.assert_array_equal(read(ahead, row, path), expected)
        np.testing.assert_array_equal(read(ahead, row, []), before)
        assert count or (expected == row).all()
    np.testing.assert_array_equal(expected, read(after, row, []))


def test_a_row_is_restored_when_reading_it_fails() -> None:
    row = scores()
    with pytest.raises(ZeroDivisionError):
        LogitsProcessors([LogitBias({4: 3.0})], SIZE).read(row, [], lambda edited: 1 / 0)
    np.testing.assert_array_equal(row, scores())


# Speculation


VOCABULARY, PROMPT = 256, [5, 9, 9, 4, 7, 5, 9]
ASKED: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    "no repeats": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {3: 4.0, "8": -3.0}},
    "allowed": {"allowed_token_ids": list(range(40, 90))},
    "bad words": {"bad_words": ["a", "to"]},
    "min tokens": {"min_tokens": 17, "stop_token_ids": list(range(0, 200, 2))},
    "function": {"logits_processors": [shifted]},
    "forced": {"forced_bos_token_id": 65, "forced_eos_token_id": [66, 67]},
    "suppressed": {
        "suppress_tokens": list(range(0, 250, 3)), "begin_suppress_tokens": list(range(120)),
        "bad_words_ids": [[7], [100, 101], [98]], "forced_bos_token_id": 99,
    },
    "timestamps": {"timestamp_rules": TimestampRules(90, 60, 20)},
    "all": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.4, "no_repeat_ngram_size": 3,
        "logit_bias": {7: 2.0}, "min_tokens": 5, "stop_token_ids": [65, 66],
        "logits_processors": [shifted], "allowed_token_ids": list(range(20, 200)),
    },
}  # fmt: skip


Pair = Callable[[int], Generator]


@pytest.fixture(scope="module")
def pair(tokenizer: Tokenizer) -> Pair:
    """Makes a generator whose draft is like its target, and sometimes wrong."""

    def made(seed: int) -> Generator:
        target = TableEngine(seed, vocab=VOCABULARY, memory=3)
        return generator(target, near(target, seed + 1, 0.8), tokenizer)

    return made


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
@given(seed=st.integers(0, 9), gamma=st.integers(1, 6), temperature=st.sampled_from([0.0, 0.9]))
@settings(deadline=None, max_examples=3)
def test_speculation_changes_no_token(
    pair: Pair, asked: dict[str, Any], temperature: float, seed: int,
    gamma: int,
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, **asked)
    one = pair(seed)
    plain = one.generate(PROMPT, params, gamma=0)
    for drafter in DRAFTERS:
        found = one.generate(PROMPT, params, gamma=gamma, drafter=drafter)
        assert found.token_ids == plain.token_ids
        assert found.finish_reason == plain.finish_reason


# Refusals


@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"allowed_token_ids": [1, 900]}, "allowed_token_ids holds 900; expected ids of the voc"),
        ({"logits_processors": [lambda t, r: r[:-1]]}, r"returned shape \[255\]; expected \[256\]"),
        ({"logits_processors": [lambda t, r: r * np.inf]}, "returned NaN or infinity"),
        ({"logits_processors": [lambda t, r: 1 / 0]}, "failed: ZeroDivisionError"),
        ({"allowed_token_ids": [5], "no_repeat_ngram_size": 2}, "no token is left that the reque"),
    ],
)
def test_a_request_that_cannot_go_on_is_refused_and_ends_no_other(
    pair: Pair, asked: dict[str, Any], message: str, gamma: int
) -> None:
    one = pair(0)
    with pytest.raises(RequestError, match=message):
        one.generate([3], SamplingParams(**asked), gamma=gamma)
    assert one.generate([3], SamplingParams(max_tokens=4), gamma=gamma).token_ids


def test_a_function_cannot_use_the_generator_that_runs_it(pair: Pair) -> None:
    one = pair(0)
    calls: list[Callable[[], Any]] = [lambda: one.generate([3]), one.close, lambda: one.stream([3])]
    for call in calls:
        inside = (lambda tokens, row, call=call: (call(), row)[1],)
        with pytest.raises(RequestError, match="cannot use the generator that runs it"):
            one.generate([3], SamplingParams(max_tokens=3, logits_processors=inside))
    assert one.generate([3], SamplingParams(max_tokens=3)).token_ids


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 0.0}, {"allowed_token_ids": []}, {"bad_words": [3]},
        {"logits_processors": [3]}, {"logit_bias": [1]},
        {"bad_words_ids": 3}, {"bad_words_ids": [3]},
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(asked))):
        SamplingParams(**asked)
