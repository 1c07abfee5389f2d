"""Every verifier leaves the target's own distribution: by enumeration, and by long samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, residual
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.round import Proposal, Round, Verdict
from specrt.speculation.target import VERIFIERS, match, match_greedy, rejection
from speculation.support import (
    ALPHA,
    GREEDY,
    LONG,
    PROMPT,
    SETTINGS,
    VOCAB,
    WARM,
    Floats,
    Whim,
    accepts_everything,
    chain,
    dense,
    drafter_named,
    draws_the_correction_from_the_target,
    law_of,
    laws,
    likelihood,
    loop,
    surprise,
    swaps_target_and_draft,
)
from support.toy import TableEngine, near

DRAFTING = [name for name, spec in DRAFTERS.items() if spec.sources]

# The rules by themselves


def random_law(rng: np.random.Generator) -> Distribution:
    probs = rng.dirichlet(np.full(VOCAB, rng.choice([0.2, 1.0, 5.0])))
    probs[rng.random(VOCAB) < 0.3] = 0.0
    if not probs.any():
        probs[rng.integers(VOCAB)] = 1.0
    return dense(*probs / probs.sum())


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
def test_every_rule_accepts_a_prefix_and_looks_no_further(verifier: Any, certain: bool) -> None:
    lengths = Counter[int]()
    for seed in range(300):
        rng, noise = np.random.default_rng(seed), Noise(seed)
        count, target = seed % 6, [random_law(rng) for _ in range(6)]
        drawn_from = [random_law(rng) if rng.random() < 0.3 else p for p in target]
        drafted = [
            q.draw(noise, verifier.draft_noise, 100 + i) for i, q in enumerate(drawn_from[:count])
        ]
        looked: list[int] = []

        def p(i: int, target: Any = target, looked: list[int] = looked) -> Distribution:
            looked.append(i)
            found: Distribution = target[i]
            return found

        proposal = Proposal(drafted, None if certain else drawn_from[:count])
        accepted, following, *_ = verifier.accept(proposal, p, noise, 100)
        assert sorted({*looked}) == list(range(accepted + 1))
        assert following in target[accepted].ids
        assert all(target[i].prob(token) > 0 for i, token in enumerate(drafted[:accepted]))
        lengths[accepted] += 1
        # A draft of the target's own distribution is never refused.
        equal = [t.draw(noise, verifier.draft_noise, 100 + i) for i, t in enumerate(target)]
        if not certain:
            same = verifier.accept(Proposal(equal[:5], target[:5]), p, noise, 100)
            assert same.accepted == 5
    assert set(lengths) == set(range(6))


@pytest.mark.parametrize("length", range(6))
def test_match_accepts_the_longest_equal_prefix(length: int) -> None:
    chosen = [10, 11, 12, 13, 14, 15]
    for wrong in range(length + 1):
        drafted = [t if i != wrong else 99 for i, t in enumerate(chosen[:length])]
        assert match(drafted, chosen.__getitem__) == Verdict(wrong, chosen[wrong])
        assert match_greedy(drafted, chosen) == Verdict(wrong, chosen[wrong])


class Fixed(Noise):
    """Noise whose uniform numbers are given."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def uniform(self, purpose: Any, position: int) -> float:
        return next(self._numbers)


def exact_law(p: Distribution, q: Distribution | None, token: int) -> Floats:
    """Return the law of the first token under `rejection`, summed over every outcome.

    The chance of acceptance is found by bisection of the rule's own decision, and the correction
    taken from `residual`, so this checks the code and not a copy of its formula.
    """
    law = np.zeros(VOCAB)
    drawn = q or dense(*(float(i == token) for i in range(VOCAB)))
    for x, chance in zip(drawn.ids, drawn.probs, strict=True):
        proposal = Proposal([int(x)], [q] if q else None)
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            kept = rejection(proposal, lambda i: p, Fixed(middle), 0).accepted
            low, high = (middle, high) if kept else (low, middle)
        law[x] += chance * low
        rest = residual(p, q, int(x))
        assert set(rest.ids) <= set(p.ids)
        assert rest.probs.sum() == pytest.approx(1.0)
        law[rest.ids] += chance * (1 - low) * rest.probs
    return law


@pytest.mark.parametrize("certain", [False, True])
def test_one_step_of_rejection_has_exactly_the_targets_law(certain: bool) -> None:
    rng = np.random.default_rng(0)
    for number in range(30):
        p, q = random_law(rng), None if certain else random_law(rng)
        np.testing.assert_allclose(exact_law(p, q, number % VOCAB), law_of(p), atol=1e-12)
    only = dense(0.0, 1.0)
    assert residual(p, p, 0) is p
    assert residual(only, None, 1) is only  # of which nothing is left


# Long samples, cut into thousands of two-token continuations


def in_turn(source: str) -> GammaPolicy:
    """Let lookup propose at some times only, so that a cascade's model has its turns."""
    return Whim(5) if source == "lookup" else FixedGamma(3)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_sample_is_distributed_as_the_targets_own(verifier: str, drafter: str) -> None:
    chance, counts = likelihood(verifier, drafter, in_turn)
    assert chance > ALPHA
    assert len(counts) == len(DRAFTERS[drafter].sources)
    assert all(min(both) > 30 for both in counts.values()), "both outcomes, often"


@pytest.mark.nightly
@pytest.mark.parametrize("gamma", [1, 4, in_turn, lambda _: Whim(5)])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTING)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_long_samples_of_all_options_are_too(
    verifier: str, drafter: str, setting: str, gamma: Any
) -> None:
    assert likelihood(verifier, drafter, gamma, setting, LONG)[0] > ALPHA


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        (accepts_everything, "model"),
        (draws_the_correction_from_the_target, "model"),
        (swaps_target_and_draft, "model"),
        (accepts_everything, "ngram"),
        (accepts_everything, "cascade"),
        (draws_the_correction_from_the_target, "ngram"),
    ],
)
def test_a_wrong_rule_is_caught_by_the_same_sample(
    rule: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = VERIFIERS["rejection"]._replace(accept=rule)
    monkeypatch.setitem(VERIFIERS, "rejection", wrong)
    assert likelihood("rejection", drafter, 3)[0] < ALPHA


def test_a_draw_that_is_called_certain_stays_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    # min(1, p / 1) and norm(p without x) give p for each x, so for any way x was drawn.
    def certain(
        proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
    ) -> Verdict:
        return rejection(Proposal(proposal.tokens), target, noise, position)

    monkeypatch.setitem(VERIFIERS, "rejection", VERIFIERS["rejection"]._replace(accept=certain))
    assert likelihood("rejection", "model", 2)[0] > ALPHA


class LooksBack:
    """Drafts again only where the third token of a draft that was refused at once looked sure.

    That token was never judged: whoever remembers it knows what the same noise would draw again.
    """

    def __init__(self, least: float) -> None:
        self._least = least
        self._next = 3

    def choose(self) -> int:
        return self._next

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        return DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        refused = round_.drafted == 3 and round_.accepted == 0
        self._next = 3 if not refused or round_.confidences[2] > self._least else 0


@pytest.mark.nightly
def test_a_policy_may_remember_tokens_that_were_never_judged() -> None:
    target, draft = chain()
    params = SamplingParams(verifier="rejection", temperature=1.0)
    least = float(np.median(laws(draft, params).max(axis=1))) - 1e-9
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(6):
        drafter = drafter_named("model", draft, LooksBack(least), params, seed)
        done = loop(target, drafter, [0], 3 * LONG, params, seed)
        counts.update(itertools.pairwise([0, *done.tokens]))
    assert surprise(counts, laws(target, params)) > ALPHA


# Noise


def test_drawing_with_the_targets_noise_accepts_more_than_drawing_alone() -> None:
    target = TableEngine(2, scale=1.5)
    rates = []
    for closeness in (0.85, 0.0):
        drafter = drafter_named("model", near(target, 9, closeness), 4, WARM)
        done = loop(target, drafter, PROMPT, 200, WARM)
        rates.append(sum(r.accepted for r in done.rounds))
    assert rates[0] > 2 * rates[1]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_a_draft_equal_to_the_target_is_always_accepted(params: SamplingParams) -> None:
    target = TableEngine(2, scale=1.5)
    drafter = drafter_named("model", near(target, 9, 1.0), 4, params)
    done = loop(target, drafter, PROMPT, 41, params)
    assert [r.accepted for r in done.rounds] == [0] + [4] * 8
