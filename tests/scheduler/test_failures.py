"""What rows must survive: costs that cannot be measured, interruptions, panics, threads."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.rows import packed, padded
from scheduler.support import alone, rows, shared_prompt, toys
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.processors import LogitsProcessors
from specrt.scheduler.request import Request
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from specrt.tuning import measure_costs

SOME = SamplingParams(max_tokens=40)


@contextmanager
def no_more_steps(made: Generator, most: int) -> Iterator[None]:
    """Fail where more steps are run than there can be use for."""
    batch: Any = made._scheduler
    honest, left = batch._step, [most]

    def counted() -> None:
        left[0] -= 1
        assert left[0] > 0, "it steps for ever"
        honest()

    batch._step = counted
    yield
    batch._step = honest


def request_of(made: Generator, prompt: list[int]) -> Request:
    held = [row.request for row in made._scheduler._slots if row.request is not None]
    return next(r for r in held if r.tokens[: len(prompt)] == prompt)


@pytest.mark.parametrize("failure", [EngineError("it did not draft"), KeyboardInterrupt()])
def test_costs_that_could_not_be_measured_leave_nothing_trusted(
    tokenizer: Tokenizer, failure: BaseException
) -> None:
    target, draft = toys(tokenizer.size)
    engines = packed(target, 2), packed(draft, 2)

    def measure(models: Models) -> Costs:
        for engine in engines:
            for row in engine.rows:
                row.buffer[:] = 255
        raise failure

    made = Generator(Models(*engines, tuple(range(9)), 4, measure=measure), tokenizer)
    one = alone(tokenizer)
    made.generate(shared_prompt(40), SOME, gamma=2)
    running = made.stream([1, 2, 3], SOME, gamma=2)
    next(running)
    with pytest.raises(type(failure)):
        made.generate([4, 5], SOME, gamma="auto")
    assert running.finish().token_ids == one.generate([1, 2, 3], SOME).token_ids
    again = made.generate(shared_prompt(40), SOME, gamma=2)
    assert again.token_ids == one.generate(shared_prompt(40), SOME).token_ids


def test_nobody_waits_for_a_row_that_pauses_and_holds_nothing(tokenizer: Tokenizer) -> None:
    made = rows(packed, 3, tokenizer)
    paused = made.stream(shared_prompt(60), SamplingParams(max_tokens=60), gamma=0)
    next(paused)
    other = made.stream([9], SamplingParams(max_tokens=60), gamma=0)
    for _ in range(30):
        next(other)
    del other
    made.generate([4, 5], SamplingParams(max_tokens=3), gamma="auto")  # which measures costs
    with no_more_steps(made, 200):
        made.generate(shared_prompt(60), SamplingParams(max_tokens=3), gamma=0)


@pytest.mark.parametrize("dropped", [True, False])
def test_what_runs_while_all_is_forgotten_is_forgotten_too(
    tokenizer: Tokenizer, dropped: bool
) -> None:
    made = rows(packed, 2, tokenizer)
    stream: Any = made.stream(shared_prompt(60), SOME)
    next(stream)
    if dropped:
        del stream
    made.forget()
    assert made.generate(shared_prompt(60), SOME).cached_tokens == 0


def test_a_copy_that_was_interrupted_is_not_trusted(tokenizer: Tokenizer) -> None:
    made, params = rows(packed, 2, tokenizer), SamplingParams(max_tokens=4)
    first, second = shared_prompt(40), [(i * 11 + 5) % 251 for i in range(40)]
    made.generate(first, params)
    made.generate(second, params)
    target: Any = made.models.target
    honest = target.copy_row

    def interrupted(*args: Any) -> None:
        honest(*args)
        target.copy_row = honest
        raise KeyboardInterrupt

    target.copy_row = interrupted
    running = made.stream([*first, 1], SOME)
    next(running)
    with pytest.raises(KeyboardInterrupt):
        made.generate([*first, 2], params)
    expected = alone(tokenizer).generate([*second, 3], params).token_ids
    assert made.generate([*second, 3], params).token_ids == expected


def test_the_last_chunk_is_not_lost_to_a_thread_that_looked_too_early(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    params = SamplingParams(max_tokens=30)
    stream = made.stream([1, 2, 3], params, gamma=0)
    found = [*next(stream).token_ids]
    request = request_of(made, [1, 2, 3])

    class Watched(deque[Any]):
        def __bool__(self) -> bool:
            empty = not len(self)
            if empty and len(request.completion.token_ids) >= 26 and not request.done:
                ahead = SamplingParams(max_tokens=25)
                thread = threading.Thread(target=lambda: made.generate([9], ahead, gamma=0))
                thread.start()  # which ends this request, between this look and the next
                thread.join()
            return not empty

    request.chunks = Watched(request.chunks)
    for chunk in stream:
        found += chunk.token_ids
    assert found == stream.completion.token_ids


def test_a_row_whose_rounds_could_not_be_made_is_free_again(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    batch: Any = made._scheduler
    honest = batch.drafters.make

    def failing(*_: Any) -> Any:
        raise EngineError("no rounds")

    batch.drafters.make = failing
    for _ in range(2):
        with pytest.raises(EngineError, match="no rounds"):
            made.generate([1], SOME)
    batch.drafters.make = honest
    with no_more_steps(made, 200):
        assert made.generate([1], SOME).finish_reason == "length"


class Panic(BaseException):
    """As the panics of libraries in Rust are, which is no Exception."""


@pytest.mark.parametrize("where", ["tokenizer", "processor"])
def test_a_panic_ends_the_row_it_came_from_alone(tokenizer: Tokenizer, where: str) -> None:
    def panics(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        if where == "processor" and len(tokens) > 8:
            raise Panic
        return row

    made, one = rows(packed, 2, tokenizer), alone(tokenizer)
    bad = made.stream([1, 2, 3], SamplingParams(max_tokens=40, logits_processors=(panics,)))
    next(bad)
    if where == "tokenizer":
        reader: Any = request_of(made, [1, 2, 3]).output

        def take(*_: Any) -> Any:
            raise Panic

        reader.take = take
    good = made.stream([5, 6], SOME)
    assert good.finish().token_ids == one.generate([5, 6], SOME).token_ids
    with pytest.raises((Panic, RequestError)):
        bad.finish()


@pytest.mark.parametrize("place", ["rounds", "delivery"])
def test_an_interruption_elsewhere_leaves_no_gap_and_is_not_raised_twice(
    tokenizer: Tokenizer, place: str
) -> None:
    left = [9]

    def tick() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    def processor(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        if place == "rounds":
            tick()
        return row

    made, one = rows(packed, 2, tokenizer), alone(tokenizer)
    first = made.stream([1, 2, 3], SamplingParams(max_tokens=40, logits_processors=(processor,)))
    second = made.stream([5, 6], SOME)
    next(second)
    next(first)
    if place == "delivery":
        detokenizer: Any = request_of(made, [1, 2, 3]).output._detokenizer
        honest = detokenizer.push

        def push(tokens: list[int]) -> str:
            tick()
            return str(honest(tokens))

        left[0] = 2
        detokenizer.push = push
    with pytest.raises(KeyboardInterrupt):
        second.finish()
    try:
        done = first.finish()
    except KeyboardInterrupt:
        pytest.fail("one Ctrl-C was raised twice")
    except RequestError:
        return  # said so
    assert done.token_ids == one.generate([1, 2, 3], SOME).token_ids


def test_completions_that_are_over_give_their_memory_back(tokenizer: Tokenizer) -> None:
    alive: list[int] = []
    gc.collect()
    others = {id(o) for o in gc.get_objects() if type(o) is LogitsProcessors}  # of tests before

    def counts(tokens: list[int], row: NDArray[np.float32]) -> NDArray[np.float32]:
        alive.append(
            sum(type(o) is LogitsProcessors and id(o) not in others for o in gc.get_objects())
        )
        return row

    made = rows(packed, 2, tokenizer)
    penalty = SamplingParams(max_tokens=3, presence_penalty=1.0)
    last = SamplingParams(max_tokens=1, logits_processors=(counts,))
    done = made.generate_many([[i] for i in range(20)], [*[penalty] * 19, last])
    assert [c.error for (c,) in done] == [None] * 20
    assert alive[-1] <= 4, "two rows run, and all others are over"


def test_costs_are_measured_at_the_same_place_whatever_rows_an_engine_wants(
    tokenizer: Tokenizer,
) -> None:
    starts = []
    for build in (packed, padded):
        target, draft = toys(tokenizer.size)
        engines: tuple[Any, Any] = build(target, 2), build(draft, 2)
        for engine in engines:
            for own in getattr(engine, "rows", [engine]):
                own.row = lambda seen: np.zeros(tokenizer.size, np.float32)
        measure_costs(Models(*engines, tuple(range(5)), "auto"), tokenizer, budget_s=0.1)
        calls = [c for own in getattr(engines[0], "rows", [engines[0]]) for c in own.calls]
        starts.append(max(c.start for c in calls if c.width == 5))
    assert starts[0] - starts[1] <= 8
