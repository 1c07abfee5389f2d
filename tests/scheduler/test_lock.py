"""Whose turn it is: nobody is kept waiting for ever, and signals find nothing half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import pytest

from runtime.rows import packed
from scheduler.support import LONG, Gate, alone, rows, target_of
from specrt.errors import EngineError, RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.scheduler.scheduler import EngineLock
from specrt.text import Tokenizer

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "pthread_kill"), reason="signals are sent to a thread"
)


@pytest.fixture
def made(tokenizer: Tokenizer) -> Generator:
    return rows(packed, 2, tokenizer)


def until_somebody_waits(turn: EngineLock) -> None:
    while turn._next.acquire(blocking=False):
        turn._next.release()
        sleep(0.001)


def signalled(turn: EngineLock, gate: Gate, number: int) -> threading.Thread:
    """Send the main thread a signal once it waits for a turn, and then let the pass end."""
    main = threading.main_thread().ident
    assert main == threading.get_ident(), "signals reach the main thread only"

    def send() -> None:
        until_somebody_waits(turn)
        assert main is not None
        signal.pthread_kill(main, number)
        sleep(0.05)  # for what must not happen while the pass still runs
        gate.go.set()

    sent = threading.Thread(target=send)
    sent.start()
    return sent


@pytest.fixture
def on_signal() -> Iterator[Callable[[Callable[[], object]], int]]:
    before = signal.getsignal(signal.SIGUSR1)

    def handled(what: Callable[[], object]) -> int:
        signal.signal(signal.SIGUSR1, lambda *_: what())
        return signal.SIGUSR1

    yield handled
    signal.signal(signal.SIGUSR1, before)


def reading(made: Generator) -> tuple[Gate, threading.Thread, list[BaseException | None]]:
    """Begin a stream in a thread, and hold it within a pass."""
    gate = Gate(target_of(made))
    ended: list[BaseException | None] = []

    def read() -> None:
        try:
            made.generate([1, 2], LONG, gamma=0)
            ended.append(None)
        except RequestError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert gate.inside.wait(30)
    return gate, reader, ended


def test_closing_that_is_interrupted_closes_no_engine_under_a_pass(made: Generator) -> None:
    gate, reader, ended = reading(made)
    closed_within: list[bool] = []
    engine: Any = made.models.target
    honest = engine.close

    def close() -> None:
        closed_within.append(reader.is_alive() and not gate.go.is_set())
        honest()

    engine.close = close
    sent = signalled(made._scheduler.lock, gate, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.close()
    sent.join()
    reader.join(30)
    assert closed_within == []
    assert ended == [None], "the generator is as open as it was"
    made.close()
    assert closed_within == [False]


def test_who_is_interrupted_while_he_waits_keeps_no_turn(made: Generator) -> None:
    gate, reader, ended = reading(made)
    sent = signalled(made._scheduler.lock, gate, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.generate([5], LONG)
    sent.join()
    reader.join(30)
    assert ended == [None]
    assert made.generate([5], SamplingParams(max_tokens=3, ignore_eos=True)).finish_reason


def test_a_signals_handler_may_close_while_its_thread_waits_to(
    made: Generator, on_signal: Callable[[Callable[[], object]], int]
) -> None:
    gate, reader, ended = reading(made)
    sent = signalled(made._scheduler.lock, gate, on_signal(made.close))
    made.close()
    sent.join()
    reader.join(30)
    assert [str(error) for error in ended] == ["this generator was closed; open the bundle again"]


def test_a_signals_handler_may_generate_while_its_thread_waits(
    made: Generator, tokenizer: Tokenizer, on_signal: Callable[[Callable[[], object]], int]
) -> None:
    found: list[list[int]] = []
    gate, reader, _ = reading(made)
    short = SamplingParams(max_tokens=5, ignore_eos=True)
    number = on_signal(lambda: found.append(made.generate([7], short).token_ids))
    sent = signalled(made._scheduler.lock, gate, number)
    found.append(made.generate([8], short).token_ids)
    sent.join()
    reader.join(30)
    one = alone(tokenizer)
    assert found == [one.generate([i], short).token_ids for i in (7, 8)]


def test_who_had_a_turn_is_behind_those_who_wait() -> None:
    for _ in range(30):
        turn, inside, go = EngineLock(), threading.Event(), threading.Event()
        taken: list[str] = []

        def hold(inside: threading.Event = inside, go: threading.Event = go) -> None:
            inside.set()
            assert go.wait(30)

        def again(turn: EngineLock = turn, taken: list[str] = taken) -> None:
            turn.run(hold)
            turn.run(lambda: taken.append("again"))

        def waits(turn: EngineLock = turn, taken: list[str] = taken) -> None:
            turn.run(lambda: taken.append("waited"))

        threads = [threading.Thread(target=again), threading.Thread(target=waits)]
        threads[0].start()
        assert inside.wait(30)
        threads[1].start()
        until_somebody_waits(turn)
        go.set()
        for thread in threads:
            thread.join(30)
        assert taken == ["waited", "again"]


def test_time_stands_still_while_nobody_has_a_turn() -> None:
    turn = EngineLock()
    turn.run(lambda: None)
    before = turn.now_ns()
    sleep(0.002)
    assert turn.now_ns() == before
    assert turn.run(turn.now_ns) < before + 1_000_000
    inside = turn.run(lambda: (turn.now_ns(), sleep(0.002), turn.now_ns()))
    assert inside[2] >= inside[0] + 2_000_000


def test_interrupts_leave_the_turn_free() -> None:
    """Ctrl-C at any time, a few hundred times."""
    turn, interrupts = EngineLock(), 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00005 + interrupts * 1e-7)
                while True:
                    turn.run(int)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    free: list[int] = []
    other = threading.Thread(target=lambda: turn.run(lambda: free.append(1)), daemon=True)
    other.start()
    other.join(10)
    assert free == [1]
    turn.run(lambda: None)  # nor is it taken for one that is within a turn


def test_a_step_that_is_broken_off_ends_who_broke_it_alone(tokenizer: Tokenizer) -> None:
    """In the thread that runs passes for asyncio, as elsewhere."""
    import asyncio

    made, one = rows(packed, 2, tokenizer), alone(tokenizer)
    params = SamplingParams(max_tokens=30, ignore_eos=True)

    def leaves(tokens: list[int], row: Any) -> Any:
        if len(tokens) > 8:
            raise SystemExit
        return row

    async def main() -> None:
        broken = made.astream(
            [1], SamplingParams(max_tokens=30, ignore_eos=True, logits_processors=(leaves,))
        )
        honest = made.astream([2], params)
        found = await asyncio.gather(broken.finish(), honest.finish(), return_exceptions=True)
        assert isinstance(found[0], RequestError)
        assert not isinstance(found[1], BaseException), found[1]
        assert found[1].token_ids == one.generate([2], params).token_ids

    asyncio.run(asyncio.wait_for(main(), 60))


def test_closing_waits_for_the_thread_that_runs_passes(tokenizer: Tokenizer) -> None:
    """Also where it has nothing to do any more, and has not ended yet."""
    import asyncio

    made = rows(packed, 2, tokenizer)
    asyncio.run(made.agenerate([1], SamplingParams(max_tokens=2)))
    thread = made._worker._last
    assert thread is not None
    made.close()
    assert not thread.is_alive()


def test_a_request_that_is_over_does_not_fail(made: Generator) -> None:
    stream = made.stream([1, 2], SamplingParams(max_tokens=3, ignore_eos=True), gamma=0)
    next(stream)
    request = next(row.request for row in made._scheduler._slots if row.request is not None)
    stream.finish()
    request.fail(EngineError("too late"))
    assert request.error is None
