"""How many tokens several rows make: counted over the same prompts, held to the same texts."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.support import rows
from specrt.bench import batch as throughput
from specrt.bench.batch import measure_throughput
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.text.tokenizer import Tokenizer
from support.rows import packed

PROMPTS = [[i, 2, 3] for i in range(6)]


@pytest.fixture
def made(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Generator:
    """Four rows, and a clock that counts passes of the target as a millisecond each."""
    made = rows(packed, 4, tokenizer)
    target: Any = made.models.target
    monkeypatch.setattr(throughput, "perf_counter_ns", lambda: len(target.passes) * 1_000_000)
    return made


def test_texts_that_differ_are_counted(made: Generator) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0)  # no seed: another text each time
    found = measure_throughput(made, PROMPTS, [1, 2], [0], params, repeats=2)
    assert [t.same for t in found] == [12, 0]


def test_a_failure_is_told(made: Generator) -> None:
    bad = SamplingParams(allowed_token_ids=(5,), no_repeat_ngram_size=1)
    with pytest.raises(RequestError, match="a completion failed while it was measured: no token"):
        measure_throughput(made, PROMPTS, [1], [0], bad, repeats=1)
