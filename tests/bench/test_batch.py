"""How many tokens several rows make: counted over the same prompts, held to the same texts."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.support import rows
from specrt.bench import batch as throughput
from specrt.bench.batch import BatchLoad, measure_throughput, throughput_table
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


def test_rows_are_measured_over_the_same_prompts(made: Generator) -> None:
    done: list[float] = []
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    found = measure_throughput(
        made, PROMPTS, [1, 2, 4], [0, 3], params, repeats=3, progress=done.append
    )
    assert [t.load for t in found] == [BatchLoad(n, g) for g in (0, 3) for n in (1, 2, 4)]
    by = {t.load: t for t in found}
    assert all(t.same == t.completions == 18 for t in found)
    # Six prompts of twenty tokens: a pass each alone, and as long as the longest row's together.
    assert by[BatchLoad(1, 0)].tokens_per_second.median == pytest.approx(1000)
    assert by[BatchLoad(2, 0)].gain.median == pytest.approx(2.0)
    assert by[BatchLoad(4, 0)].gain.median == pytest.approx(3.0)  # two of six wait for a row
    assert by[BatchLoad(1, 3)].gain == (1, 1, 1)
    assert by[BatchLoad(1, 3)].overall.median > 1.5
    assert by[BatchLoad(1, 0)].drafted_per_round == 0 < by[BatchLoad(4, 3)].drafted_per_round
    assert done[-1] == 1
    columns, cells = throughput_table(found)
    assert "over 1 row, gamma 0" in columns
    assert all(len(line) == len(columns) and line[-1] == "18 of 18" for line in cells)
    assert found[0].to_json()["gain"]["median"] == 1.0


def test_texts_that_differ_are_counted(made: Generator) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0)  # no seed: another text each time
    found = measure_throughput(made, PROMPTS, [1, 2], [0], params, repeats=2)
    assert [t.same for t in found] == [12, 0]


def test_a_failure_is_told(made: Generator) -> None:
    bad = SamplingParams(allowed_token_ids=(5,), no_repeat_ngram_size=1)
    with pytest.raises(RequestError, match="a completion failed while it was measured: no token"):
        measure_throughput(made, PROMPTS, [1], [0], bad, repeats=1)
