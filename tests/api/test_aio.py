"""Streams for asyncio: chunks without blocking, rows that are free at once, no thread left."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from scheduler.support import LONG, Gate, target_of
from specrt.errors import RequestError
from specrt.generator import Generator


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
