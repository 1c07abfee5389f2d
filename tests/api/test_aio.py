"""Streams for asyncio: chunks without blocking, rows that are free at once, no thread left."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.support import LONG, Gate, alone, rows, target_of
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.rows import packed


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), f"{thread} was left running"


def played(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a loop in which nothing goes wrong unseen."""
    unseen: list[Any] = []

    async def watched() -> Any:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unseen.append(context))
        return await asyncio.wait_for(main, 60)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = asyncio.run(watched())
        gc.collect()
    assert unseen == []
    return found


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_a_cancelled_task_frees_its_row_while_the_pass_still_runs(made: Generator) -> None:
    async def main() -> None:
        stream = made.astream([1, 2], LONG)
        await anext(stream)
        # It runs ahead, until no thread runs passes.
        await until(lambda: all(thread.name != "specrt" for thread in threading.enumerate()))
        gate = Gate(target_of(made))
        task = asyncio.create_task(stream.finish())
        await until(gate.inside.is_set)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(task, 0.01)
        assert not gate.go.is_set(), "it waited for the pass"
        assert stream.completion.finish_reason == "cancelled"
        gate.go.set()
        async with made.astream([1, 2], LONG) as stream:
            await anext(stream)
        assert stream.completion.finish_reason is None
        assert await anext(stream, None) is None

    played(main())


@pytest.mark.parametrize("how", ["aclose", "thread", "close"])
def test_whoever_waits_is_told_when_another_task_ends_it(made: Generator, how: str) -> None:
    async def main() -> None:
        gate = Gate(target_of(made))
        stream, later = made.astream([1, 2], LONG), made.astream([3, 2], LONG)
        task = asyncio.create_task(stream.finish())
        await until(gate.inside.is_set)
        with pytest.raises(RequestError, match="another task reads this stream"):
            await anext(stream)
        if how == "close":
            closing = asyncio.create_task(asyncio.to_thread(made.close))
            gate.go.set()
            await closing
            for waiting in (task, anext(later)):
                with pytest.raises(RequestError, match="this generator was closed"):
                    await waiting
            return
        if how == "aclose":
            await stream.aclose()
        else:
            await asyncio.to_thread(stream.cancel)
        done = await task  # while the pass still runs
        assert done.token_ids == []
        assert done.finish_reason == (None if how == "aclose" else "cancelled")
        gate.go.set()

    played(main())


ACTS = st.tuples(st.integers(0, 5), st.sampled_from(["read", "read", "cancel", "task", "aclose"]))


@settings(max_examples=4, deadline=None)
@given(acts=st.lists(ACTS, max_size=30))
def test_the_rest_is_as_alone(tokenizer: Tokenizer, acts: list[tuple[int, str]]) -> None:
    made, one = rows(packed, 2, tokenizer), alone(tokenizer)
    params = [SamplingParams(max_tokens=10 + 6 * i, temperature=0.5, seed=i) for i in range(6)]

    async def main() -> None:
        streams = [made.astream([i, 1], params[i]) for i in range(6)]
        for number, act in acts:
            stream = streams[number]
            if act == "read":
                await anext(stream, None)
            elif act == "task":
                task = asyncio.create_task(stream.finish())
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            elif act == "cancel":
                stream.cancel()
            else:
                await stream.aclose()
        ended = {number for number, act in acts if act != "read"}
        for number, stream in enumerate(streams):
            done, whole = await stream.finish(), one.generate([number, 1], params[number])
            assert done.token_ids == whole.token_ids[: len(done.token_ids)]
            assert number in ended or done.text == whole.text

    played(main())
