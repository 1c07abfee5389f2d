"""What rows survive: passes and processors that fail, costs not measured, interruptions."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import specrt.scheduler
from scheduler.support import (
    LONG,
    SOME,
    Build,
    alone,
    request_of,
    rows,
    shared_prompt,
)
from shared import nightly_but
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.sampling.processors import LogitsProcessors
from specrt.speculation.target import VERIFIERS, Verifier
from specrt.text.tokenizer import Tokenizer
from support.rows import packed, padded

SHORT = SamplingParams(max_tokens=12, ignore_eos=True)


def processed(*processors: Callable[[list[int], Any], Any]) -> SamplingParams:
    return SamplingParams(max_tokens=40, logits_processors=processors)


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
def test_a_failing_row_harms_no_other(
    build: Build, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERIFIERS, "broken", Verifier(broken))
    made, one = rows(build, 3, tokenizer), alone(tokenizer)
    short = processed(lambda tokens, row: row[:3] if len(tokens) > 9 else row)
    wrong = {
        "returned shape [3]": short, "failed": processed(panicking),
        "no token is left": SamplingParams(allowed_token_ids=(5,), no_repeat_ngram_size=1),
        "ZeroDivisionError": SamplingParams(temperature=1.0, verifier="broken"),
    }  # fmt: skip
    found = made.generate_many([[1, 2, 3]] * 6, [SOME, *wrong.values(), SOME])
    (first,), *failed, (last,) = found
    for (done,), reason in zip(failed, wrong, strict=True):
        assert (done.finish_reason, reason in str(done.error)) == ("error", True)
    assert first.token_ids == last.token_ids == one.generate([1, 2, 3], SOME).token_ids
    with pytest.raises(RequestError, match="returned shape"):  # alone it is raised
        made.generate([1, 2, 3], short)


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


def broken(*_: Any) -> Any:
    return 1 / 0


ROUNDING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 1e-30}, {}),
    ({"temperature": 0.01, "top_p": 0.9, "logprobs": 2, "prompt_logprobs": 2}, {"gamma": 3}),
    ({"temperature": 0.02, "typical_p": 0.9, "verifier": "rejection"}, {"gamma": 2}),
    ({"repetition_penalty": 1.3, "logit_bias": {5: 1e-40}}, {"drafter": "cascade"}),
    ({"temperature": 1e30, "top_k": 5, "min_p": 0.1}, {"gamma": "auto"}),
]
"""Options with which numbers get too small or too large, and how they are drafted."""


@pytest.mark.parametrize("build", [padded, packed])
def test_how_the_application_set_numpy_changes_nothing_and_stays(
    build: Build, tokenizer: Tokenizer
) -> None:
    made, seen = rows(build, 2, tokenizer), list[dict[str, Any]]()
    params = [SamplingParams(max_tokens=20, seed=3, **options) for options, _ in ROUNDING]

    def found(read: Callable[..., Any]) -> list[Any]:
        each = zip(params, ROUNDING, strict=True)
        return [read(own, drafted) for own, (_, drafted) in each]

    def read(own: SamplingParams, drafted: dict[str, Any]) -> list[int]:
        ids = []
        for chunk in made.stream([1, 2, 3], own, **drafted):
            ids += chunk.token_ids
            seen.append(np.geterr())
        return ids

    def task(own: SamplingParams, drafted: dict[str, Any]) -> list[int]:
        return asyncio.run(made.agenerate([1, 2, 3], own, **drafted)).token_ids

    expected = found(read)
    seen.clear()
    with np.errstate(all="raise"):
        state = np.geterr()
        assert found(read) == found(task) == expected
        looking = processed(lambda tokens, row: (seen.append(np.geterr()), row)[1])
        made.generate([1, 2, 3], looking)
        asyncio.run(made.agenerate([1, 2, 3], looking))
    assert all(one == state for one in seen)


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


def test_no_request_waits_for_a_row_that_pauses_and_holds_nothing(tokenizer: Tokenizer) -> None:
    made = rows(packed, 3, tokenizer)
    paused = made.stream(shared_prompt(60), LONG, gamma=0)
    next(paused)
    other = made.stream([9], LONG, gamma=0)
    for _ in range(30):
        next(other)
    del other
    made.generate([4, 5], SamplingParams(max_tokens=3), gamma="auto")  # which measures costs
    with no_more_steps(made, 200):
        made.generate(shared_prompt(60), SamplingParams(max_tokens=3), gamma=0)


def test_the_last_chunk_is_not_lost_to_a_thread_that_looked_too_early(tokenizer: Tokenizer) -> None:
    made = rows(packed, 2, tokenizer)
    stream = made.stream([1, 2, 3], SamplingParams(max_tokens=30), gamma=0)
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


def test_a_row_may_be_read_again_while_it_is_taken(tokenizer: Tokenizer) -> None:
    made, one, found = rows(padded, 1, tokenizer), alone(tokenizer), list[int]()
    stream = made.stream([1, 2, 3], LONG, gamma=0)
    found += next(stream).token_ids

    class Read(deque[Any]):
        """Chunks of which another thread fetches one whenever somebody counts eight."""

        def __len__(self) -> int:
            count = super().__len__()
            if count >= 8:
                found.extend(self.popleft().token_ids)
            return count

    request_of(made, [1, 2, 3]).chunks = Read()
    assert made.generate([9], SOME).token_ids == one.generate([9], SOME).token_ids
    for chunk in stream:
        found += chunk.token_ids
    assert found == one.generate([1, 2, 3], LONG, gamma=0).token_ids


def test_completions_that_are_over_give_their_memory_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, honest = WeakSet[LogitsProcessors](), LogitsProcessors.__init__
    monkeypatch.setattr(
        LogitsProcessors, "__init__", lambda self, *args: (alive.add(self), honest(self, *args))[1]
    )
    counts: list[int] = []
    last = processed(lambda tokens, row: (counts.append(len(alive)), row)[1])
    made, penalty = rows(packed, 2, tokenizer), SamplingParams(max_tokens=3, presence_penalty=1.0)
    done = made.generate_many([[i] for i in range(20)], [*[penalty] * 19, last])
    assert [c.error for (c,) in done] == [None] * 20
    assert counts[0] <= 4, "two rows run, and all others are over"
