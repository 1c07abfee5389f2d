"""What rows survive: passes and processors that fail, costs not measured, interruptions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import specrt.scheduler
from scheduler.support import SOME, Build, alone, request_of, rows, shared_prompt
from shared import nightly_but
from specrt.engine.protocol import EngineTraits, Feed
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.rows import packed, padded

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


@contextmanager
def no_more_steps(made: Generator, most: int) -> Iterator[None]:
    """Fail where more steps are run than there can be use for."""
    scheduler: Any = made._scheduler
    honest, left = scheduler._step, iter(range(most))

    def counted() -> None:
        assert next(left, None) is not None, "it steps for ever"
        honest()

    scheduler._step = counted
    yield
    scheduler._step = honest


# Failures


def failing(*_: Any) -> Any:
    raise EngineError("the device is gone")


class Panic(BaseException):
    """As the panics of libraries in Rust are, which is not an Exception."""


def panicking(tokens: list[int], row: Any) -> Any:
    if len(tokens) > 9:
        raise Panic
    return row


@pytest.mark.parametrize("build", [padded, packed])
def test_a_pass_that_fails_ends_those_in_it_and_nothing_else(
    build: Build, tokenizer: Tokenizer
) -> None:
    made, one = rows(build, 2, tokenizer), alone(tokenizer)
    streams = [made.stream([i, 2], SOME) for i in (1, 2)]
    for stream in streams:
        next(stream)
    target: Any = made.models.target
    where = target if build is padded else target.rows[1]
    honest, where.forward = where.forward, failing
    for stream in streams:
        with pytest.raises(EngineError, match="the device is gone"):
            stream.finish()
    where.forward = honest
    again = made.generate([1, 2], SOME)
    assert again.token_ids == one.generate([1, 2], SOME).token_ids
    assert again.cached_tokens == 0  # what such a pass wrote is unknown


def test_how_the_application_set_numpy_breaks_no_step_and_stays(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    params = [
        SamplingParams(max_tokens=20, seed=3, temperature=1e-30),
        SamplingParams(max_tokens=20, seed=3, repetition_penalty=1.3, logit_bias={5: 1e-40}),
        SamplingParams(max_tokens=20, seed=3, temperature=0.02, verifier="rejection"),
    ]
    expected = [made.generate([1, 2, 3], own).token_ids for own in params]
    with np.errstate(all="raise"):
        state = np.geterr()
        for own, ids in zip(params, expected, strict=True):
            assert made.generate([1, 2, 3], own).token_ids == ids
            assert np.geterr() == state


def test_a_tokenizer_that_fails_ends_its_own_row(tokenizer: Tokenizer) -> None:
    made, one = rows(packed, 2, tokenizer), alone(tokenizer)
    bad = made.stream([1, 2, 3], SOME)
    next(bad)
    output: Any = request_of(made, [1, 2, 3]).output
    output.take = lambda *_: panicking([0] * 10, None)
    good = made.stream([5, 6], SOME)
    assert good.finish().token_ids == one.generate([5, 6], SOME).token_ids
    with pytest.raises(RequestError):
        bad.finish()


def test_a_row_whose_rounds_could_not_be_made_is_free_again(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    drafters: Any = made._scheduler.drafters
    honest, drafters.make = drafters.make, failing
    for _ in range(2):
        with pytest.raises(EngineError, match="the device is gone"):
            made.generate([1], SOME)
    drafters.make = honest
    with no_more_steps(made, 200):
        assert made.generate([1], SOME).finish_reason == "length"


# Interruptions


SCHEDULER = str(Path(specrt.scheduler.__file__).parent)


def is_within(frame: FrameType | None, name: str) -> bool:
    """Tell whether a function of a name is being run."""
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


@contextmanager
def interrupted_at(call: int) -> Iterator[None]:
    """Raise where a signal's handler may: as a function within the scheduler begins or returns."""
    left = iter(range(call))

    def tick(frame: FrameType, *_: Any) -> None:
        code = frame.f_code
        collected = code.co_name == "<genexpr>" or is_within(frame, "__del__")
        if not code.co_filename.startswith(SCHEDULER) or collected:
            return  # what is raised in there is not seen
        if next(left, None) is None:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(tick)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)


EVERY = [(2, 61), (2, 13), (1, 13)]


@pytest.mark.parametrize(("batch", "every"), nightly_but(EVERY[:1], EVERY))
def test_an_interruption_anywhere_leaves_a_scheduler_that_works(
    tokenizer: Tokenizer, batch: int, every: int
) -> None:
    made, one, params = rows(padded, batch, tokenizer), alone(tokenizer), SHORT
    expected = [one.generate([i, 2], params).token_ids for i in range(4)]
    for call in range(1, 3000, every):
        streams = [made.stream([i, 2], params, gamma=3) for i in range(4)]
        with interrupted_at(call):
            for stream in streams:
                next(stream, None)
            streams[0].close()
            made.forget()
        with no_more_steps(made, 500):
            for stream, tokens in zip(streams, expected, strict=True):
                try:
                    done = stream.finish()
                except RequestError:
                    continue  # the text may lack what the interruption was in
                assert done.token_ids == tokens[: len(done.token_ids)], call
            assert made.generate([3, 2], params).token_ids == expected[3], call


def test_a_pass_that_states_hold_already_is_not_run_again(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    running = made.stream([1, 2], SOME)
    next(running)
    target: Any = made.models.target
    honest = target.forward_rows

    def interrupted(feeds: list[Feed]) -> None:
        honest(feeds)
        ends = {feed.row: feed.start + len(feed.tokens) for feed in feeds}
        target.traits = EngineTraits(rewind=lambda row: ends[row])
        raise KeyboardInterrupt

    target.forward_rows = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.generate([5, 6], SOME)
    target.forward_rows = honest
    with pytest.raises(RequestError, match="interrupted"):
        running.finish()
    assert (
        made.generate([1, 2], SOME).token_ids == alone(tokenizer).generate([1, 2], SOME).token_ids
    )


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


# Waiting, and what is left
