"""Each processor is that of transformers by the same name, or what vLLM documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from specrt.errors import RequestError
from specrt.params import SamplingParams
from specrt.sampling.distribution import process
from specrt.sampling.processors import (
    AllowedTokens,
    BadWords,
    Custom,
    LogitBias,
    LogitsProcessors,
    MinTokens,
    NoRepeatNgram,
    OutputPenalties,
    Processor,
    RepetitionPenalty,
    SparseProcessor,
)

VOCABULARY = 12
Row = np.ndarray[Any, np.dtype[np.float32]]
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24)
paths = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)


def scores(seed: int = 0) -> Row:
    return (np.random.default_rng(seed).standard_normal(VOCABULARY) * 3).astype(np.float32)


def edited(processor: Processor, text: Sequence[int], path: Sequence[int], cut: int = 1) -> Row:
    """Commit a prompt, then the rest token by token, as rounds do; edit a row behind a path."""
    rules = LogitsProcessors([processor], VOCABULARY)
    for end in range(min(cut, len(text)), len(text) + 1):
        rules.learn(text[:end])
    row = scores()
    kept = row.copy()
    found = rules.edit(row, path)
    np.testing.assert_array_equal(row, kept)
    return found


def read(rules: LogitsProcessors, row: Row, path: Sequence[int]) -> Row:
    """Read an edited row in place, and hold that it was put right again."""
    kept = row.copy()
    found = rules.read(row, path, lambda edited: edited.copy())
    np.testing.assert_array_equal(row, kept)
    return found


def of_transformers(processor: Any, text: Sequence[int]) -> Row:
    torch = pytest.importorskip("torch", reason="needs the export extra")
    made = processor(torch.tensor([list(text)]), torch.from_numpy(scores()[None].copy()))
    return np.asarray(made[0], np.float32)


@given(texts, paths, st.sampled_from([0.5, 1.3, 2.0]))
@settings(deadline=None, max_examples=40)
def test_repetition_penalty(text: list[int], path: list[int], penalty: float) -> None:
    library = pytest.importorskip("transformers.generation.logits_process")
    wanted = of_transformers(library.RepetitionPenaltyLogitsProcessor(penalty), [*text, *path])
    np.testing.assert_allclose(edited(RepetitionPenalty(penalty), text, path), wanted, rtol=1e-6)


@given(texts, paths, st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_no_repeat_ngram(text: list[int], path: list[int], size: int) -> None:
    library = pytest.importorskip("transformers.generation.logits_process")
    wanted = of_transformers(library.NoRepeatNGramLogitsProcessor(size), [*text, *path])
    np.testing.assert_array_equal(edited(NoRepeatNgram(size), text, path), wanted)


@given(texts, paths, st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), min_size=1))
@settings(deadline=None, max_examples=60)
def test_bad_words(text: list[int], path: list[int], words: list[list[int]]) -> None:
    library = pytest.importorskip("transformers.generation.logits_process")
    whole = [*text, *path]
    wanted = of_transformers(library.NoBadWordsLogitsProcessor(words), whole)
    np.testing.assert_array_equal(edited(BadWords(words), text, path), wanted)


@given(texts, paths, st.integers(1, 12), st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_min_tokens(text: list[int], path: list[int], least: int, prompt: int) -> None:
    library = pytest.importorskip("transformers.generation.logits_process")
    prompt = min(prompt, len(text))
    processor = library.MinNewTokensLengthLogitsProcessor(prompt, least, [2, 5])
    wanted = of_transformers(processor, [*text, *path])
    np.testing.assert_array_equal(edited(MinTokens(least, [2, 5]), text, path, prompt), wanted)


@given(texts, paths, st.integers(1, 6))
@settings(deadline=None, max_examples=40)
def test_output_penalties_count_the_output_alone(
    text: list[int], path: list[int], prompt: int
) -> None:
    prompt = min(prompt, len(text))
    counts = Counter([*text[prompt:], *path])
    wanted = scores()
    for token, times in counts.items():
        wanted[token] -= 0.5 + 0.25 * times
    found = edited(OutputPenalties(0.5, 0.25), text, path, prompt)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_bias_and_allowed_tokens() -> None:
    found = edited(LogitBias({3: 2.5, 0: -100.0}), [1], [])
    wanted = scores()
    wanted[[3, 0]] += np.array([2.5, -100.0], np.float32)
    np.testing.assert_array_equal(found, wanted)
    found = edited(AllowedTokens([4, 4, 2]), [1], [])
    assert np.flatnonzero(found > -np.inf).tolist() == [2, 4]
    np.testing.assert_array_equal(found[[2, 4]], scores()[[2, 4]])


def test_a_function_sees_prompt_output_and_path() -> None:
    seen: list[list[int]] = []

    def halve(tokens: list[int], row: Row) -> Row:
        seen.append(tokens)
        return row / 2

    np.testing.assert_array_equal(edited(Custom(halve), [3, 1, 4], [1, 5]), scores() / 2)
    assert seen == [[3, 1, 4, 1, 5]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda tokens, row: row[:-1], r"returned shape \[11\]; expected \[12\]"),
        (lambda tokens, row: row * np.nan, "returned NaN or infinity"),
        (lambda tokens, row: 1 / 0, "failed: ZeroDivisionError"),
        (lambda tokens, row: "no", "failed|could not"),
    ],
)
def test_a_function_that_returns_no_scores_is_refused(function: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        edited(Custom(function), [1], [])


def test_a_path_is_history_of_its_row_alone() -> None:
    for processor in (RepetitionPenalty(2.0), OutputPenalties(1, 1), NoRepeatNgram(2)):
        rules = LogitsProcessors([processor], VOCABULARY)
        rules.learn([1, 2])
        rules.learn([1, 2, 3])
        before = rules.edit(scores(), [])
        rules.edit(scores(), [1, 2, 3, 4])
        np.testing.assert_array_equal(rules.edit(scores(), []), before)


def every(words: Sequence[Sequence[int]]) -> list[Processor]:
    """Return one of each processor that touches few scores."""
    return [
        BadWords(words), MinTokens(9, [2, 5]), LogitBias({3: 2.5, 0: -1e4}), RepetitionPenalty(1.7),
        OutputPenalties(0.3, -0.7), NoRepeatNgram(3), NoRepeatNgram(1), RepetitionPenalty(0.6),
    ]  # fmt: skip


words = st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), min_size=1, max_size=3)


@given(texts, paths, words, st.integers(0, 99), st.permutations(range(8)), st.integers(1, 8))
@settings(deadline=None, max_examples=150)
def test_a_row_edited_in_place_is_the_edited_copy_and_is_put_right_again(
    text: list[int], path: list[int], bad: list[list[int]], seed: int, order: list[int], count: int
) -> None:
    made = every(bad)
    rules = LogitsProcessors([made[i] for i in order[:count]], VOCABULARY)
    for end in range(1, len(text) + 1):
        rules.learn(text[:end])
        row = scores(seed + end)
        expected = rules.edit(row, path).copy()
        np.testing.assert_array_equal(read(rules, row, path), expected)


@given(texts, paths, words, st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_a_drafted_token_counts_to_the_bit_as_a_committed_one(
    text: list[int], path: list[int], bad: list[list[int]], seed: int
) -> None:
    for drafted, plain in zip(every(bad), every(bad), strict=True):
        ahead, after = (
            LogitsProcessors([drafted], VOCABULARY),
            LogitsProcessors([plain], VOCABULARY),
        )
        ahead.learn(text)
        after.learn(text)
        after.learn([*text, *path])
        row = scores(seed) * np.float32(1.1)
        np.testing.assert_array_equal(read(ahead, row, path), read(after, row, []))


@given(texts, paths, words)
@settings(deadline=None, max_examples=100)
def test_a_processor_names_all_scores_that_it_changes(
    text: list[int], path: list[int], bad: list[list[int]]
) -> None:
    for processor in every(bad):
        assert isinstance(processor, SparseProcessor)
        processor.commit(text)
        processor.commit(path)
        row = scores()
        processor.edit(row, path)
        changed = set(np.flatnonzero(row != scores()).tolist())
        assert changed <= {*processor.touches(path).tolist(), *path}


def test_a_row_is_put_right_when_nothing_can_be_taken_from_it() -> None:
    rules = LogitsProcessors([LogitBias({4: 3.0})], VOCABULARY)
    row = scores()
    with pytest.raises(ZeroDivisionError):
        rules.read(row, [], lambda edited: 1 / 0)
    np.testing.assert_array_equal(row, scores())


def test_rules_of_no_processors_leave_a_row_as_it_is() -> None:
    rules = LogitsProcessors([], VOCABULARY)
    np.testing.assert_array_equal(rules.edit(scores(), [3]), scores())
    np.testing.assert_array_equal(read(rules, scores(), [3]), scores())


def test_a_row_that_cannot_be_edited_in_place_is_copied() -> None:
    whole: list[Processor] = [AllowedTokens([1, 4]), Custom(lambda tokens, row: row + 1)]
    for processor in (*whole, RepetitionPenalty(2.0)):
        for known, writeable in ((VOCABULARY, False), (5, False), (5, True)):
            rules = LogitsProcessors([processor, LogitBias({11: 1.0})], VOCABULARY)
            rules.learn([1, 4, 11])
            row = scores()
            row.setflags(write=writeable)
            expected = rules.edit(row[:known], [2]).copy()
            np.testing.assert_array_equal(read(rules, row[:known], [2]), expected)
            assert len(expected) == known


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_scores_at_the_ends_of_the_range_are_punished_in_silence(penalty: float) -> None:
    row = np.array([3.4e38, -3.4e38, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 5, -5, 1, 1, 1], np.float32)
    rules = LogitsProcessors([RepetitionPenalty(penalty)], VOCABULARY)
    rules.learn(list(range(9)))
    with np.errstate(over="ignore"):
        wanted = np.where(row > 0, row / np.float32(penalty), row * np.float32(penalty))
    np.testing.assert_array_equal(read(rules, row, [])[:9], wanted[:9])


@given(st.lists(st.integers(0, 11), min_size=1), st.integers(0, 99))
@settings(deadline=None, max_examples=40)
def test_allowed_tokens_keep_their_scores_and_no_other_has_one(ids: list[int], seed: int) -> None:
    row, wanted = scores(seed), np.full(VOCABULARY, -np.inf, np.float32)
    row[0] = np.inf
    wanted[ids] = row[ids]
    np.testing.assert_array_equal(
        read(LogitsProcessors([AllowedTokens(ids)], VOCABULARY), row, []), wanted
    )


@given(st.integers(0, 50), st.sampled_from([0.2, 0.5, 0.9, 0.99]), st.sampled_from([0.7, 1.5]))
@settings(deadline=None, max_examples=40)
def test_typical_tokens(seed: int, mass: float, temperature: float) -> None:
    torch = pytest.importorskip("torch", reason="needs the export extra")
    library = pytest.importorskip("transformers.generation.logits_process")
    row = scores(seed)
    heated = torch.from_numpy(row[None].astype(np.float64) / temperature)
    wanted = np.asarray(library.TypicalLogitsWarper(mass)(torch.tensor([[0]]), heated)[0])
    found = process(row, SamplingParams(temperature=temperature, typical_p=mass))
    assert found.ids.tolist() == np.flatnonzero(wanted > -np.inf).tolist()
    np.testing.assert_allclose(found.probs, softmax(wanted[found.ids]), rtol=1e-9)


def test_a_share_too_small_for_a_number_is_no_trouble() -> None:
    row = np.array([0, 0, 0, -37.24], np.float32)
    found = process(row, SamplingParams(temperature=0.05, typical_p=0.9))
    assert found.ids.tolist() == [0, 1, 2]
