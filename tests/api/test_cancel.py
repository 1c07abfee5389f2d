"""Cancelling: from the reader's thread, from another one, and within a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.rows import packed
from runtime.toy import generator
from scheduler.support import LONG, Gate, alone, rows, target_of, toys
from specrt.completion import Stream
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.session import Session
from specrt.text import Tokenizer


@pytest.fixture(params=[1, 2])
def made(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Generator:
    if request.param == 1:
        return generator(*toys(tokenizer.size), tokenizer)
    return rows(packed, 2, tokenizer)


@pytest.mark.parametrize("end", [Stream.cancel, Stream.close])
def test_a_reader_is_at_the_end_after_the_pass_that_runs(
    made: Generator, end: Callable[[Stream], None]
) -> None:
    stream = made.stream([1, 2], LONG, gamma=0)
    first = next(stream).token_ids
    found: list[Any] = []
    gate = Gate(target_of(made))
    reader = threading.Thread(target=lambda: found.extend(stream))
    reader.start()
    assert gate.inside.wait(30)
    end(stream)  # while the other thread is within next()
    assert not gate.go.is_set(), "it waited for the pass"
    gate.go.set()
    reader.join(30)
    assert not reader.is_alive()
    assert found == []
    assert stream.completion.token_ids == first
    assert stream.completion.finish_reason == ("cancelled" if end is Stream.cancel else None)
    assert next(stream, None) is None
    assert all(row.request is None for row in made._scheduler._slots), "its row is not free"


def test_whoever_waits_takes_the_row_of_what_was_cancelled(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    streams = [made.stream([i], LONG, gamma=0) for i in range(2)]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.cancel()  # and nobody steps
    target: Any = made.models.target
    before = len(target.passes)
    made.generate_many([[7], [8]], SamplingParams(max_tokens=4), gamma=0)
    assert [len(one) for one in target.passes[before:]] == [2] * 4


def test_what_was_cancelled_before_it_began_never_runs(made: Generator) -> None:
    stream = made.stream([1, 2], LONG)
    stream.cancel()
    assert stream.finish().finish_reason == "cancelled"
    assert target_of(made).calls == []


def test_a_completion_that_was_finished_keeps_its_reason(made: Generator) -> None:
    stream = made.stream([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    whole = stream.finish()
    stream.cancel()
    assert whole.finish_reason == "length"


def test_a_logits_processor_may_cancel_the_stream_it_runs_in(
    made: Generator, tokenizer: Tokenizer
) -> None:
    def stops(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(tokens) == 12:
            stream.cancel()
        return row

    params = SamplingParams(max_tokens=100, ignore_eos=True, logits_processors=(stops,))
    stream = made.stream([1, 2], params, gamma=0)
    found = [token for chunk in stream for token in chunk.token_ids]
    assert stream.completion.finish_reason == "cancelled"
    assert found == stream.completion.token_ids
    assert found == alone(tokenizer).generate([1, 2], LONG).token_ids[: len(found)]
    assert len(found) == 10


def test_the_answer_of_a_session_is_cancelled_as_a_stream_is(made: Generator) -> None:
    session = Session(made, params=LONG)
    stream = session.stream("ab")
    said = next(stream)
    stream.cancel()
    assert next(stream, None) is None
    assert stream.completion.finish_reason == "cancelled"
    assert session.messages[-1]["content"] == said.text
    again = session.stream("cd")
    assert next(stream, None) is None  # the old one, which must not take the new message away
    next(again)
    assert session.messages[-2]["content"] == "cd"
