"""Several completions at once are those that each would be alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from runtime.rows import PackedTable, packed, padded
from runtime.toy import TableEngine, generator, near
from scheduler.support import COSTS, WIDTH, Build, alone, rows, shared_prompt, toys
from specrt.completion import Stream
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.text import Tokenizer

OPTIONS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 60),
        "temperature": st.sampled_from([0.0, 0.0, 0.9]),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from([(), ("e",), ("a", "q")]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
    }
)
PROMPTS = st.one_of(
    st.lists(st.integers(0, 255), min_size=1, max_size=90),
    st.builds(
        lambda n, rest: [7, 8, 9] * n + rest, st.integers(6, 20), st.lists(st.integers(0, 9))
    ),
)
ASKED = st.tuples(
    PROMPTS,
    OPTIONS,
    st.sampled_from([0, 1, 3, 8, "auto"]),
    st.sampled_from(["model", "ngram", "cascade", "none"]),
)


def finished(made: Generator, asked: Any) -> tuple[Any, ...]:
    prompt, options, gamma, drafter = asked
    done = made.generate(prompt, SamplingParams(**options), gamma=gamma, drafter=drafter)
    return done.token_ids, done.text, done.finish_reason, done.stop_reason


@pytest.mark.parametrize("build", [padded, packed])
@settings(max_examples=25, deadline=None)
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
    made, one = rows(build, batch, tokenizer), alone(tokenizer)
    streams: dict[int, Stream] = {}
    for number in pulls:  # begun at different times, read at different paces
        if number >= len(many):
            continue
        if number not in streams:
            prompt, options, gamma, drafter = many[number]
            params = SamplingParams(**options)
            streams[number] = made.stream(prompt, params, gamma=gamma, drafter=drafter)
        next(streams[number], None)
        if number in dropped:
            del streams[number]
            dropped.remove(number)
    for number, stream in streams.items():
        done = stream.finish()
        found = done.token_ids, done.text, done.finish_reason, done.stop_reason
        assert found == finished(one, many[number])


@pytest.mark.parametrize("build", [padded, packed])
def test_a_list_of_prompts_with_parameters_of_their_own(build: Build, tokenizer: Tokenizer) -> None:
    made, one = rows(build, 3, tokenizer), alone(tokenizer)
    prompts = [[i, 2, 3] * (1 + 5 * i) for i in range(1, 8)]
    params = [
        SamplingParams(max_tokens=10 + 3 * i, temperature=0.5 * (i % 2), seed=i, n=1 + i % 3)
        for i in range(7)
    ]
    found = made.generate_many(prompts, params)
    for prompt, own, completions in zip(prompts, params, found, strict=True):
        assert [c.index for c in completions] == list(range(own.n))
        assert completions[0].token_ids == one.generate(prompt, own_alone(own)).token_ids
        assert len({tuple(c.token_ids) for c in completions}) == (own.n if own.temperature else 1)


def own_alone(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, seed=params.seed
    )


def test_rows_share_passes_and_a_free_row_is_taken_at_once(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    target = made.models.target
    assert isinstance(target, PackedTable)
    lengths = [40, 5, 5, 5]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    made.generate_many([[i, 1] for i in range(4)], params, gamma=0)
    # The long one never waits, and the three short ones follow each other on the other row.
    assert len(target.passes) == 40
    assert sum(len(one) for one in target.passes) == 55
    assert all(len(one) == 2 for one in target.passes[:15])


@pytest.mark.parametrize("batch", [2, 4])
def test_a_long_prompt_holds_others_up_for_one_chunk_at_most(
    tokenizer: Tokenizer, batch: int
) -> None:
    made = rows(packed, batch, tokenizer)
    target = made.models.target
    assert isinstance(target, PackedTable)
    running = made.stream([1, 2], SamplingParams(max_tokens=100, ignore_eos=True), gamma=0)
    next(running)
    late = [made.stream([3 + i] * 100, SamplingParams(max_tokens=2)) for i in range(batch - 1)]
    before = len(target.passes)
    for stream in late:
        next(stream)
        for _ in range(7):  # who does not read pauses
            next(running)
    for one in target.passes[before:]:
        assert sum(len(feed.tokens) for feed in one) <= WIDTH + 9 * batch
        assert any(feed.row == 0 for feed in one), "the running row was left out"


def test_rows_that_read_together_share_one_chunk(tokenizer: Tokenizer) -> None:
    made, one = rows(packed, 4, tokenizer), alone(tokenizer)
    prompts, params = [[i] * 100 for i in range(6)], SamplingParams(max_tokens=5)
    found = made.generate_many(prompts, params)
    for engine in (made.models.target, made.models.draft):
        assert isinstance(engine, PackedTable)
        for feeds in engine.passes:
            widths = [len(feed.tokens) for feed in feeds]
            assert sum(width for width in widths if width > 10) <= WIDTH  # 10 is no prompt
    assert [c.token_ids for (c,) in found] == [one.generate(p, params).token_ids for p in prompts]


@pytest.mark.parametrize("build", [padded, packed])
def test_a_failing_row_harms_no_other(build: Build, tokenizer: Tokenizer) -> None:
    def wrong(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        return row[:3] if len(tokens) > 9 else row

    made, one = rows(build, 3, tokenizer), alone(tokenizer)
    good = SamplingParams(max_tokens=30)
    bad = SamplingParams(max_tokens=30, logits_processors=(wrong,))
    banned = SamplingParams(max_tokens=30, allowed_token_ids=(5,), no_repeat_ngram_size=1)
    found = made.generate_many([[1, 2, 3]] * 4, [good, bad, banned, good])
    (first,), (second,), (third,), (last,) = found
    assert second.finish_reason == third.finish_reason == "error"
    assert "returned shape [3]" in str(second.error)
    assert "no token is left" in str(third.error)
    expected = one.generate([1, 2, 3], good).token_ids
    assert first.token_ids == last.token_ids == expected
    # Alone it is raised.
    with pytest.raises(RequestError, match="returned shape"):
        made.generate([1, 2, 3], bad)


@pytest.mark.parametrize("build", [padded, packed])
def test_a_pass_that_fails_ends_those_in_it_and_nothing_else(
    build: Build, tokenizer: Tokenizer
) -> None:
    made, one = rows(build, 2, tokenizer), alone(tokenizer)
    params = SamplingParams(max_tokens=30)
    streams = [made.stream([i, 2], params) for i in (1, 2)]
    for stream in streams:
        next(stream)
    target: Any = made.models.target
    where = target if build is padded else target.rows[1]
    honest = where.forward

    def broken(*_: Any) -> Any:
        raise EngineError("the device is gone")

    where.forward = broken
    for stream in streams:
        with pytest.raises(EngineError, match="the device is gone"):
            stream.finish()
    where.forward = honest
    again = made.generate([1, 2], params)
    assert again.token_ids == one.generate([1, 2], params).token_ids
    assert again.cached_tokens == 0  # nobody knows what such a pass wrote


def test_engines_that_score_few_rows_read_short_texts_beside_long_ones(
    tokenizer: Tokenizer,
) -> None:
    def few(engine: TableEngine, batch: int) -> TableEngine:
        made = padded(engine, batch)
        made.max_rows = 9  # type: ignore[attr-defined]
        return made

    made, one = rows(few, 3, tokenizer), alone(tokenizer)
    target: Any = made.models.target
    prompts = [[1], [2] * 60, [3, 4], [5] * 40, [6]]
    params = SamplingParams(max_tokens=30)
    found = made.generate_many(prompts, params, gamma=3)
    assert [c.token_ids for (c,) in found] == [one.generate(p, params).token_ids for p in prompts]
    assert max(call.rows for call in target.calls) <= 9


def test_more_completions_than_rows_are_refused(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    with pytest.raises(RequestError, match=r"n is 3, and this bundle was built for 2 at once"):
        made.generate_many([[1]], SamplingParams(n=3))
    with pytest.raises(RequestError, match=r"a stream is one completion; use generate_many"):
        made.stream([1], SamplingParams(n=2))
    with pytest.raises(RequestError, match=r"2 prompts and 3 sampling params"):
        made.generate_many([[1], [2]], [SamplingParams()] * 3)
    with pytest.raises(RequestError, match=r"prompts is of type str; expected a list of prompts"):
        made.generate_many("abc")
    with pytest.raises(RequestError, match=r"params holds 5; expected SamplingParams"):
        made.generate_many([[1]], 5)  # type: ignore[arg-type]
    for wrong in (0, -1, 3, 1.5, True):
        with pytest.raises(RequestError, match=rf"rows is {wrong}; this bundle was built for 1 to"):
            made.generate_many([[1]], rows=wrong)  # type: ignore[arg-type]


def test_a_bad_prompt_in_a_list_is_refused_before_any_work(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    target: Any = made.models.target
    with pytest.raises(RequestError, match="token id 9999 is not in the vocabulary"):
        made.generate_many([[1], [9999]])
    assert target.passes == []


def test_completions_of_one_seed_differ_by_their_number_alone(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    many = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=4)
    found = [
        [c.token_ids for c in rows(packed, batch, tokenizer).generate_many([[1, 2]], many)[0]]
        for batch in (4, 5)
    ]
    assert found[0] == found[1]
    assert len({tuple(one) for one in found[0]}) == 4
    assert found[0][0] == alone(tokenizer).generate([1, 2], params).token_ids


def test_gamma_falls_as_rows_fill(tokenizer: Tokenizer) -> None:
    steep = Costs((100.0, *(101.0 + 40 * i for i in range(9))), tuple(5.0 * g for g in range(9)))
    drafted = []
    for busy in (1, 4):
        target, _ = toys(tokenizer.size)
        close = near(target, 6, 0.95)
        models = Models(
            packed(target, 4), packed(close, 4), tuple(range(9)), "auto", measure=lambda _: steep
        )
        made = Generator(models, tokenizer)
        params = SamplingParams(max_tokens=120 - 2, ignore_eos=True)
        done = made.generate_many([[i, 1] for i in range(busy)], params)
        counts = [completion.speculation for (completion,) in done]
        drafted.append(sum(c.drafted for c in counts) / sum(c.rounds for c in counts))
    assert drafted[1] < drafted[0] / 2


# What is read once


@pytest.mark.parametrize("build", [padded, packed])
def test_the_next_turn_reads_what_is_new_alone(build: Build, tokenizer: Tokenizer) -> None:
    made, one = rows(build, 2, tokenizer), alone(tokenizer)
    params = SamplingParams(max_tokens=20)
    text = shared_prompt(30)
    for turn in range(3):
        done = made.generate(text, params)
        assert done.cached_tokens == (0 if not turn else len(text) - 4)
        assert done.token_ids == one.generate(text, params).token_ids
        text = [*text, *done.token_ids, 1, 2, 3]


def test_a_prompt_that_is_known_whole_is_scored_again_from_its_last_token(
    tokenizer: Tokenizer,
) -> None:
    made = rows(packed, 2, tokenizer)
    first = made.generate(shared_prompt(30), SamplingParams(max_tokens=5))
    again = made.generate(shared_prompt(30), SamplingParams(max_tokens=5))
    assert (first.cached_tokens, again.cached_tokens) == (0, 29)
    assert first.token_ids == again.token_ids
    assert "cached_tokens" in again.to_json()


def test_rows_read_a_shared_prompt_once(tokenizer: Tokenizer) -> None:
    made = rows(packed, 4, tokenizer)
    target: Any = made.models.target
    prompt = shared_prompt(80)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=1, n=4)
    (done,) = made.generate_many([prompt], params, gamma=0)
    assert [c.cached_tokens for c in done] == [0, 79, 79, 79]
    read = sum(len(f.tokens) for one in target.passes for f in one)
    assert read == 80 + 3 + 4 * 9
    one = alone(tokenizer).generate(prompt, own_alone(params))
    assert done[0].token_ids == one.token_ids


def test_without_the_prompt_cache_all_is_read(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer, prompt_cache=False)
    for _ in range(2):
        assert made.generate(shared_prompt(30), SamplingParams(max_tokens=3)).cached_tokens == 0
    kept = rows(packed, 2, tokenizer)
    kept.generate(shared_prompt(30), SamplingParams(max_tokens=3))
    kept.forget()
    assert kept.generate(shared_prompt(30), SamplingParams(max_tokens=3)).cached_tokens == 0


def test_measuring_costs_overwrites_nothing_that_is_trusted(tokenizer: Tokenizer) -> None:
    target, draft = toys(tokenizer.size)
    engines = packed(target, 2), packed(draft, 2)

    def measure(models: Models) -> Costs:
        for engine in engines:
            for row in engine.rows:
                row.buffer[:] = 255
        return COSTS

    made = Generator(Models(*engines, tuple(range(9)), 4, measure=measure), tokenizer)
    params, one = SamplingParams(max_tokens=40), alone(tokenizer)
    first = made.stream([1, 2, 3], params, gamma=2)
    for _ in range(3):
        next(first)
    second = made.stream([4, 5], params, gamma="auto")
    found = second.finish().token_ids
    assert found == one.generate([4, 5], params).token_ids
    assert first.finish().token_ids == one.generate([1, 2, 3], params).token_ids


def test_a_row_is_free_at_once_when_its_stream_is_dropped(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    target: Any = made.models.target
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    streams: Sequence[Stream] = [made.stream([i], params) for i in range(2)]
    for stream in streams:
        next(stream)
    del stream, streams
    before = len(target.passes)
    made.generate([9], SamplingParams(max_tokens=4), gamma=0)
    assert [len(one) for one in target.passes[before:]] == [1] * 4


def test_a_closed_generator_refuses_what_is_left(tokenizer: Tokenizer) -> None:
    made = generator(*toys(tokenizer.size), tokenizer)
    stream = made.stream([1], SamplingParams(max_tokens=50))
    next(stream)
    made.close()
    with pytest.raises(RequestError, match="this generator was closed"):
        stream.finish()


# Ctrl-C


def finish_all(streams: Sequence[Stream]) -> None:
    for stream in streams:
        stream.finish()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("at", range(1, 12))
def test_a_pass_that_was_interrupted_is_run_again(
    tokenizer: Tokenizer, batch: int, at: int
) -> None:
    made, one = rows(padded, batch, tokenizer), alone(tokenizer)
    target: Any = made.models.target
    honest = target.forward

    def interrupted(*args: Any) -> Any:
        if len(target.calls) == at:
            target.forward = honest
            raise KeyboardInterrupt
        return honest(*args)

    params = SamplingParams(max_tokens=40)
    target.forward = interrupted
    made = Generator(made.models, tokenizer)  # which looks the method up once
    streams = [made.stream([i, 2, 3], params, gamma=3) for i in range(batch)]
    with pytest.raises(KeyboardInterrupt):
        finish_all(streams)
    found = [made.generate([9], params).token_ids]
    for i, stream in enumerate(streams):
        if stream.completion.finish_reason is None and next(stream, None) is None:
            continue  # the one that was asked for is closed, as a generator that raised is
        stream.finish()
        assert stream.completion.token_ids == one.generate([i, 2, 3], params).token_ids
    assert found == [one.generate([9], params).token_ids]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_completion_interrupted_in_its_own_code_does_not_end_as_if_done(
    tokenizer: Tokenizer, batch: int
) -> None:
    def interrupts(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(tokens) == 9:
            raise KeyboardInterrupt
        return row

    made, one = rows(padded, batch, tokenizer), alone(tokenizer)
    params = SamplingParams(max_tokens=40, logits_processors=(interrupts,))
    other = made.stream([5, 6], SamplingParams(max_tokens=40))
    next(other)
    stream = made.stream([1, 2, 3], params)
    with pytest.raises(KeyboardInterrupt):
        stream.finish()
    assert stream.completion.finish_reason is None
    expected = one.generate([5, 6], SamplingParams(max_tokens=40))
    assert other.finish().token_ids == expected.token_ids


@pytest.mark.parametrize("build", [padded, packed])
def test_nothing_is_reused_once_it_is_forgotten(build: Build, tokenizer: Tokenizer) -> None:
    """Neither of a text that is over, nor of one that pauses, nor of one that runs on."""
    made, one = rows(build, 2, tokenizer), alone(tokenizer)
    params, text = SamplingParams(max_tokens=12, ignore_eos=True), shared_prompt(40)
    made.generate(text, params)
    made.forget()
    running = made.stream(text, params)
    next(running)
    assert running.completion.cached_tokens == 0
    made.forget()
    running.finish()
    for _ in range(2):  # whichever row is taken
        done = made.generate([*text, *running.completion.token_ids], params)
        assert done.cached_tokens == 0
        assert (
            done.token_ids == one.generate([*text, *running.completion.token_ids], params).token_ids
        )
        made.forget()
    assert made.generate(text, params).cached_tokens == 0
    assert made.generate(text, params).cached_tokens > 0
