"""Several completions at once are those that each would be alone, and share what they can."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.support import LONG, WIDTH, Build, alone, few_rows, models_of, rows, shared_prompt
from specrt.completion import Stream
from specrt.engine.protocol import EngineTraits, RowSnapshot
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.compiled_gamma import PYTHON
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.shared_step import DraftingRow, SharedStep
from specrt.speculation.target import VERIFIERS
from specrt.text.tokenizer import Tokenizer
from support.rows import packed, padded

BUILDS = [padded, packed, few_rows]
OPTIONS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 60),
        "temperature": st.sampled_from([0.0, 0.0, 0.9]),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from([(), ("e",), ("a", "q")]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)
PROMPTS = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=127),
    st.builds(
        lambda n, rest: [7, 8, 9] * n + rest, st.integers(6, 20), st.lists(st.integers(0, 9))
    ),
)
ASKED = st.tuples(
    PROMPTS,
    OPTIONS,
    st.sampled_from([0, 1, 3, 8, "auto"]),
    st.sampled_from(list(DRAFTERS)),
    st.sampled_from(list(VERIFIERS)),
)


def stream_of(made: Generator, asked: Any) -> Stream:
    prompt, options, gamma, drafter, verifier = asked
    # Under another rule than `match` a text depends on gamma, which `auto` draws from the clock.
    params = SamplingParams(**options, verifier="match" if gamma == "auto" else verifier)
    return made.stream(prompt, params, gamma=gamma, drafter=drafter)


def result(stream: Stream) -> tuple[Any, ...]:
    done = stream.finish()
    return done.token_ids, done.text, done.finish_reason, done.stop_reason, done.prompt_logprobs


@pytest.mark.parametrize("build", BUILDS)
@settings(max_examples=16, deadline=None)
@given(
    batch=st.integers(2, 4),
    many=st.lists(ASKED, min_size=1, max_size=7),
    pulls=st.lists(st.integers(0, 6), max_size=60),
    dropped=st.sets(st.integers(0, 6), max_size=2),
)
def test_streams_of_all_kinds_are_those_alone(
    build: Build, tokenizer: Tokenizer, batch: int, many: list[Any], pulls: list[int],
    dropped: set[int],
) -> None:  # fmt: skip
    """Begun at different times, read at different paces, dropped or cancelled on the way."""
    made, one = rows(build, batch, tokenizer), alone(tokenizer)
    streams: dict[int, Stream] = {}
    for number in pulls:
        if number >= len(many):
            continue
        if number not in streams:
            streams[number] = stream_of(made, many[number])
        next(streams[number], None)
        if number in dropped:
            if number % 2:
                streams[number].cancel()
            del streams[number]
            dropped.remove(number)
    for number, stream in streams.items():
        assert result(stream) == result(stream_of(one, many[number]))


# Shared passes


def test_rows_share_passes_and_a_free_row_is_taken_at_once(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    target: Any = made.models.target
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 5, 5, 5)]
    made.generate_many([[i, 1] for i in range(4)], params, gamma=0)
    # The long one never waits, and the three short ones follow each other on the other row.
    assert len(target.passes) == 40
    assert sum(len(one) for one in target.passes) == 55
    assert all(len(one) == 2 for one in target.passes[:15])


def test_a_long_prompt_holds_others_up_for_one_chunk_at_most(tokenizer: Tokenizer) -> None:
    made = rows(packed, 4, tokenizer)
    target: Any = made.models.target
    running = made.stream([1, 2], LONG, gamma=0)
    next(running)
    late = [made.stream([3 + i] * 100, SamplingParams(max_tokens=2)) for i in range(3)]
    before = len(target.passes)
    for stream in late:
        next(stream)
        for _ in range(7):  # one that is not read pauses
            next(running)
    for one in target.passes[before:]:
        assert sum(len(feed.tokens) for feed in one) <= WIDTH + 9 * 4
        assert any(feed.row == 0 for feed in one), "the running row was left out"


# Gamma


@pytest.mark.parametrize("busy", [1, 3])
def test_a_step_is_planned_and_timed_for_all_of_its_rows(
    tokenizer: Tokenizer, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, settled = list[int](), list[tuple[int, int, int]]()
    begin, settle = SharedStep.begin, SharedStep.settle

    def note(step: SharedStep, made: int, drafted: list[int], *times: int, steps: int = 1) -> None:
        settled.append((step.rows, made, sum(drafted)))
        settle(step, made, drafted, *times, steps=steps)

    monkeypatch.setattr(SharedStep, "settle", note)
    monkeypatch.setattr(SharedStep, "begin", lambda s, n, d: (begun.append(n), begin(s, n, d)))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    cheap = Costs((1e6,) * 9, (0.0,) + (1.0,) * 8)
    models = replace(models_of(packed, 4, tokenizer), auto=PYTHON, costs=cheap)
    prompts = [[i, 1] for i in range(busy)]
    done = Generator(models, tokenizer).generate_many(prompts, params, gamma="auto")
    assert max(begun) == busy
    drafted = sum(completion.speculation.drafted for (completion,) in done)
    # Of the first tokens, and of rounds whose draft caught up, nothing is learned.
    assert 10 * busy < sum(made for _, made, _ in settled) <= 19 * busy
    assert 0 < sum(verified for *_, verified in settled) <= drafted


def test_a_plan_holds_for_the_texts_that_it_was_made_for(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which it holds are told together, and every one of them."""
    begun, plain, holds = list[int](), list[int](), [7]
    begin, settle = SharedStep.begin, SharedStep.settle

    def rest(step: SharedStep, rows: int, drafting: Sequence[DraftingRow]) -> None:
        begun.append(rows)
        begin(step, rows, ())
        step.rest = holds[-1] * (rows > 1)

    def note(step: SharedStep, made: int, *times: Any, steps: int = 1) -> None:
        if step.rows > 1:
            assert made == 2 * steps
            plain.append(steps)
        settle(step, made, *times, steps=steps)

    monkeypatch.setattr(SharedStep, "begin", rest)
    monkeypatch.setattr(SharedStep, "settle", note)
    made = Generator(replace(models_of(packed, 2, tokenizer), auto=PYTHON), tokenizer)
    params = SamplingParams(max_tokens=41, ignore_eos=True)
    made.generate_many([[1, 1], [2, 1]], params, gamma="auto", drafter="model")
    # One plan is for a step that reads a prompt. The first step after it takes longer than plain
    # decoding, and the last 8 are told when the next come.
    assert (begun.count(2), sum(plain)) == (6, 31)
    begun.clear()
    holds.append(100)
    streams = [made.stream([n, 1], params, gamma="auto", drafter="model") for n in (1, 2)]
    next(streams[0])
    assert len([*streams[1]]) > 1
    assert begun.count(1) > 3  # the first one pauses, since nobody reads it


# What is read once


@pytest.mark.parametrize("build", BUILDS)
def test_the_next_turn_reads_what_is_new_alone(build: Build, tokenizer: Tokenizer) -> None:
    made, one = rows(build, 2, tokenizer), alone(tokenizer)
    params, text = SamplingParams(max_tokens=20), shared_prompt(30)
    for turn in range(3):
        done = made.generate(text, params)
        assert done.cached_tokens == (0 if not turn else len(text) - 4)
        assert done.token_ids == one.generate(text, params).token_ids
        text = [*text, *done.token_ids, 1, 2, 3]
    # A text that is known whole is scored again from its last token.
    made.generate(text, params)
    again = made.generate(text, params)
    assert (again.cached_tokens, again.to_json()["cached_tokens"]) == (len(text) - 1,) * 2


def test_rows_read_a_shared_prompt_once(tokenizer: Tokenizer) -> None:
    made, prompt = rows(packed, 4, tokenizer), shared_prompt(80)
    target: Any = made.models.target
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=1, n=4)
    (done,) = made.generate_many([prompt], params, gamma=0)
    assert [c.cached_tokens for c in done] == [0, 79, 79, 79]
    assert sum(len(f.tokens) for one in target.passes for f in one) == 80 + 3 + 4 * 9


@pytest.mark.parametrize("build", BUILDS)
def test_texts_of_another_salt_are_as_if_they_were_not_there(
    build: Build, tokenizer: Tokenizer
) -> None:
    made, prompt = rows(build, 3, tokenizer), shared_prompt(40)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = alone(tokenizer).generate(prompt, params).token_ids
    salts = ["a", "a", "b"]
    streams = [made.stream(prompt, params, gamma=0, cache_salt=salt) for salt in salts]
    for stream in streams:
        made._scheduler.submit(stream._source._request)  # type: ignore[attr-defined]
    done = [stream.finish() for stream in streams]
    assert [one.cached_tokens > 0 for one in done] == [False, build is packed, False]
    for salt, cached in [("c", 0), ("b", 39), ("a", 39), ("c", 39), ("", 0)]:
        done.append(made.generate(prompt, params, cache_salt=salt))
        assert done[-1].cached_tokens == cached
    assert [one.token_ids for one in done] == [expected] * len(done)
    with pytest.raises(RequestError, match="cache_salt is 3"):
        made.generate(prompt, params, cache_salt=3)  # type: ignore[arg-type]


def test_snapshots_of_what_is_forgotten_are_freed(tokenizer: Tokenizer) -> None:
    taken: list[weakref.ref[Any]] = []

    def take(row: int) -> RowSnapshot:
        state = np.zeros(1)
        taken.append(weakref.ref(state))
        return RowSnapshot(0, 2, [("state.0", (), state)])

    models = models_of(packed, 2, tokenizer, snapshot_bytes=1 << 20)
    target: Any = models.target
    target.traits = EngineTraits(snapshots=Mock(take=take))
    made = Generator(models, tokenizer)
    running = made.stream([1, 2], LONG)
    next(running)
    assert [one() is None for one in taken] == [False]
    made.forget()
    assert [one() is None for one in taken] == [True]


@pytest.mark.parametrize("build", BUILDS)
def test_nothing_is_reused_once_it_is_forgotten(build: Build, tokenizer: Tokenizer) -> None:
    """Neither of a text that is over, nor of one that runs on, is dropped or ends."""
    made, one = rows(build, 2, tokenizer), alone(tokenizer)
    params, text = SamplingParams(max_tokens=12, ignore_eos=True), shared_prompt(40)
    made.generate(text, params)
    for way in ("ends", "is dropped", "runs on"):
        made.forget()
        running = made.stream(text, params)
        next(running)
        assert running.completion.cached_tokens == 0
        made.forget()
        if way == "ends":
            running.finish()
        longer = [*text, *running.completion.token_ids]
        if way == "is dropped":
            del running
        for _ in range(2):  # whichever row is taken
            done = made.generate(longer, params)
            assert done.cached_tokens == 0
            assert done.token_ids == one.generate(longer, params).token_ids
            made.forget()
    del running
    made.forget()
    assert made.generate(text, params).cached_tokens == 0
    assert made.generate(text, params).cached_tokens > 0
    without = rows(build, 2, tokenizer, prompt_cache=False)
    assert [without.generate(text, params).cached_tokens for _ in range(2)] == [0, 0]


# Waiting


# Refusals


def test_lists_and_numbers_that_cannot_be_are_refused_before_any_work(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    target: Any = made.models.target
    refused: list[tuple[str, Any, dict[str, Any]]] = [
        (r"2 prompts and 3 sampling", [[1], [2]], {"params": [SamplingParams()] * 3}),
        (r"prompts is of type str; expected a list of prompts", "abc", {}),
        (r"params holds 5; expected SamplingParams", [[1]], {"params": 5}),
        (r"gamma 9 is not among", [[1], [9999]], {"gamma": 9}),
        *((rf"rows is {n}; .* built for 1 to", [[1]], {"rows": n}) for n in (0, 3, 1.5, True)),
    ]
    for message, prompts, options in refused:
        with pytest.raises(RequestError, match=message):
            made.generate_many(prompts, **options)
    with pytest.raises(RequestError, match=r"a stream is one completion; use generate_many"):
        made.stream([1], SamplingParams(n=2))
    assert target.passes == []
