"""What fused rounds cost: their parts told apart, every policy with its own, a launch once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest

from specrt.bench.measure import Configuration, measure
from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.pool import Models, as_one_launch
from specrt.text import Tokenizer
from specrt.tuning import PassTimer, measure_costs
from support.tensorrt_double import GAMMAS, LENGTH, PROMPT, Pair, double_of
from support.toy import TableEngine, near, plain
from tuning.conftest import Clock

SYNC = 20_000
"""What a launch and the wait for it take, besides the kernels."""


class Prices(NamedTuple):
    """What passes take on the device, by width."""

    target: Callable[[int], int]
    draft: Callable[[int], int]


def timed_pair(
    clock: Clock, prices: Prices, closeness: float, tokenizer: Tokenizer | None = None, **how: Any
) -> Pair:
    """Return a pair whose passes take what they are said to cost."""
    vocabulary = tokenizer.size if tokenizer else 29
    target = TableEngine(3, max_length=LENGTH, vocab=vocabulary, **how)
    pair = Pair(target, near(target, 4, closeness))
    pair.device.cuda.waited = lambda: clock.move(SYNC)
    for engine, price in ((pair.target, prices.target), (pair.draft, prices.draft)):
        double: Any = double_of(engine)
        double.run = partial(priced, double.run, price, clock)
    return pair


def priced(
    run: Any, price: Callable[[int], int], clock: Clock, addresses: Any, width: int, rows: int
) -> None:
    run(addresses, width, rows)
    clock.move(price(width))


CHEAP = Prices(lambda width: 400_000 + 10_000 * width, lambda width: 40_000 + 1_000 * width)
DEAR = Prices(lambda width: 400_000 + 10_000 * width, lambda width: 390_000)


def models_of(pair: Pair, clock: Clock, gammas: tuple[int, ...] = (0, *GAMMAS)) -> Models:
    return Models(
        pair.target, pair.draft, gammas, rounds=pair.rounds,
        measure=lambda models: measure_costs(models, clock=clock),
    )  # fmt: skip


def test_costs_of_whole_rounds_are_told_apart(clock: Clock) -> None:
    prices = CHEAP
    pair = timed_pair(clock, prices, 0.0)  # no draft is kept, so that none has two tokens pending
    costs = measure_costs(models_of(pair, clock), clock=clock)
    verify = {g: SYNC + prices.target(g + 1) for g in (0, *GAMMAS)}
    drafts = {g: g * prices.draft(1) for g in (0, *GAMMAS)}
    for gamma in (0, *GAMMAS):
        assert costs.verify(gamma) == pytest.approx(verify[gamma], abs=1)
        assert costs.draft(gamma) == pytest.approx(drafts[gamma], abs=1)
        # To who drafts and verifies in one launch it is one thing, with one wait in it.
        both = as_one_launch(costs)
        assert both.draft(gamma) == 0
        assert both.verify(gamma) == pytest.approx(verify[gamma] + drafts[gamma], abs=2)


def spent(
    pair: Pair, clock: Clock, tokenizer: Tokenizer, params: SamplingParams, **how: Any
) -> float:
    """Return what tokens take as gamma `auto` has it, over what they take in plain decoding."""
    generator = Generator(models_of(pair, clock), tokenizer)
    prompts = [[seed + i for i in range(8)] for seed in range(5)]
    generator.generate(prompts[0], params, gamma="auto", **how)  # measures
    times = []
    for gamma in ("auto", 0):
        began = clock.now
        for prompt in prompts:
            generator.generate(prompt, params, gamma=gamma, **how)
        times.append(clock.now - began)
    return times[0] / times[1]


@pytest.mark.parametrize(
    ("prices", "temperature", "most"), [(DEAR, 1.0, 1.06), (CHEAP, 0.0, 0.6)], ids=["dear", "cheap"]
)
def test_auto_drafts_only_where_it_pays(
    clock: Clock, tokenizer: Tokenizer, prices: Prices, temperature: float, most: float
) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=temperature, seed=1)
    pair = timed_pair(clock, prices, 1.0, tokenizer)
    assert spent(pair, clock, tokenizer, params) < most


def test_lookup_does_not_pay_for_a_draft_model(clock: Clock, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    pair = timed_pair(clock, DEAR, 0.0, tokenizer, memory=1)
    assert spent(pair, clock, tokenizer, params, drafter="ngram") < 0.75


def test_a_rehearsal_leaves_the_engines_as_they_were(clock: Clock) -> None:
    pair = timed_pair(clock, CHEAP, 0.5)
    rehearsal = PassTimer(models_of(pair, clock), None, clock)
    rehearsal.fill(clock.now + 10**12)
    for gamma in (0, *GAMMAS):
        assert {t.drafted for t in rehearsal.burst(gamma, 3)} == {gamma}
    found, _ = pair.run(pair.drafter(FixedGamma(4)), PROMPT, 60)
    toy = TableEngine(3, max_length=LENGTH)
    assert found == plain(toy, PROMPT, 60)


def test_a_bench_counts_the_time_of_a_launch_once(
    clock: Clock, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bench.measure", "scheduler.scheduler", "generator"):
        monkeypatch.setattr(f"specrt.{module}.perf_counter_ns", clock)
    pair = timed_pair(clock, CHEAP, 0.9, tokenizer)
    generator = Generator(models_of(pair, clock), tokenizer)
    compared = [Configuration(0, "none"), Configuration(4, "model"), Configuration(2, "ngram")]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    found = measure(generator, [PROMPT, PROMPT[:7]], compared, params, repeats=2)
    for samples in found.values():
        for sample in samples:
            assert sample.outside_us == 0  # no time passes but on the device
            assert sample.target.passes == sample.counts.rounds
            assert min(sample.stages) >= 0
    whole = found[Configuration(4, "model")][0]
    # The first round catches up with the prompt pass by pass; all others are one launch.
    assert whole.draft.passes == 5
    assert whole.counts.drafted > 20
