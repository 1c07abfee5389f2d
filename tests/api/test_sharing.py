"""One generator in several hands: threads, closing, and slow readers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from runtime.toy import TableEngine, generator, near
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text import Tokenizer

PARAMS = SamplingParams(max_tokens=40)


@pytest.fixture
def made(tokenizer: Tokenizer) -> Generator:
    target = TableEngine(4, vocab=tokenizer.size)
    return generator(target, near(target, 5, 0.7), tokenizer)


def test_threads_that_generate_wait_for_each_other(made: Generator) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    expected = [made.generate(p, PARAMS).token_ids for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda p: made.generate(p, PARAMS).token_ids, prompts))
    assert found == expected


def test_a_closed_generator_says_so(made: Generator) -> None:
    never_begun, begun = made.stream("a", PARAMS), made.stream("a", PARAMS)
    next(begun)
    made.close()
    for stream in (never_begun, begun):
        with pytest.raises(RequestError, match="was closed; open the bundle again"):
            next(stream)
    with pytest.raises(RequestError, match="was closed"):
        made.generate("a", PARAMS)


def test_a_slow_reader_is_not_slow_decoding(made: Generator) -> None:
    stream = made.stream("a", PARAMS)
    for _ in stream:
        time.sleep(0.02)
    arrivals = stream.completion.timings.arrivals
    rounds = len(arrivals) - 1
    assert (arrivals[-1][0] - arrivals[0][0]) / 1e9 < 0.02 * rounds


@pytest.mark.parametrize("prompt", [b"abc", None, 5, [True], ["a"], [1.5]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(made: Generator, prompt: object) -> None:
    with pytest.raises(RequestError):
        made.stream(prompt, PARAMS)  # type: ignore[arg-type]


def test_ids_may_come_from_numpy(made: Generator) -> None:
    plain = made.generate([5, 6, 7], PARAMS).token_ids
    assert made.generate(np.array([5, 6, 7]), PARAMS).token_ids == plain  # type: ignore[arg-type]
