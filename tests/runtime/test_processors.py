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
from specrt.processors import (
    AllowedTokens,
    BadWords,
    Custom,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    OutputPenalties,
    RepetitionPenalty,
)
from specrt.rules import Processor, Rules
from specrt.sampling import process

VOCABULARY = 12
Row = np.ndarray[Any, np.dtype[np.float32]]
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=24)
paths = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)


def scores(seed: int = 0) -> Row:
    return (np.random.default_rng(seed).standard_normal(VOCABULARY) * 3).astype(np.float32)


def edited(processor: Processor, text: Sequence[int], path: Sequence[int], cut: int = 1) -> Row:
    """Commit a prompt, then the rest token by token, as rounds do; edit a row behind a path."""
    rules = Rules([processor], VOCABULARY)
    for end in range(min(cut, len(text)), len(text) + 1):
        rules.learn(text[:end])
    row = scores()
    kept = row.copy()
    found = rules.edit(row, path)
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
        rules = Rules([processor], VOCABULARY)
        rules.learn([1, 2])
        rules.learn([1, 2, 3])
        before = rules.edit(scores(), [])
        rules.edit(scores(), [1, 2, 3, 4])
        np.testing.assert_array_equal(rules.edit(scores(), []), before)


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
