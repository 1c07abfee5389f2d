"""How prompts are run: in turn, warm, each configuration for itself, and timed apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrt.bench.lossless import compare_outputs
from specrt.bench.measure import (
    PLAIN,
    Configuration,
    Samples,
    configurations,
    in_turn,
    measure,
    shared_gaps,
)
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.toy import TableEngine, generator, near

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture
def opened(tokenizer: Tokenizer) -> Generator:
    target = TableEngine(vocab=270, memory=3)
    return generator(target, near(target, 1, 0.8), tokenizer)


def run(opened: Generator, compared: list[Configuration], **options: Any) -> Samples:
    params = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 0, **options})
    told: list[float] = []
    found = measure(opened, PROMPTS, compared, params, repeats=2, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1
    return found


def test_every_prompt_runs_at_every_configuration_in_each_repeat(opened: Generator) -> None:
    compared = configurations([2, 4], ["model"])
    samples = run(opened, compared)
    assert list(samples) == compared
    for found in samples.values():
        assert [s.pair for s in found] == [(p, r) for r in range(2) for p in range(3)]
        assert all(len(s.tokens) == 20 for s in found)
        assert all(s.counts.emitted == len(s.gaps_ns) == 19 for s in found)
        assert all(s.target.passes == s.counts.rounds for s in found)
        for s in found:
            assert sum(s.stages) * s.counts.rounds * 1e3 == pytest.approx(s.decode_ns)
            assert min(s.stages) >= 0
    assert all(s.draft.passes == 0 for s in samples[PLAIN])
    assert all(s.counts.drafted > 0 for s in samples[compared[1]])
    assert compare_outputs(samples, None, "fp32").differences == ()
    sampled = run(opened, configurations([3], ["model"]), temperature=0.9, top_p=0.8)
    assert compare_outputs(sampled, None, "fp32").differences == ()
    assert len({s.tokens for s in sampled[PLAIN]}) == len(PROMPTS)
    with pytest.raises(RequestError, match="is nothing to measure"):
        measure(opened, [], [PLAIN], SamplingParams(), repeats=3)


@given(st.integers(1, 9), st.integers(0, 6))
def test_each_configuration_has_each_place_once(count: int, cycle: int) -> None:
    compared = configurations(range(1, count), ["model"])
    turns = [in_turn(compared, cycle * count + i) for i in range(count)]
    for place in zip(*turns, strict=True):
        assert sorted(map(str, place)) == sorted(map(str, compared))
    if count > 2:  # and none always follows the same one
        backwards = [in_turn(compared, (cycle + 1) * count + i) for i in range(count)]
        before = {(t[i - 1], t[i]) for t in turns + backwards for i in range(1, count)}
        assert {(b, a) for a, b in before} == before


def test_tokens_that_arrive_together_share_their_gap() -> None:
    assert shared_gaps([(100, 1), (400, 3), (450, 1)]) == (100.0, 100.0, 100.0, 50.0)
