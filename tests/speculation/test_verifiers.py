"""Every verifier leaves the target's own distribution: by enumeration, and by long samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, residual
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import DRAFTERS
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import NOTHING, Proposal, Round, Verdict, run_alone
from specrt.speculation.target import VERIFIERS, EngineTarget, rejection
from speculation.support import GREEDY, PROMPT, Whim, drafter_named, loop
from support.toy import TableEngine, near, plain

Floats = NDArray[np.float64]
Target = Callable[[int], Distribution]
# Seeds are fixed, so a test always passes or always fails; a correct verifier
# under another seed would fail one test with probability ALPHA.

ALPHA, VOCAB, SHORT, LONG = 1e-4, 4, 1600, 5000
SETTINGS: dict[str, dict[str, float]] = {
    "warm": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "top-k": {"temperature": 1.2, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
}


def dense(*probs: float) -> Distribution:
    """Return a distribution by the probability of every token."""
    kept = [(i, p) for i, p in enumerate(probs) if p > 0]
    return Distribution(np.array([i for i, _ in kept]), np.array([p for _, p in kept]))


def law_of(p: Distribution) -> Floats:
    """Return the probability of every token."""
    full = np.zeros(VOCAB)
    full[p.ids] = p.probs
    return full


def chain() -> tuple[TableEngine, TableEngine]:
    """Return a target and a different draft whose next token depends on the last one only."""
    target = TableEngine(21, vocab=VOCAB, scale=1.0, memory=1, max_length=16384)
    return target, near(target, 22, 0.5, scale=1.5)


def laws(engine: TableEngine, params: SamplingParams) -> Floats:
    """Return the law of the next token after each token, [V, V]."""
    return np.stack([law_of(process(engine.row(np.array([t])), params)) for t in range(VOCAB)])


def surprise(counts: Counter[tuple[int, ...]], law: Floats) -> float:
    """Return the p-value of counted (context, x1, .., xn) under a chain's law."""
    statistic, freedom = 0.0, 0
    length = len(next(iter(counts)))
    for context in range(VOCAB):
        runs = [(context, *rest) for rest in itertools.product(range(VOCAB), repeat=length - 1)]
        chances = np.array(
            [np.prod([law[a, b] for a, b in itertools.pairwise(run)]) for run in runs]
        )
        seen = np.array([counts[run] for run in runs])
        if seen[chances == 0.0].any():
            return 0.0
        expected = seen.sum() * chances
        kept = expected >= 5
        pools = [*zip(seen[kept], expected[kept], strict=True)]
        rare = (seen[~kept].sum(), expected[~kept].sum())
        pools += [rare] if rare[1] >= 5 else []
        statistic += sum((s - e) ** 2 / e for s, e in pools)
        freedom += max(len(pools) - 1, 0)
    return float(stats.chi2.sf(statistic, freedom))


def likelihood(
    verifier: str,
    drafter: str,
    gamma: int | GammaPolicy | Callable[[str], GammaPolicy],
    setting: str = "warm",
    new: int = SHORT,
) -> tuple[float, dict[str, tuple[int, int]]]:
    """Return the p-value of one sample, and what was accepted and refused of each source."""
    target, draft = chain()
    params = SamplingParams(verifier=verifier, **SETTINGS[setting])  # type: ignore[arg-type]
    done = loop(target, drafter_named(drafter, draft, gamma, params, 6), [0], new, params, 6)
    counts: dict[str, tuple[int, int]] = {}
    for r in (r for r in done.rounds if r.drafted):
        accepted, refused = counts.get(r.source, (0, 0))
        counts[r.source] = accepted + r.accepted, refused + r.evaluated - r.accepted
    # Blocks of (context, x1, x2) lie apart, so that they are independent given contexts.
    whole = [0, *done.tokens]
    blocks = Counter(tuple(whole[i : i + 3]) for i in range(0, len(whole) - 2, 2))
    return surprise(blocks, laws(target, params)), counts


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
    assert len(counts) == len(DRAFTERS[drafter].policies)
    assert all(min(both) > 30 for both in counts.values()), "both outcomes, often"


@pytest.mark.nightly
@pytest.mark.parametrize("gamma", [1, 4, in_turn, lambda _: Whim(5)])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("drafter", [name for name, spec in DRAFTERS.items() if spec.policies])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_long_samples_of_all_options_are_too(
    verifier: str, drafter: str, setting: str, gamma: Any
) -> None:
    assert likelihood(verifier, drafter, gamma, setting, LONG)[0] > ALPHA


# Wrong rules, each of which the same sample must show


def accepts_everything(proposal: Proposal, target: Target, noise: Noise, position: int) -> Verdict:
    last = len(proposal.tokens)
    return Verdict(last, _drawn(target(last), noise, position + last))


def draws_the_correction_from_the_target(
    proposal: Proposal, target: Target, noise: Noise, position: int
) -> Verdict:
    i = rejection(proposal, target, noise, position).accepted
    return Verdict(i, _drawn(target(i), noise, position + i))


def swaps_target_and_draft(
    proposal: Proposal, target: Target, noise: Noise, position: int
) -> Verdict:
    for i, token in enumerate(proposal.tokens):
        assert proposal.distributions is not None
        swapped = Proposal([token], [target(i)])
        q = proposal.distributions[i]
        if not rejection(swapped, lambda _, q=q: q, noise, position + i).accepted:  # type: ignore[misc]
            return Verdict(i, _drawn(residual(target(i), q, token), noise, position + i))
    last = len(proposal.tokens)
    return Verdict(last, _drawn(target(last), noise, position + last))


def _drawn(distribution: Distribution, noise: Noise, position: int) -> int:
    return rejection(Proposal(()), lambda _: distribution, noise, position).next


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [
        (accepts_everything, "model"),
        (draws_the_correction_from_the_target, "model"),
        (swaps_target_and_draft, "model"),
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


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)], ids=str)
def test_a_draft_equal_to_the_target_is_always_accepted(params: SamplingParams) -> None:
    target = TableEngine(2, scale=1.5)
    drafter = drafter_named("model", near(target, 9, 1.0), 4, params)
    done = loop(target, drafter, PROMPT, 41, params)
    assert [r.accepted for r in done.rounds] == [0] + [4] * 8


def test_no_number_behind_an_accepted_token_is_refused() -> None:
    class Broken(TableEngine):
        def forward(self, *args: Any) -> Any:
            output = super().forward(*args)
            if output.argmax.shape[1] > 1:
                output.argmax[0, 1:] = -1
            return output

    engine = Broken(3, memory=1)
    first, second = plain(engine, PROMPT, 2)
    target = EngineTarget(KVCache(engine), GREEDY, Noise(0))
    run_alone(target.verify(PROMPT, NOTHING))
    with pytest.raises(EngineError, match="are not numbers"):
        run_alone(target.verify([*PROMPT, first], Proposal([second, 1])))
