"""The compiled policy of gamma `auto` decides what Python's does, to the last bit."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from gamma_traces import MACHINES

from specrt.speculation import compiled_gamma
from specrt.speculation.auto_gamma import AutoGamma
from specrt.speculation.compiled_gamma import PYTHON, CompiledGamma, CompiledStep, auto_factory
from specrt.speculation.costs import Costs
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.round import Round
from specrt.speculation.shared_step import DraftingRow, SharedStep

pytestmark = pytest.mark.skipif(
    auto_factory() == PYTHON, reason="the library of the kernels was not compiled, or is older"
)

ODD = 0.0, 1.0, math.nan, 7.0, 1e-300, 1 - 2**-53


class Both:
    """A policy in Python and the compiled one, which must agree in every call."""

    def __init__(
        self, costs: Costs, most: int, rival: Both | None = None,
        step: BothSteps | None = None, seen: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        self.most, self.seen = most, Counter[str]() if seen is None else seen
        others = rival and rival.python, step and step.python
        self.python = AutoGamma(costs, most, *others)
        compiled = rival and rival.compiled, step and step.compiled
        self.compiled = CompiledGamma(costs, most, *compiled)
        self.check()

    def check(self) -> None:
        assert self.compiled.tokens == self.python.tokens
        assert self.compiled.rate == self.python.rate
        for after in (1, 256):
            reason = self.python.fallback(after)
            assert self.compiled.fallback(after) == reason
            self.seen["made less" if reason and "made" in reason else str(reason)[:7]] += 1

    def draft(self, confidences: Sequence[float]) -> tuple[int, int]:
        """Draft on both; return the tokens drafted, and those kept."""
        most = self.python.choose()
        assert self.compiled.choose() == most
        assert 0 <= most <= self.most
        self.seen[f"choose {min(most, 2)}"] += 1
        for drafted, confidence in enumerate(confidences[:most], 1):
            decision = self.python.decide(drafted, confidence)
            assert self.compiled.decide(drafted, confidence) is decision
            self.seen[decision.value] += 1
            if decision is not DraftDecision.CONTINUE:
                return drafted, drafted - (decision is DraftDecision.DISCARD)
        return (min(most, len(confidences)),) * 2

    def observe(self, round_: Round) -> None:
        self.python.observe(round_)
        self.compiled.observe(round_)
        self.check()


class BothSteps:
    """What rows share in Python and compiled."""

    def __init__(self, costs: Costs, most: int, *, padded: bool) -> None:
        self.seen = Counter[str]()
        self.python = SharedStep(costs, most, padded=padded)
        self.compiled = CompiledStep(costs, most, padded=padded)

    def begin(self, rows: int, drafting: Sequence[tuple[Both, int, int]]) -> None:
        self.python.begin(rows, [DraftingRow(one.python, *more) for one, *more in drafting])
        self.compiled.begin(rows, [DraftingRow(one.compiled, *more) for one, *more in drafting])
        assert self.compiled.rest == self.python.rest
        if rows > 1:
            self.seen[f"rest {min(self.python.rest, 3)}"] += 1
            chosen = sum(self.python.drafts(one.python) for one, *_ in drafting)
            self.seen["probe" if self.python.probing else f"{chosen} draft"] += 1

    def settle(self, made: int, drafted: Sequence[int], *times: int, steps: int = 1) -> None:
        self.python.settle(made, drafted, *times, steps=steps)
        self.compiled.settle(made, drafted, *times, steps=steps)


class Text:
    """A text that is easy and hard in turn, on a machine that now and then tells nonsense."""

    def __init__(self, seed: int, most: int) -> None:
        self.draw, self.most, self.chance = random.Random(seed), most, 0.5
        self.noise = (0.1, 0.5)[seed % 2]

    def confidences(self) -> list[float]:
        draw = self.draw
        if draw.random() < 0.03:
            self.chance = draw.choice((0.0, 0.05, 0.3, 0.7, 0.95, 1.0))
        sure = [min(1 - 1e-9, max(1e-9, draw.gauss(self.chance, 0.2))) for _ in range(self.most)]
        silent, odd = draw.random() < 0.2, draw.random() < 0.1
        return [1.0 if silent else draw.choice(ODD) if odd else one for one in sure]

    def accepted(self, kept: int) -> int:
        count = 0
        while count < kept and self.draw.random() < self.chance:
            count += 1
        return count

    def ns(self, cost: float) -> int:
        kind = self.draw.random()
        if kind < 0.02:
            return self.draw.choice((0, 1, 10**12, round(cost * 20)))
        return round(cost * self.draw.lognormvariate(0, self.noise))

    def round(self, kept: int, draft_ns: float, verify_ns: float) -> Round:
        right = self.accepted(kept)
        times = self.ns(draft_ns), self.ns(verify_ns)
        return Round([0] * (right + 1), kept, right, *times, caught_up=self.draw.random() < 0.1)


def _machine(seed: int, most: int) -> tuple[Costs, Costs]:
    """Return what passes cost, and what policies are told of it."""
    true = [*MACHINES.values()][seed % len(MACHINES)]
    told = (
        true,
        Costs.assume(most),
        true.of_one_pass(),
        true.scaled(0.4, 3.0),
        true.scaled(2.0, 20.0),
    )[seed // 2 % 5]
    return true, told


def alone(seed: int) -> Counter[str]:
    """Decode a text of one row on both sides; return what they did, by kind."""
    most, seen = (8, 8, 1, 16)[seed % 4], Counter[str]()
    true, told = _machine(seed, most)
    model = Both(told, most, seen=seen)
    free = replace(told, draft_ns=(0.0,) * len(told.draft_ns))
    lookup, text = Both(free, most, model, seen=seen), Text(seed, most)
    for number in range(2000):
        steps = kept = 0
        if cascades := seed % 3 > 0 and number > 50:
            steps, kept = lookup.draft(text.confidences()[: text.draw.randint(0, most)])
        if kept:
            lookup.observe(text.round(kept, 0.0, true.verify(kept)))
            continue
        steps, kept = model.draft(text.confidences())
        round_ = text.round(kept, true.draft(steps), true.verify(kept))
        model.observe(round_)
        if cascades:
            lookup.observe(Round([0], 0, 0, round_.draft_ns, round_.verify_ns))
    return seen


def _step(
    shared: BothSteps, rows: Sequence[tuple[Both, Both, Text]], true: Costs, draw: random.Random
) -> None:
    """Run a step of some rows, each of a model's policy and of a lookup's."""
    able = [row for row in rows if draw.random() < 0.9]
    drafting = [(one, draw.choice((0, 1, 9, 300)), draw.randint(1, 500)) for one, _, _ in able]
    shared.begin(len(rows), drafting)
    kept, passes, rounds = [], [], []
    for model, lookup, text in rows:
        steps, copied = 0, lookup.draft(text.confidences()[: draw.choice((0, 0, 4))])[1]
        if not copied:
            steps, count = model.draft(text.confidences())
        kept.append(copied or count)
        passes.append(steps)
    pass_ns = true.verify(len(rows) + sum(kept) - 1)
    for (model, lookup, text), count, steps in zip(rows, kept, passes, strict=True):
        round_ = text.round(count, true.draft(max(passes)), pass_ns)
        rounds.append(round_)
        (model if steps or not count else lookup).observe(round_)
    if len(rows) > 1 and draw.random() < 0.2:
        steps = draw.randint(1, 20)
        shared.settle(steps * len(rows), (), 0, steps * round(pass_ns), steps=steps)
    if len(rows) > 1 and draw.random() < 0.9:
        shared.settle(
            sum(len(one.tokens) for one in rounds), kept, rounds[0].draft_ns, rounds[0].verify_ns,
            max(passes), sum(map(bool, passes)),
        )  # fmt: skip


def company(seed: int) -> Counter[str]:
    """Run steps of one to four rows on both sides; return what they did, by kind."""
    most, draw = 8, random.Random(seed)
    true, told = _machine(seed, most)
    shared = BothSteps(told, most, padded=seed % 3 == 0)
    free = replace(told, draft_ns=(0.0,) * len(told.draft_ns))
    rows = []
    for number in range(4):
        model = Both(told, most, step=shared, seen=shared.seen)
        lookup = Both(free, most, model, shared, shared.seen)
        rows.append((model, lookup, Text(9 * seed + number, most)))
    busy = rows
    for _ in range(500):
        if draw.random() < 0.05:
            busy = draw.sample(rows, draw.randint(1, 4))
        _step(shared, busy, true, draw)
    return shared.seen


ANSWERS = {"choose 0", "choose 1", "choose 2", "continue", "stop", "discard", "None"}
STEPS = {"made less", "probe", "rest 0", "rest 3", *(f"{rows} draft" for rows in range(5))}


@pytest.mark.parametrize(
    ("run", "seeds", "kinds"),
    [
        (alone, (0, 1, 2, 3), {*ANSWERS, "a round"}),
        (company, (0, 3, 10, 11), STEPS),
        pytest.param(alone, range(4, 20), ANSWERS, marks=pytest.mark.nightly),
        pytest.param(company, range(12), STEPS, marks=pytest.mark.nightly),
    ],
)
def test_it_decides_what_python_does(
    run: Callable[[int], Counter[str]], seeds: Sequence[int], kinds: set[str]
) -> None:
    """Alone and in company, and every kind of answer is compared."""
    seen = sum(map(run, seeds), Counter[str]())
    assert kinds <= {*seen}, seen
    assert run is alone or seen["probe"] > 5


@pytest.mark.parametrize("call", [lambda p: p.decide(10, 0.5), lambda p: p.decide(0, 0.5)])
def test_what_is_out_of_range_is_found(call: Callable[[CompiledGamma], object]) -> None:
    with pytest.raises(AssertionError, match="than there may be"):
        call(CompiledGamma(MACHINES["206 M int8"], 8))


@pytest.mark.parametrize("library", ["missing.so", "libm.so.6"])
def test_without_the_policy_in_the_library_it_is_python_s(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_gamma, "KERNELS", Path(library))
    monkeypatch.setattr(compiled_gamma, "_library", cache(compiled_gamma._library.__wrapped__))
    assert auto_factory() == PYTHON
