"""How many tokens several rows make: counted over the same prompts, held to the same texts."""

from __future__ import annotations

import pytest

from specrt.bench import batch as throughput
from specrt.bench.batch import (
    BatchLoad,
    Throughput,
    check_rows,
    measure_throughput,
    throughput_table,
)
from specrt.errors import RequestError
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.costs import Costs
from specrt.speculation.pool import Models
from specrt.text import Tokenizer
from support.rows import packed
from support.toy import TableEngine, near

COSTS = Costs((100.0, *(105.0 + 5 * i for i in range(40))), tuple(10.0 * g for g in range(9)))
PROMPTS = [[i, 2, 3] for i in range(6)]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that counts passes of the target as a millisecond each."""
    now = [0]
    monkeypatch.setattr(throughput, "perf_counter_ns", lambda: now[0])
    return now


def rows(tokenizer: Tokenizer, now: list[int], batch: int = 4) -> Generator:
    target = TableEngine(4, vocab=tokenizer.size)
    engine, draft = packed(target, batch), packed(near(target, 5, 0.9), batch)
    forward = engine.forward_rows

    def timed(feeds: object) -> object:
        now[0] += 1_000_000
        return forward(feeds)  # type: ignore[arg-type]

    engine.forward_rows = timed  # type: ignore[assignment,method-assign]
    models = Models(engine, draft, tuple(range(9)), measure=lambda _: COSTS)
    return Generator(models, tokenizer)


def test_rows_are_measured_over_the_same_prompts(tokenizer: Tokenizer, ticks: list[int]) -> None:
    made, done = rows(tokenizer, ticks), list[float]()
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


def test_texts_that_differ_are_counted(tokenizer: Tokenizer, ticks: list[int]) -> None:
    made = rows(tokenizer, ticks)
    params = SamplingParams(max_tokens=20, temperature=1.0)  # no seed: another text each time
    found: list[Throughput] = measure_throughput(made, PROMPTS, [1, 2], [0], params, repeats=2)
    assert [t.same for t in found] == [12, 0]


def test_too_many_rows_and_failures_are_told(tokenizer: Tokenizer, ticks: list[int]) -> None:
    made = rows(tokenizer, ticks)
    check_rows(made, [1, 4])
    for wrong in (0, 5):
        with pytest.raises(RequestError, match=rf"{wrong} rows at once: this .* built for 1 to 4"):
            check_rows(made, [1, wrong])
    bad = SamplingParams(allowed_token_ids=(5,), no_repeat_ngram_size=1)
    with pytest.raises(RequestError, match="a completion failed while it was measured: no token"):
        measure_throughput(made, PROMPTS, [1], [0], bad, repeats=1)
