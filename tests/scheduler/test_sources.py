"""Texts of sources: each is its own source's, alone or in rows, wherever it pauses and goes on."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared import nightly_but
from specrt.errors import CapacityError, EngineError, RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.scheduler import slots
from specrt.scheduler.request import AHEAD
from specrt.speculation.drafters import DRAFTERS
from specrt.text.tokenizer import Tokenizer
from support.conditioned import ConditionedTable, conditioned_models, greedy_text, reader

SOURCES = [[7, 8, 9], [8] * 40, list(range(60)), [7, 8, 10], [200, 3, 200, 3, 200, 3, 9], [7]]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True)


def engines_of(made: Any) -> list[ConditionedTable]:
    return [made.models.target, made.models.draft]


def reads(made: Any) -> list[int]:
    """Return how often each engine read a source."""
    return [len(engine.conditioned) for engine in engines_of(made)]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("copies", [False, True])
def test_a_greedy_text_is_that_of_its_source(
    tokenizer: Tokenizer, drafter: str, copies: bool
) -> None:
    made = reader(tokenizer, copies=copies)
    for source, gamma in itertools.product(SOURCES, (0, 4, "auto")):
        done = made.generate(source, PARAMS, gamma=gamma, drafter=drafter)
        assert done.token_ids == greedy_text(made, source, 30)
        assert done.prompt_tokens == len(source)


ALL = list(itertools.product(["model", "ngram", "cascade"], ["match", "rejection"]))


@pytest.mark.parametrize(("drafter", "verifier"), nightly_but([ALL[5]], ALL))
def test_a_sampled_text_has_the_distribution_of_its_source(
    tokenizer: Tokenizer, drafter: str, verifier: str
) -> None:
    made = reader(tokenizer, 2, scale=1.5, copies=drafter != "model")
    source, allowed = [5, 6, 5, 6, 5, 6, 9], (5, 6, 9)
    params = [
        SamplingParams(
            max_tokens=4, temperature=1.5, seed=seed, verifier=verifier, ignore_eos=True,
            allowed_token_ids=allowed,
        )
        for seed in range(DRAWN)
    ]  # fmt: skip
    done = made.generate_many([source] * DRAWN, params, gamma=3, drafter=drafter)
    found = Counter(tuple(one.token_ids) for (one,) in done)
    assert sum(one.speculation.accepted for (one,) in done) > 0
    assert chi_square(found, law_of(made, source, allowed)) < 1.0
    other = [9, *source[1:]]  # a negative control
    assert chi_square(found, law_of(made, other, allowed)) > 1.0


DRAWN = 3000

Law = dict[tuple[int, ...], float]


def law_of(made: Any, source: list[int], allowed: tuple[int, ...]) -> Law:
    """Return how often each text of four tokens is to come, computed without engine or loop."""
    row = made.models.target.rows[0]
    row.source = np.array(source)
    expected: Law = {}
    for text in itertools.product(allowed, repeat=4):
        chance, seen = float(DRAWN), list(made.models.decoder_start)
        for token in text:
            scores = row.row(np.array(seen))[list(allowed)].astype(np.float64) / 1.5
            weights = np.exp(scores - scores.max())
            chance *= weights[allowed.index(token)] / weights.sum()
            seen.append(token)
        expected[text] = chance
    return expected


def chi_square(found: Counter[tuple[int, ...]], expected: Law) -> float:
    """Return chi-square over its bound at one in a million, rare texts together."""
    pairs = [(found[t], e) for t, e in expected.items() if e >= 5]
    pairs.append((sum(found.values()) - sum(f for f, _ in pairs), DRAWN - sum(e for _, e in pairs)))
    kept = [(f, e) for f, e in pairs if e > 1e-6]
    degrees = len(kept) - 1
    # Wilson and Hilferty 1931.
    bound = degrees * (1 - 2 / (9 * degrees) + 4.75 * (2 / (9 * degrees)) ** 0.5) ** 3
    return sum((f - e) ** 2 / e for f, e in kept) / bound


@pytest.mark.parametrize(("batch", "options"), [(4, {}), (2, {"temperature": 0.9, "seed": 5})])
def test_rows_are_what_each_is_alone(
    tokenizer: Tokenizer, batch: int, options: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=25, ignore_eos=True, **options)
    alone = [
        reader(tokenizer, prompt_cache=False).generate(source, params, gamma=0).token_ids
        for source in SOURCES
    ]
    for drafter in DRAFTERS:
        together = reader(tokenizer, batch).generate_many(SOURCES, params, drafter=drafter)
        assert [one.token_ids for (one,) in together] == alone


def test_a_paused_text_goes_on_with_its_own_source(tokenizer: Tokenizer) -> None:
    made = reader(tokenizer)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    streams = [made.stream(source, params, gamma=1) for source in SOURCES[:3]]
    for _ in range(3 * AHEAD):
        for stream in streams:
            next(stream, None)
    for stream, source in zip(streams, SOURCES, strict=False):
        assert stream.finish().token_ids == greedy_text(made, source, 100)
    assert reads(made)[0] > len(streams)  # one had given its row away


def test_a_source_is_read_once_by_each_engine_and_not_again_while_a_row_holds_it(
    tokenizer: Tokenizer,
) -> None:
    made = reader(tokenizer)
    for turn in range(3):
        done = made.generate(SOURCES[2], PARAMS)
        assert done.cached_tokens == (60 if turn else 0)
        assert reads(made) == [1, 1]
    made.generate(SOURCES[1], PARAMS)
    assert reads(made) == [2, 2]
    made.forget()
    made.generate(SOURCES[1], PARAMS)
    assert reads(made) == [3, 3]
    uncached = reader(tokenizer, prompt_cache=False)
    assert [uncached.generate([1] * 20, PARAMS).cached_tokens for _ in range(2)] == [0, 0]
    assert reads(uncached) == [2, 2]


ALIKE = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4, 5], [1, 2, 3]]


def _mixed(tokenizer: Tokenizer) -> list[list[int]]:
    """Return texts of sources that are nearly one, each asked for twice on the same row."""
    made = reader(tokenizer)
    return [made.generate(source, PARAMS).token_ids for source in [*ALIKE, *ALIKE]]


def test_no_text_is_that_of_the_source_before(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reader(tokenizer)
    expected = [greedy_text(made, source, 30) for source in [*ALIKE, *ALIKE]]
    assert _mixed(tokenizer) == expected
    monkeypatch.setattr(slots, "same_source", lambda *_: True)  # must be seen
    assert _mixed(tokenizer) != expected


def test_a_source_that_cannot_be_read_fails_its_own_request_alone(tokenizer: Tokenizer) -> None:
    made = reader(tokenizer, 2)
    target = engines_of(made)[0]
    honest = target.condition

    def broken(row: int, source: Any) -> None:
        if source[0] == 8:
            raise EngineError("the encoder failed")
        honest(row, source)

    target.condition = broken  # type: ignore[method-assign]
    done = [one for (one,) in made.generate_many(SOURCES, PARAMS)]
    for source, one in zip(SOURCES, done, strict=True):
        if source[0] == 8:
            assert (one.finish_reason, one.error) == ("error", "the encoder failed")
        else:
            assert one.token_ids == greedy_text(made, source, 30)
    with pytest.raises(EngineError, match="the encoder failed"):
        made.generate(SOURCES[1], PARAMS)
    assert made.generate(SOURCES[0], PARAMS).token_ids == greedy_text(made, SOURCES[0], 30)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ("", RequestError, "the prompt is ''.*source.*at least one word"),
        ("a" * 9000, CapacityError, "9000 characters.*the longest source of this bundle is 64"),
    ],
)
def test_a_source_that_cannot_be_is_refused_before_any_work(
    tokenizer: Tokenizer, prompt: Any, error: type[Exception], words: str
) -> None:
    made = reader(tokenizer)
    with pytest.raises(error, match=words):
        made.generate(prompt)
    ((one,), (other,)) = made.generate_many([prompt, "ab"], PARAMS)
    assert one.finish_reason == "error"
    assert (one.error or "").startswith("prompts[0]: ")
    assert other.finish_reason == "length"
    with pytest.raises(RequestError, match=r"prompt_logprobs is 1.*not scored; leave it out"):
        made.generate("ab", SamplingParams(prompt_logprobs=1))


def test_features_are_a_source_of_one_shape(tokenizer: Tokenizer) -> None:
    made = reader(tokenizer, features=(3, 8))
    rng = np.random.default_rng(1)
    first, other = (rng.standard_normal((3, 8)).astype(np.float32) for _ in range(2))
    texts = [made.generate(f, PARAMS).token_ids for f in (first, other, first)]
    assert texts[0] == texts[2] != texts[1]
    assert made.generate(first, PARAMS).prompt_tokens == 64
    assert made.generate(first, PARAMS).cached_tokens == 64
    for wrong, words in [
        ("text", "of type str, and this bundle reads speech; expected.*3, 8"),
        (first[:, :4], r"an array \[3, 4\] of float32; expected .*\[3, 8\]"),
        (np.full((3, 8), np.nan, np.float32), "not finite; expected"),
        (np.full((3, 8), 1e300), "not finite; expected"),
    ]:
        with pytest.raises(RequestError, match=words):
            made.generate(wrong)


OF_A_SUMMARY = {
    "forced_bos_token_id": [70], "forced_eos_token_id": 0, "min_tokens": 20,
    "no_repeat_ngram_size": 2, "begin_suppress_tokens": [97],
}  # fmt: skip


@pytest.mark.parametrize("gamma", [0, 4])
def test_a_constraint_goes_before_what_the_checkpoint_asks_for(
    tokenizer: Tokenizer, gamma: int
) -> None:
    models = conditioned_models(tokenizer.size, 1, options=OF_A_SUMMARY)
    made = Generator(models, tokenizer, [0])
    free = made.generate("ab", SamplingParams(max_tokens=25), gamma=gamma).token_ids
    assert (free[0], free[-1], len(free)) == (70, 0, 25)
    for regex, most, text in (("[ab]{4}", 20, "b[ab]{3}"), ("(ba){9}", 6, "bababa")):
        done = made.generate("ab", SamplingParams(regex=regex, max_tokens=most), gamma=gamma)
        assert re.fullmatch(text, done.text)
        assert done.finish_reason == ("stop" if most == 20 else "length")
    source = np.array(tokenizer.encode("ab"))
    # The token that is forced is not of the text, which goes on from it all the same.
    plain = Generator(replace(models, options={}), tokenizer, [0])
    params = SamplingParams(choice=["x1", "y2", "z3", "w4"], decoder_start=(256, 70))
    expected = plain.generate(source.tolist(), params).text
    chosen = made.generate("ab", replace(params, decoder_start=None), gamma=gamma)
    assert chosen.text == expected
    with pytest.raises(RequestError, match=r"no token is left.*forced_bos_token_id"):
        made.generate("ab", replace(params, forced_bos_token_id=70))
