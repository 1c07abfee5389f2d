"""Greedy rounds in one launch: plain decoding's tokens, and costs that tell their parts apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.numpy_device import NumpyDevice
from runtime.tensorrt_double import GAMMAS, PREFILL, NumpyPlan, draft_profiles, opened
from runtime.toy import TableEngine, near, plain
from specrt.bench.clock import TimedEngine, TimedRounds
from specrt.bench.configuration import Configuration
from specrt.bench.measure import measure
from specrt.cascade import CascadeDrafter
from specrt.costs import Costs
from specrt.draft import Drafter, ModelDrafter
from specrt.drafters import Drafters, undivided
from specrt.engines.tensorrt.engine import TensorRtEngine
from specrt.engines.tensorrt.opening import whole_rounds
from specrt.engines.tensorrt.rounds import Rounds
from specrt.gamma import BuiltGamma, FixedGamma, GammaPolicy, Weight
from specrt.generate import Generator
from specrt.models import Models
from specrt.ngram import NgramDrafter
from specrt.noise import Noise
from specrt.params import SamplingParams
from specrt.rehearsal import Rehearsal
from specrt.round import Round
from specrt.speculate import speculate
from specrt.target import EngineTarget
from specrt.text import Tokenizer
from specrt.tune import measure_costs
from specrt.verify import NOTHING
from specrt.whole import Drafted, LaterRounds

LENGTH = 96
GREEDY = SamplingParams()
PROMPT = list(range(1, 20))


class Noted:
    """Whole rounds that are counted."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self.fits = rounds.fits
        self.ran: list[tuple[int, int]] = []
        """Pending tokens and gamma of each."""

    def run(
        self, pending: Sequence[int], draft_start: int, last: int, target_start: int, gamma: int
    ) -> Drafted:
        self.ran.append((len(pending), gamma))
        return self._rounds.run(pending, draft_start, last, target_start, gamma)


class Pair:
    """Two tables as TensorRT engines on one device, and their rounds."""

    def __init__(
        self, target: TableEngine, draft: TableEngine, broken_at: Collection[int] = ()
    ) -> None:
        self.device = NumpyDevice(1 << 21)
        self.target = opened(self.device, target)
        self.draft = opened(
            self.device, draft, draft_profiles(PREFILL), confidence=True, broken_at=broken_at
        )
        found = whole_rounds(self.target, self.draft)
        self.rounds = Noted(found) if found else None

    def drafter(self, policy: GammaPolicy, params: SamplingParams = GREEDY) -> ModelDrafter:
        both = min(self.target.geometry.vocab_size, self.draft.geometry.vocab_size)
        return ModelDrafter(self.draft, params, Noise(3), policy, both, self.rounds)

    def run(
        self, drafter: Drafter, prompt: Sequence[int], new: int, params: SamplingParams = GREEDY
    ) -> tuple[list[int], list[Round]]:
        tokens = list(prompt)
        limit = min(len(prompt) + new, LENGTH + 1)
        target = EngineTarget(self.target, params, Noise(3))
        rounds = list(speculate(target, drafter, tokens, limit))
        return tokens[len(prompt) :], rounds


class Random:
    """Any gamma and any weight, as long as both are of a policy."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def choose(self) -> int:
        return int(self._rng.integers(0, 9))

    def weigh(self, drafted: int, confidence: float) -> Weight:
        return list(Weight)[self._rng.choice(3, p=[0.1, 0.2, 0.7])]

    def observe(self, round_: Round) -> None:
        assert round_.draft_ns >= 0
        assert round_.verify_ns >= 0


positions = st.sets(st.integers(1, LENGTH), max_size=40)


@given(
    seed=st.integers(0, 1000),
    gamma=st.sampled_from((*range(9), "random", "built")),
    prompt=st.integers(1, 40),
    new=st.integers(1, LENGTH),
    wrong=positions,
    broken=positions,
    cascade=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_whole_rounds_are_plain_decoding(
    seed: int, gamma: Any, prompt: int, new: int, wrong: set[int], broken: set[int], cascade: bool
) -> None:
    target = TableEngine(seed, max_length=LENGTH, memory=1 if cascade else None)
    draft = near(target, seed, 1.0, wrong_at=wrong)
    pair = Pair(target, draft, broken)
    policy: GammaPolicy = Random(seed)
    if gamma == "built":
        policy = BuiltGamma(policy, (0, 2, 3, 8))
    elif gamma != "random":
        policy = FixedGamma(gamma)
    drafter: Drafter = pair.drafter(policy)
    if cascade:
        drafter = CascadeDrafter(NgramDrafter(FixedGamma(3)), drafter)
    text = [(seed + 7 * i) % 29 for i in range(prompt)]
    found, rounds = pair.run(drafter, text, new)
    assert found == plain(target, text, new)
    for round_ in rounds:
        assert len(round_.confidences) == round_.drafted
        assert bool(round_.source) is bool(round_.drafted)
    pair.draft.close()
    pair.target.close()
    assert pair.device.live == []


@pytest.mark.parametrize("place", range(5))
def test_a_draft_without_a_number_is_cut_where_it_begins(place: int) -> None:
    """A round after the prompt drafts 4; the draft has no number to choose the one at `place`."""
    target = TableEngine(2, max_length=LENGTH)
    first = len(PROMPT) + 1 + 5  # the first round keeps 4 and adds one
    pair = Pair(target, near(target, 3, 1.0), {first + place})
    assert pair.rounds is not None
    drafter = pair.drafter(FixedGamma(4))
    tokens = list(PROMPT)
    played = speculate(EngineTarget(pair.target, GREEDY, Noise(3)), drafter, tokens, 60)
    next(played)
    assert next(played).accepted == 4
    assert len(tokens) == first
    proposal = drafter.propose(tokens, 30)
    assert pair.rounds.ran == [(2, 4)]
    kept = min(place, 4)
    assert list(proposal.tokens) == plain(target, tokens, kept)
    assert (proposal == NOTHING) is (place == 0)
    assert proposal.scored is (place == 4)
    wanted = plain(target, PROMPT, 40)
    found, _ = pair.run(pair.drafter(FixedGamma(4)), PROMPT, 40)
    assert found == wanted


def test_tokens_of_other_drafters_are_caught_up_with_pass_by_pass() -> None:
    target = TableEngine(4, max_length=LENGTH)
    pair = Pair(target, near(target, 5, 1.0))
    assert pair.rounds is not None
    drafter = pair.drafter(FixedGamma(3))
    tokens = [*PROMPT, *plain(target, PROMPT, 1)]
    told: list[tuple[bool, bool]] = []
    for more in (0, 0, 1, 2, 0, 3, 0):
        tokens += plain(target, tokens, more)  # somebody else's round
        for at in range(0, len(tokens) - 1, PREFILL):
            pair.target.forward([tokens[at : min(at + PREFILL, len(tokens) - 1)]], at, 1)
        proposal = drafter.propose(tokens, 20)
        assert list(proposal.tokens) == plain(target, tokens, 3)
        told.append((proposal.scored, proposal.caught_up))
        tokens += plain(target, tokens, 1)  # none of them was kept, whatever they were
        drafter.observe(tokens, Round(tokens[-1:], 3, 0, 1, 1, "model"))
    whole, late = (True, False), (False, True)
    assert told == [late, whole, whole, late, whole, late, whole]
    assert pair.rounds.ran == [(1, 3), (2, 3), (1, 3), (1, 3)]


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_near_the_end_of_the_buffers_passes_run_one_by_one(gamma: int) -> None:
    target = TableEngine(6, max_length=LENGTH)
    pair = Pair(target, near(target, 7, 0.8))
    assert pair.rounds is not None
    found, rounds = pair.run(pair.drafter(FixedGamma(gamma)), PROMPT, LENGTH)
    assert found == plain(target, PROMPT, LENGTH)
    assert len(found) == LENGTH + 1 - len(PROMPT)
    assert rounds[-1].drafted <= gamma
    assert pair.rounds.ran


def test_no_round_runs_beyond_the_buffers_of_either_engine() -> None:
    target = TableEngine(6, max_length=LENGTH)
    pair, short = Pair(target, target), Pair(target, TableEngine(7, max_length=60))
    assert pair.rounds is not None
    assert short.rounds is not None
    for gamma in GAMMAS:
        last = LENGTH - gamma - 1
        assert pair.rounds.fits(gamma, 1, last, last)
        assert not pair.rounds.fits(gamma, 1, last, last + 1)
        assert pair.rounds.fits(gamma, 2, last - 1, last)
        assert not pair.rounds.fits(gamma, 3, last - 2, last)
        later = LaterRounds(pair.rounds, 10)
        assert later.fits(gamma, 1, last - 10, last - 10)
        assert not later.fits(gamma, 1, last - 9, last - 9)
        least = 60 - gamma  # what is drafted last is not fed to the draft
        assert short.rounds.fits(gamma, 1, least, least)
        assert short.rounds.fits(gamma, 2, least - 1, least)
        assert not short.rounds.fits(gamma, 1, least + 1, least + 1)
        assert not short.rounds.fits(gamma, 2, least, least + 1)


@pytest.mark.parametrize("vocabulary", [20, 29, 40])
def test_vocabularies_of_other_sizes(vocabulary: int) -> None:
    target = TableEngine(8, max_length=LENGTH, memory=1)
    draft = TableEngine(9, max_length=LENGTH, vocab=vocabulary, memory=1)
    pair = Pair(target, draft)
    assert (pair.rounds is None) is (vocabulary > 29)
    for seed in range(6):
        text = [(seed * 5 + i) % min(29, vocabulary) for i in range(6)]
        found, rounds = pair.run(pair.drafter(FixedGamma(3)), text, 50)
        assert found == plain(target, text, 50)
        assert any(round_.drafted for round_ in rounds[1:]) or max(found[:1]) >= vocabulary
    if pair.rounds is not None:
        assert pair.rounds.ran


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_sampling_takes_its_passes_one_by_one(verifier: str) -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 0.9))
    assert pair.rounds is not None
    params = SamplingParams(temperature=1.0, verifier=verifier)
    pair.run(pair.drafter(FixedGamma(4), params), PROMPT, 40, params)
    assert pair.rounds.ran == []


class Watched:
    """A policy that only notes what it is told."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.confidences: list[float] = []

    def choose(self) -> int:
        return 3

    def weigh(self, drafted: int, confidence: float) -> Weight:
        self.confidences.append(confidence)
        return Weight.MORE

    def observe(self, round_: Round) -> None:
        self.rounds.append(round_)


def test_a_policy_hears_of_rounds_in_one_piece() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 0.7))
    told = Watched()
    _, rounds = pair.run(pair.drafter(told), PROMPT, 60)
    assert [r.tokens for r in told.rounds] == [r.tokens for r in rounds[1:]]
    for heard, ran in zip(told.rounds, rounds[1:], strict=True):
        assert heard.draft_ns + heard.verify_ns == ran.draft_ns + ran.verify_ns
        assert (heard.verify_ns == 0) is heard.caught_up
        assert heard.draft_ns == 0 or heard.caught_up
    assert [r.caught_up for r in told.rounds] == [True] + [False] * (len(told.rounds) - 1)
    assert set(told.confidences) == {1.0}  # nothing that a launch could not act on


SYNC = 20_000
"""What a launch and the wait for it take, besides the kernels."""


class Clock:
    """A clock that kernels and waits move."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


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
    device, wait = pair.device, pair.device.wait

    def waited() -> None:
        wait()
        clock.now += SYNC

    device.wait = waited  # type: ignore[method-assign]
    for engine, price in ((pair.target, prices.target), (pair.draft, prices.draft)):
        plan: Any = engine.model.plan
        assert isinstance(plan, NumpyPlan)
        plan.run = priced(plan.run, price, clock)  # type: ignore[method-assign]
    return pair


def priced(run: Any, price: Callable[[int], int], clock: Clock) -> Any:
    def ran(addresses: Any, width: int, rows: int) -> None:
        run(addresses, width, rows)
        clock.now += price(width)

    return ran


CHEAP = Prices(lambda width: 400_000 + 10_000 * width, lambda width: 40_000 + 1_000 * width)
DEAR = Prices(lambda width: 400_000 + 10_000 * width, lambda width: 390_000)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("specrt.speculate.perf_counter_ns", made)
    return made


def models_of(pair: Pair, clock: Clock, gammas: tuple[int, ...] = (0, *GAMMAS)) -> Models:
    return Models(
        pair.target, pair.draft, gammas, rounds=pair.rounds,
        measure=lambda models: measure_costs(models, clock=clock),
    )  # fmt: skip


@pytest.mark.parametrize("prices", [CHEAP, DEAR], ids=["cheap", "dear"])
def test_costs_of_whole_rounds_are_told_apart(clock: Clock, prices: Prices) -> None:
    pair = timed_pair(clock, prices, 0.0)  # no draft is kept, so that none has two tokens pending
    costs = measure_costs(models_of(pair, clock), clock=clock)
    verify = {g: SYNC + prices.target(g + 1) for g in (0, *GAMMAS)}
    drafts = {g: g * prices.draft(1) for g in (0, *GAMMAS)}
    for gamma in (0, *GAMMAS):
        assert costs.verify(gamma) == pytest.approx(verify[gamma], abs=1)
        assert costs.draft(gamma) == pytest.approx(drafts[gamma], abs=1)
        # To who drafts and verifies in one launch it is one thing, with one wait in it.
        both = undivided(costs)
        assert both.draft(gamma) == 0
        assert both.verify(gamma) == pytest.approx(verify[gamma] + drafts[gamma], abs=2)
    assert list(costs.verify_ns) == sorted(costs.verify_ns)
    assert all(costs.draft_ns[1:])


def test_a_pair_without_whole_rounds_is_measured_pass_by_pass(clock: Clock) -> None:
    pair = timed_pair(clock, CHEAP, 0.0)
    pair.rounds = None
    costs = measure_costs(models_of(pair, clock), clock=clock)
    assert costs.draft(4) == pytest.approx(4 * (SYNC + CHEAP.draft(1)), abs=1)


def test_each_policy_has_the_costs_of_its_own_rounds(clock: Clock) -> None:
    pair = timed_pair(clock, CHEAP, 0.0)
    drafters = Drafters(models_of(pair, clock))
    verify = [SYNC + CHEAP.target(g + 1) for g in range(9)]
    draft = [g * CHEAP.draft(1) for g in range(9)]
    free = [0.0] * 9
    both = [v + d for v, d in zip(verify, draft, strict=True)]
    expected = {
        ("model", True): (both, free),
        ("model", False): (verify, draft),
        ("ngram", True): (verify, free),
        ("ngram", False): (verify, free),
        ("lookup", True): (verify, free),
    }
    for (source, greedy), (verifying, drafting) in expected.items():
        prices = drafters._adaptive(source, greedy)._drift.prices
        assert list(prices.verify) == pytest.approx(verifying, abs=3)
        assert list(prices.draft) == pytest.approx(drafting, abs=3)


def spent(
    pair: Pair, clock: Clock, tokenizer: Tokenizer, params: SamplingParams, **how: Any
) -> float:
    """Return what tokens take as gamma `auto` has it, over what they take in plain decoding."""
    generator = Generator(models_of(pair, clock), tokenizer)
    prompts = [[seed + i for i in range(8)] for seed in range(24)]
    generator.generate(prompts[0], params, gamma="auto", **how)  # measures
    times = []
    for gamma in ("auto", 0):
        began = clock.now
        for prompt in prompts:
            generator.generate(prompt, params, gamma=gamma, **how)
        times.append(clock.now - began)
    return times[0] / times[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_drafting_does_not_pay_auto_leaves_it(
    clock: Clock, tokenizer: Tokenizer, temperature: float
) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=temperature, seed=1)
    pair = timed_pair(clock, DEAR, 1.0, tokenizer)
    assert spent(pair, clock, tokenizer, params) < 1.06


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_drafting_pays_auto_drafts(
    clock: Clock, tokenizer: Tokenizer, temperature: float
) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True, temperature=temperature, seed=1)
    pair = timed_pair(clock, CHEAP, 1.0, tokenizer)
    assert spent(pair, clock, tokenizer, params) < 0.6


def test_lookup_does_not_pay_for_a_draft_model(clock: Clock, tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    pair = timed_pair(clock, DEAR, 0.0, tokenizer, memory=1)
    assert spent(pair, clock, tokenizer, params, drafter="ngram") < 0.75


def test_a_rehearsal_leaves_the_engines_as_they_were(clock: Clock) -> None:
    pair = timed_pair(clock, CHEAP, 0.5)
    rehearsal = Rehearsal(models_of(pair, clock), None, clock)
    rehearsal.fill(clock.now + 10**12)
    for gamma in (0, *GAMMAS):
        assert {t.drafted for t in rehearsal.burst(gamma, 3)} == {gamma}
    found, _ = pair.run(pair.drafter(FixedGamma(4)), PROMPT, 60)
    toy = TableEngine(3, max_length=LENGTH)
    assert found == plain(toy, PROMPT, 60)


def test_a_bench_counts_the_time_of_a_launch_once(
    clock: Clock, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("bench.clock", "reader", "generate"):
        name = f"specrt.{module}.perf_counter_ns"
        monkeypatch.setattr(name, clock)
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


def test_later_rounds_run_further_on_in_both_engines() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 1.0))
    assert pair.rounds is not None
    for model in (pair.target, pair.draft):
        model.forward([PROMPT[:10]], 0, 1)
    later = LaterRounds(pair.rounds, 7)
    found = later.run(PROMPT[9:10], 2, PROMPT[9], 2, 2)
    assert found.tokens == plain(target, PROMPT[:10], 2)
    verified = pair.target.forward([[PROMPT[9], *found.tokens]], 9)
    assert verified.argmax[0].tolist() == plain(target, PROMPT[:10], 3)


def test_timed_rounds_are_the_rounds() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, near(target, 9, 1.0))
    assert pair.rounds is not None
    engine = TimedEngine(pair.target)
    rounds = TimedRounds(pair.rounds, engine)
    for model in (pair.target, pair.draft):
        model.forward([PROMPT[:10]], 0, 1)
    assert rounds.fits(2, 1, 9, 9)
    found = rounds.run(PROMPT[9:10], 9, PROMPT[9], 9, 2)
    assert found.tokens == plain(target, PROMPT[:10], 2)
    assert engine.busy.ns > 0
    assert engine.busy.passes == 0


def test_an_engine_of_another_kind_has_no_whole_rounds() -> None:
    target = TableEngine(8, max_length=LENGTH)
    pair = Pair(target, target)
    assert whole_rounds(pair.target, None) is None
    assert whole_rounds(pair.target, target) is None
    assert whole_rounds(target, pair.draft) is None
    lone: TensorRtEngine = opened(NumpyDevice(1 << 20), target, draft_profiles(PREFILL))
    assert whole_rounds(pair.target, lone) is None  # another device
    assert whole_rounds(pair.draft, pair.draft) is None  # no gamma was built
    assert isinstance(undivided(Costs((1.0,), (0.0,))), Costs)
