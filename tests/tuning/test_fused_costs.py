"""What fused rounds cost: their parts told apart, every policy with its own, a launch once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from specrt.generator import Generator
from specrt.params import SamplingParams
from specrt.speculation.gamma import FixedGamma
from specrt.speculation.pool import Models, as_one_launch
from specrt.text.tokenizer import Tokenizer
from specrt.tuning.pass_timer import PassTimer, measure_costs
from support.gpu_double import GAMMAS, LENGTH, PROMPT, Pair, double_of
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

    def timed(run: Any, price: Callable[[int], int], addresses: Any, width: int, rows: int) -> None:
        run(addresses, width, rows)
        clock.move(price(width))

    for engine, price in ((pair.target, prices.target), (pair.draft, prices.draft)):
        double: Any = double_of(engine)
        double.run = partial(timed, double.run, price)
    return pair


def models_of(pair: Pair) -> Models:
    return Models(pair.target, pair.draft, (0, *GAMMAS), rounds=pair.rounds)


CHEAP = Prices(lambda width: 400_000 + 10_000 * width, lambda width: 40_000 + 1_000 * width)
DEAR = Prices(lambda width: 400_000 + 10_000 * width, lambda width: 390_000)


def test_costs_of_whole_rounds_are_told_apart(clock: Clock) -> None:
    pair = timed_pair(clock, CHEAP, 0.0)  # no draft is kept, so that none has two tokens pending
    costs = measure_costs(models_of(pair), clock=clock)
    both = as_one_launch(costs)  # to who drafts and verifies in one launch, with one wait in it
    for gamma in (0, *GAMMAS):
        verify, drafts = SYNC + CHEAP.target(gamma + 1), gamma * CHEAP.draft(1)
        assert costs.verify(gamma) == pytest.approx(verify, abs=1)
        assert costs.draft(gamma) == pytest.approx(drafts, abs=1)
        assert both.draft(gamma) == 0
        assert both.verify(gamma) == pytest.approx(verify + drafts, abs=2)


@pytest.mark.parametrize(
    ("prices", "closeness", "drafter", "temperature", "most"),
    [
        (DEAR, 1.0, "model", 1.0, 1.06),
        (DEAR, 0.0, "ngram", 0.0, 0.75),  # lookup does not pay for a draft model
    ],
    ids=["dear", "lookup"],
)
def test_auto_drafts_only_where_it_pays(
    clock: Clock, tokenizer: Tokenizer, prices: Prices, closeness: float, drafter: str,
    temperature: float, most: float,
) -> None:  # fmt: skip
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=temperature, seed=1)
    pair = timed_pair(clock, prices, closeness, tokenizer, memory=1 if drafter == "ngram" else None)
    models = models_of(pair)
    made = Generator(replace(models, costs=measure_costs(models, clock=clock)), tokenizer)
    prompts = [[seed + i for i in range(8)] for seed in range(5)]
    made.generate(prompts[0], params, gamma="auto", drafter=drafter)
    spent = []
    for gamma in ("auto", 0):
        began = clock.now
        for prompt in prompts:
            made.generate(prompt, params, gamma=gamma, drafter=drafter)
        spent.append(clock.now - began)
    assert spent[0] / spent[1] < most


def test_a_rehearsal_leaves_the_engines_as_they_were(clock: Clock) -> None:
    pair = timed_pair(clock, CHEAP, 0.5)
    rehearsal = PassTimer(models_of(pair), None, clock)
    rehearsal.fill(clock.now + 10**12)
    for gamma in (0, *GAMMAS):
        assert {t.drafted for t in rehearsal.burst(gamma, 3)} == {gamma}
    found, _ = pair.run(pair.drafter(FixedGamma(4)), PROMPT, 60)
    toy = TableEngine(3, max_length=LENGTH)
    assert found == plain(toy, PROMPT, 60)
