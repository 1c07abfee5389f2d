"""Both rules leave the target's own distribution, by enumeration and by whole-loop draws.

Every seed is fixed, so each test always passes or always fails. A correct verifier under other
seeds would fail one chi-square test with probability ALPHA; there are some twenty of them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from runtime.toy import TableEngine, generator, near, plain, run
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, residual
from specrt.sampling.noise import Noise
from specrt.speculation.gamma import DraftDecision
from specrt.speculation.round import Proposal, Round, Verdict
from specrt.speculation.target import VERIFIERS, match, rejection
from specrt.text import Tokenizer

ALPHA = 1e-4
VOCAB = 4
Floats = NDArray[np.float64]


# The rules by themselves


@pytest.mark.parametrize("length", range(6))
def test_match_keeps_the_longest_equal_prefix_and_then_the_targets_choice(length: int) -> None:
    chosen = [10, 11, 12, 13, 14, 15]
    for wrong in range(length + 1):
        drafted = [t if i != wrong else 99 for i, t in enumerate(chosen[:length])]
        assert match(drafted, chosen.__getitem__) == Verdict(wrong, chosen[wrong])


def test_match_asks_no_choice_beyond_the_first_difference() -> None:
    asked: list[int] = []

    def choose(i: int) -> int:
        asked.append(i)
        return i

    assert match([0, 1, 7, 3], choose) == Verdict(2, 2)
    assert asked == [0, 1, 2]


class Fixed(Noise):
    """Noise whose uniform numbers are given."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self._numbers = iter(numbers)

    def uniform(self, purpose: Any, position: int) -> float:
        return next(self._numbers)


def dense(*probs: float) -> Distribution:
    kept = [(i, p) for i, p in enumerate(probs) if p > 0]
    return Distribution(np.array([i for i, _ in kept]), np.array([p for _, p in kept]))


@pytest.mark.parametrize(("number", "accepted"), [(0.49, 1), (0.51, 0), (1e-16, 1), (1 - 1e-16, 0)])
def test_rejection_accepts_below_the_ratio_of_the_target_to_the_draft(
    number: float, accepted: int
) -> None:
    p, q = dense(0.3, 0.7), dense(0.6, 0.4)  # token 0: 0.3 / 0.6
    verdict = rejection(Proposal([0], [q]), lambda i: p, Fixed(number), 0)
    assert verdict.accepted == accepted
    if not accepted:
        assert verdict.next == 1  # all that is left of p - q


def test_rejection_always_accepts_what_the_target_likes_at_least_as_much() -> None:
    p, q = dense(0.3, 0.7), dense(0.6, 0.4)
    assert rejection(Proposal([1], [q]), lambda i: p, Fixed(1 - 1e-16), 0).accepted == 1
    assert rejection(Proposal([1], [p]), lambda i: p, Fixed(1 - 1e-16), 0).accepted == 1


def test_rejection_never_accepts_what_the_target_excludes() -> None:
    p, q = dense(0.0, 0.5, 0.5), dense(0.8, 0.2, 0.0)
    verdict = rejection(Proposal([0], [q]), lambda i: p, Fixed(1e-300), 0)
    assert verdict.accepted == 0
    assert verdict.next in (1, 2)


@pytest.mark.parametrize("place", range(4))
def test_rejection_stops_at_the_first_token_refused(place: int) -> None:
    p = dense(0.5, 0.5)
    numbers = [0.1] * place + [0.9]
    tokens, q = [0, 0, 0, 0], dense(0.9, 0.1)
    verdict = rejection(Proposal(tokens, [q] * 4), lambda i: p, Fixed(*numbers), 7)
    assert verdict == Verdict(place, 1)


def exact_law(p: Distribution, q: Distribution | None, token: int | None = None) -> Floats:
    """Return the law of the first token under `rejection`, summed over every outcome.

    The chance of acceptance is found by bisection of the rule's own decision, and the correction
    taken from `residual`, so this checks the code and not a copy of its formula.
    """
    law = np.zeros(VOCAB)
    certain = dense(*(float(i == token) for i in range(VOCAB)))
    for x, chance in zip((q or certain).ids, (q or certain).probs, strict=True):
        proposal = Proposal([int(x)], [q] if q else None)
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            kept = rejection(proposal, lambda i: p, Fixed(middle), 0).accepted
            low, high = (middle, high) if kept else (low, middle)
        law[x] += chance * low
        rest = residual(p, q, int(x))
        law[rest.ids] += chance * (1 - low) * rest.probs
    return law


def of(p: Distribution) -> Floats:
    full = np.zeros(VOCAB)
    full[p.ids] = p.probs
    return full


def random_law(rng: np.random.Generator) -> Distribution:
    probs = rng.dirichlet(np.full(VOCAB, rng.choice([0.2, 1.0, 5.0])))
    probs[rng.random(VOCAB) < 0.3] = 0.0
    if not probs.any():
        probs[rng.integers(VOCAB)] = 1.0
    return dense(*probs / probs.sum())


def test_one_step_of_rejection_has_exactly_the_targets_law() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        p, q = random_law(rng), random_law(rng)
        np.testing.assert_allclose(exact_law(p, q), of(p), atol=1e-12)


@pytest.mark.parametrize("token", range(VOCAB))
def test_a_certain_proposal_leaves_exactly_the_targets_law(token: int) -> None:
    rng = np.random.default_rng(token)
    for _ in range(20):
        p = random_law(rng)
        np.testing.assert_allclose(exact_law(p, None, token), of(p), atol=1e-12)


def test_the_residual_of_equal_distributions_is_the_target() -> None:
    p = dense(0.25, 0.75)
    assert residual(p, dense(0.25, 0.75), 0) is p
    # A certain proposal of the only candidate leaves nothing, too.
    only = dense(0.0, 1.0)
    assert residual(only, None, 1) is only


def test_the_residual_is_a_distribution_over_the_targets_candidates() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        p, q = random_law(rng), random_law(rng)
        rest = residual(p, q, 0)
        assert set(rest.ids) <= set(p.ids)
        assert (rest.probs > 0).all()
        assert rest.probs.sum() == pytest.approx(1.0)


# Whole loops

SETTINGS = {
    "warm": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "top-k": {"temperature": 1.2, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
}
NEW = 3


def chain(scale: float = 1.0) -> tuple[TableEngine, TableEngine]:
    """Return a target and a different draft whose next token depends on the last one only."""
    target = TableEngine(21, vocab=VOCAB, scale=scale, memory=1, max_length=16384)
    return target, near(target, 22, 0.5, scale=1.5 * scale)


def laws(engine: TableEngine, params: SamplingParams) -> Floats:
    """Return the law of the next token after each token, [V, V]."""
    rows = [of(process(engine.row(np.array([t])), params)) for t in range(VOCAB)]
    return np.stack(rows)


def surprise(counts: Counter[tuple[int, ...]], law: Floats) -> float:
    """Return the p-value of counted (context, x1, .., xn) under a chain's law."""
    statistic, freedom = 0.0, 0
    length = len(next(iter(counts)))
    for context in range(VOCAB):
        seen: list[float] = []
        expected: list[float] = []
        total = sum(n for key, n in counts.items() if key[0] == context)
        for rest in itertools.product(range(VOCAB), repeat=length - 1):
            key = (context, *rest)
            chance = float(np.prod([law[a, b] for a, b in itertools.pairwise(key)]))
            if chance == 0.0 and counts[key]:
                return 0.0
            seen.append(counts[key])
            expected.append(total * chance)
        kept = np.array(expected) >= 5
        pools = [*zip(np.array(seen)[kept], np.array(expected)[kept], strict=True)]
        rare = (np.array(seen)[~kept].sum(), np.array(expected)[~kept].sum())
        pools += [rare] if rare[1] >= 5 else []
        statistic += sum((s - e) ** 2 / e for s, e in pools)
        freedom += max(len(pools) - 1, 0)
    return float(stats.chi2.sf(statistic, freedom))


def pairs(tokens: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Count (context, x1, x2), blocks apart, so that blocks are independent given contexts."""
    return Counter(tuple(tokens[i : i + 3]) for i in range(0, len(tokens) - 2, 2))


def long_run(
    verifier: str, options: dict[str, float], gamma: int, new: int, *, mixed: bool = True
) -> float:
    """Return the p-value of one long sample, cut into thousands of two-token continuations.

    `mixed` asks that tokens were both kept and refused, often.
    """
    target, draft = chain()
    params = SamplingParams(verifier=verifier, **options)  # type: ignore[arg-type]
    done = run(target, draft, [0], gamma=gamma, params=params, new=new, seed=gamma)
    if gamma and mixed:
        evaluated = sum(r.evaluated for r in done.rounds)
        accepted = sum(r.accepted for r in done.rounds)
        assert 0.2 < accepted / evaluated < 0.98
    return surprise(pairs([0, *done.tokens]), laws(target, params))


LONG = 5000


@pytest.mark.parametrize("gamma", [1, 4])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_a_long_sample_is_distributed_as_the_targets_own(verifier: str, gamma: int) -> None:
    assert long_run(verifier, SETTINGS["warm"], gamma, LONG) > ALPHA


@pytest.mark.nightly
@pytest.mark.parametrize("setting", ["cool", "top-k", "top-p"])
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_a_filtered_sample_is_distributed_as_the_targets_own(verifier: str, setting: str) -> None:
    assert long_run(verifier, SETTINGS[setting], 3, LONG) > ALPHA


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
    surest = laws(draft, params).max(axis=1)
    policy = partial(LooksBack, float(np.median(surest)) - 1e-9)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(6):
        done = run(target, draft, [0], gamma=policy(), params=params, new=15000, seed=seed)
        counts.update(itertools.pairwise([0, *done.tokens]))
    assert surprise(counts, laws(target, params)) > ALPHA


def test_plain_sampling_is_distributed_as_the_target() -> None:
    assert long_run("match", SETTINGS["warm"], 0, LONG) > ALPHA


@pytest.mark.nightly
@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_short_samples_of_many_seeds_are_distributed_as_the_targets_own(verifier: str) -> None:
    target, draft = chain()
    params = SamplingParams(verifier=verifier, temperature=1.0)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(5_000):
        done = run(target, draft, [2], gamma=2, params=params, new=NEW, seed=seed)
        counts[(2, *done.tokens)] += 1
    assert surprise(counts, laws(target, params)) > ALPHA


# Negative controls: each of these is wrong, and the test above must say so.


def accepts_everything(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    last = len(proposal.tokens)
    return Verdict(last, _drawn(target(last), noise, position + last))


def draws_the_correction_from_the_target(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    verdict = rejection(proposal, target, noise, position)
    i = verdict.accepted
    return Verdict(i, _drawn(target(i), noise, position + i))


def swaps_target_and_draft(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    for i, token in enumerate(proposal.tokens):
        assert proposal.distributions is not None
        swapped = Proposal([token], [target(i)])
        q = proposal.distributions[i]
        if not rejection(swapped, lambda _, q=q: q, noise, position + i).accepted:  # type: ignore[misc]
            corrected = residual(target(i), q, token)
            return Verdict(i, _drawn(corrected, noise, position + i))
    last = len(proposal.tokens)
    return Verdict(last, _drawn(target(last), noise, position + last))


def takes_the_draft_for_certain(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    return rejection(Proposal(proposal.tokens), target, noise, position)


def _drawn(distribution: Distribution, noise: Noise, position: int) -> int:
    return rejection(Proposal(()), lambda _: distribution, noise, position).next


@pytest.fixture
def wrong_rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        VERIFIERS, "rejection", VERIFIERS["rejection"]._replace(accept=request.param)
    )


@pytest.mark.parametrize(
    "wrong_rule",
    [
        accepts_everything,
        draws_the_correction_from_the_target,
        swaps_target_and_draft,
    ],
    indirect=True,
)
@pytest.mark.usefixtures("wrong_rule")
def test_a_wrong_rule_is_caught_by_the_same_sample() -> None:
    assert long_run("rejection", SETTINGS["warm"], 3, LONG, mixed=False) < ALPHA


def test_a_proposal_said_to_be_certain_when_it_was_drawn_stays_lossless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # min(1, p / 1) and norm(p without x) give p for each x, so for any way x was drawn.
    monkeypatch.setitem(
        VERIFIERS, "rejection", VERIFIERS["rejection"]._replace(accept=takes_the_draft_for_certain)
    )
    assert long_run("rejection", SETTINGS["warm"], 2, LONG) > ALPHA


# Same seed, same text: with `match`, speculation cannot be seen in what is emitted


PROMPT = [3, 1, 4, 1, 5]
MATCH_SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.3, "top_k": 10, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("options", MATCH_SETTINGS, ids=str)
def test_the_same_seed_gives_the_same_tokens_for_every_gamma_and_draft(
    options: dict[str, float],
) -> None:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    accepted = 0
    for seed in (0, 1, -7):
        target = TableEngine(2, scale=2.0)
        expected = run(target, None, PROMPT, params=params, seed=seed, new=60).tokens
        assert expected != plain(target, PROMPT, 60)
        for gamma in range(1, 9):
            for closeness in (0.0, 0.8):
                draft = near(target, 50, closeness, scale=2.0)
                done = run(target, draft, PROMPT, gamma=gamma, params=params, seed=seed, new=60)
                assert done.tokens == expected
                accepted += sum(r.accepted for r in done.rounds)
    assert accepted > 500


@pytest.mark.parametrize("verifier", ["match", "rejection"])
def test_temperature_zero_is_greedy_under_either_rule(verifier: str) -> None:
    target = TableEngine(2)
    params = SamplingParams(verifier=verifier, top_k=5, top_p=0.5, seed=3)
    done = run(target, near(target, 9, 0.6), PROMPT, gamma=4, params=params)
    assert done.tokens == plain(target, PROMPT)


def test_drawing_with_the_targets_noise_accepts_more_than_drawing_alone() -> None:
    target = TableEngine(2, scale=1.5)
    params = SamplingParams(temperature=1.0)
    shared = run(target, near(target, 9, 0.85), PROMPT, gamma=4, params=params, new=200)
    alone = run(target, near(target, 9, 0.0), PROMPT, gamma=4, params=params, new=200)
    assert shared.tokens == alone.tokens
    assert sum(r.accepted for r in shared.rounds) > 2 * sum(r.accepted for r in alone.rounds)


def test_a_draft_equal_to_the_target_is_always_kept() -> None:
    target = TableEngine(2, scale=1.5)
    params = SamplingParams(temperature=1.0)
    done = run(target, near(target, 9, 1.0), PROMPT, gamma=4, params=params, new=41)
    assert [r.accepted for r in done.rounds] == [0] + [4] * 8


def test_the_text_and_the_reported_seed_say_the_same_whatever_gamma(tokenizer: Tokenizer) -> None:
    target = TableEngine(2, vocab=tokenizer.size, max_length=400)
    made = generator(target, near(target, 5, 0.7), tokenizer)
    for stop in ((), ("th", "a")):
        params = SamplingParams(temperature=1.0, max_tokens=100, stop=stop)
        drawn = made.generate("hello", params, gamma=3)
        again = SamplingParams(temperature=1.0, max_tokens=100, stop=stop, seed=drawn.seed)
        for gamma in range(9):
            done = made.generate("hello", again, gamma=gamma)
            assert (done.text, done.token_ids) == (drawn.text, drawn.token_ids)
            assert (done.finish_reason, done.stop_reason) == (
                drawn.finish_reason,
                drawn.stop_reason,
            )
