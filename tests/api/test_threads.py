"""One generator in many threads that read, generate, cancel, forget and close at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.support import Build, alone, rows
from specrt.completion import Completion, Stream
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.rows import packed, padded

CLOSED = "this generator was closed; open the bundle again"
Act = tuple[str, int]
ACTS = st.tuples(
    st.sampled_from(["read", "read", "read", "generate", "many", "cancel", "drop", "forget"]),
    st.integers(0, 7),
)
THREADS = st.lists(st.lists(ACTS, min_size=1, max_size=8), min_size=2, max_size=5)


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Let threads take turns between any two steps of Python."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def params_of(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=6 + 5 * number, temperature=0.5 * (number % 2), seed=number, ignore_eos=True
    )


def together(works: list[Callable[[], None]]) -> list[BaseException]:
    """Run works at once, each in a thread; return what they raised."""
    raised: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            begin.wait()
            work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return raised


def play(
    made: Generator, shared: list[Stream], acts: list[Act], whole: list[tuple[int, Completion]]
) -> None:
    """Do what a script says, and keep the completions that came whole."""
    for act, number in acts:
        prompt, params, stream = [number, 1], params_of(number), shared[number]
        if act == "read":  # one stream in several threads: each chunk goes to one of them
            next(stream, None)
        elif act == "generate":
            whole.append((number, made.generate(prompt, params)))
        elif act == "many":
            whole += [(number, done) for (done,) in made.generate_many([prompt, prompt], params)]
        elif act == "cancel":
            stream.cancel()
        elif act == "drop":
            stream.close()
        else:
            made.forget()


@pytest.mark.parametrize("build", [padded, packed])
@settings(max_examples=6, deadline=None)
@given(batch=st.integers(2, 3), scripts=THREADS, late=st.none() | st.integers(0, 30))
def test_whatever_threads_do_each_gets_its_text(
    build: Build, tokenizer: Tokenizer, batch: int, scripts: list[list[Act]], late: int | None
) -> None:
    made, one = rows(build, batch, tokenizer), alone(tokenizer)
    engine: Any = made.models.target
    shared = [made.stream([i, 1], params_of(i)) for i in range(8)]
    whole: list[tuple[int, Completion]] = []
    used: list[str] = []

    def close() -> None:
        for _ in range(late or 0):
            next(shared[(late or 0) % 8], None)
        made.close()
        engine.forward = engine.forward_rows = lambda *_: used.append("after closing")

    works: list[Callable[[], None]] = [partial(play, made, shared, acts, whole) for acts in scripts]
    raised = together(works if late is None else [*works, close, made.close])
    expected = [one.generate([i, 1], params_of(i)).token_ids for i in range(8)]
    assert all(done.token_ids == expected[number] for number, done in whole)
    if late is not None:
        assert all(isinstance(error, RequestError) for error in raised), raised
        assert {str(error) for error in raised} <= {CLOSED}
        assert used == []
        return
    assert raised == []
    ended = {n for acts in scripts for act, n in acts if act in ("cancel", "drop")}
    for number, stream in enumerate(shared):
        found = stream.finish().token_ids
        assert found == expected[number][: len(found)]
        assert number in ended or len(found) == len(expected[number])
