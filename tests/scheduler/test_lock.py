"""The engine lock is fair, and signals find nothing half done: closing, interrupts, handlers."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from time import sleep
from typing import Any

import pytest

from scheduler.support import LONG, Gate, alone, rows, target_of
from specrt.aio import Worker
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.scheduler.scheduler import EngineLock
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "pthread_kill"), reason="signals are sent to a thread"
)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture
def made(tokenizer: Tokenizer) -> Generator:
    return rows(packed, 2, tokenizer)


def until_a_thread_waits(lock: EngineLock) -> None:
    while lock._next.acquire(blocking=False):
        lock._next.release()
        sleep(0.001)


class Reader:
    """A thread that generates, held within a pass."""

    def __init__(self, made: Generator) -> None:
        self.gate = Gate(target_of(made))
        self.lock = made._scheduler.lock
        self.ended: list[str] = []

        def read() -> None:
            try:
                made.generate([1, 2], LONG, gamma=0)
                self.ended.append("whole")
            except RequestError as error:
                self.ended.append(str(error))

        self.thread = threading.Thread(target=read)
        self.thread.start()
        assert self.gate.inside.wait(30)

    def signal(self, number: int) -> None:
        """Send the main thread a signal once it waits, and then let the pass end."""
        main = threading.main_thread().ident
        assert main is not None
        assert main == threading.get_ident(), "signals reach the main thread only"

        def send() -> None:
            until_a_thread_waits(self.lock)
            signal.pthread_kill(main, number)
            sleep(0.05)  # for what must not happen while the pass still runs
            self.gate.go.set()

        self.sent = threading.Thread(target=send)
        self.sent.start()

    def handle(self, what: Callable[[], object]) -> None:
        """Send the main thread a signal that runs something, once it waits."""
        signal.signal(signal.SIGUSR1, lambda *_: what())
        self.signal(signal.SIGUSR1)

    def end(self) -> list[str]:
        """Return how the reading ended."""
        self.sent.join()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        self.thread.join(30)
        return self.ended


@pytest.mark.parametrize("closing", [True, False])
def test_a_wait_that_is_interrupted_closes_nothing_and_keeps_no_lock(
    made: Generator, closing: bool
) -> None:
    reader, target = Reader(made), target_of(made)
    reader.signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.close() if closing else made.generate([5], LONG)
    assert reader.end() == ["whole"], "the generator is as open as it was"
    assert not target.closed
    assert made.generate([5], SHORT).finish_reason == "length"
    made.close()
    assert target.closed


def test_a_signals_handler_may_close_while_its_thread_waits_to(made: Generator) -> None:
    reader = Reader(made)
    reader.handle(made.close)
    made.close()
    assert reader.end() == ["this generator was closed; open the bundle again"]


def test_a_signals_handler_may_generate_while_its_thread_waits(
    made: Generator, tokenizer: Tokenizer
) -> None:
    found: list[list[int]] = []
    reader, one = Reader(made), alone(tokenizer)
    reader.handle(lambda: found.append(made.generate([7], SHORT).token_ids))
    found.append(made.generate([8], SHORT).token_ids)
    reader.end()
    assert found == [one.generate([i], SHORT).token_ids for i in (7, 8)]


def order_of_threads() -> list[str]:
    """Let a thread want a lock again that another one waits for."""
    lock, inside, go = EngineLock(), threading.Event(), threading.Event()
    order: list[str] = []

    def again() -> None:
        lock.run(lambda: (inside.set(), go.wait(30)))
        lock.run(lambda: order.append("again"))

    first = threading.Thread(target=again)
    second = threading.Thread(target=lambda: lock.run(lambda: order.append("waited")))
    first.start()
    assert inside.wait(30)
    second.start()
    until_a_thread_waits(lock)
    go.set()
    for thread in (first, second):
        thread.join(30)
    return order


def test_a_thread_that_wants_the_engines_again_is_behind_those_that_wait() -> None:
    for _ in range(10):
        assert order_of_threads() == ["waited", "again"]


def test_interrupts_leave_the_lock_free() -> None:
    """Ctrl-C at any time, a hundred times."""
    lock, interrupts = EngineLock(), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 100:
            try:
                # Again each second: what is raised in a callback of gc is lost.
                signal.setitimer(signal.ITIMER_REAL, 0.00005 + interrupts * 1e-7, 1)
                while True:
                    lock.run(int)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    free: list[int] = []
    other = threading.Thread(target=lambda: lock.run(lambda: free.append(1)), daemon=True)
    other.start()
    other.join(10)
    assert free == [1]
    lock.run(lambda: None)  # nor is it taken for one within a pass


# The thread that runs passes for asyncio


def test_a_step_that_is_broken_off_ends_the_request_that_broke_it_alone(
    made: Generator, tokenizer: Tokenizer
) -> None:
    def leaves(tokens: list[int], row: Any) -> Any:
        if len(tokens) > 8:
            raise SystemExit
        return row

    async def main() -> None:
        broken = made.astream([1], SamplingParams(max_tokens=30, logits_processors=(leaves,)))
        honest = made.astream([2], LONG)
        found = await asyncio.gather(broken.finish(), honest.finish(), return_exceptions=True)
        assert isinstance(found[0], RequestError)
        assert not isinstance(found[1], BaseException), found[1]
        assert found[1].token_ids == alone(tokenizer).generate([2], LONG).token_ids

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_waits_for_the_thread_that_runs_passes(
    made: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has nothing to do any more, and has not ended yet."""
    work = Worker._work
    monkeypatch.setattr(Worker, "_work", lambda self: (work(self), sleep(0.05)))
    asyncio.run(made.agenerate([1], SHORT))
    made.close()
    assert not any(thread.name == "specrt" for thread in threading.enumerate())
