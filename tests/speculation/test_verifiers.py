"""Every verifier leaves the target's own distribution: by enumeration, and by long samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from specrt.errors import EngineError
from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, residual
from specrt.sampling.noise import Noise, Purpose
from specrt.speculation.drafters import DRAFTERS, ModelDrafter
from specrt.speculation.gamma import FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Proposal, Verdict, run_alone, run_rounds, speculate
from specrt.speculation.target import VERIFIERS, EngineTarget, Verifier, rejection
from speculation.support import PROMPT, Whim, drafter_named, loop
from support.toy import TableEngine, near

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
def test_every_rule_accepts_a_prefix(verifier: Any, certain: bool) -> None:
    looks_ahead = verifier.needs_distributions and not certain  # all of a block is weighed
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
        assert sorted({*looked}) == list(range(max(looked) + 1))
        assert accepted <= max(looked) <= (count if looks_ahead else accepted)
        assert following in target[accepted].ids
        assert all(target[i].prob(token) > 0 for i, token in enumerate(drafted[:accepted]))
        lengths[accepted] += 1
        # A draft of the target's own distribution is never refused.
        equal = [t.draw(noise, verifier.draft_noise, 100 + i) for i, t in enumerate(target)]
        if not certain:
            same = verifier.accept(Proposal(equal[:5], target[:5]), p, noise, 100)
            assert same.accepted == 5
    assert set(lengths) == set(range(6))


class Decision:
    """A number that is compared once: the outcome is given, its chance is kept."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks

    def __lt__(self, chance: float) -> bool:
        return self._forks.decide(min(max(chance, 0.0), 1.0))


class Forks(Noise):
    """Noise of which every decision is given; those that are not are refusals."""

    def __init__(self, *given: bool) -> None:
        super().__init__(0)
        self.given, self.taken, self.weight = given, list[bool](), 1.0
        self.law = dense(1.0)
        """What the token after the accepted ones is drawn from."""

    def uniform(self, purpose: Any, position: int) -> Any:
        return Decision(self)

    def decide(self, chance: float) -> bool:
        known = len(self.taken) < len(self.given)
        self.taken.append(known and self.given[len(self.taken)])
        self.weight *= chance if self.taken[-1] else 1.0 - chance
        return self.taken[-1]


def outcomes(
    rule: Any, proposal: Proposal, target: Target, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, int, Distribution]]:
    """Yield how each round of a draft may end: its chance, what is accepted, the law of the next.

    They are the outcomes of the code: every comparison with a number is decided both ways.
    """

    def remember(law: Distribution, noise: Any, purpose: Any, position: int) -> int:
        noise.law = law
        return int(law.ids[0])

    pending: list[tuple[bool, ...]] = [()]
    with monkeypatch.context() as patched:
        patched.setattr(Distribution, "draw", remember)
        while pending:
            given = pending.pop()
            forks = Forks(*given)
            accepted = rule(proposal, target, forks, 0).accepted
            yield forks.weight, accepted, forks.law
            taken = tuple(forks.taken)
            pending += [(*taken[:i], True) for i in range(len(given), len(taken))]


Laws = dict[tuple[int, ...], Distribution]
"""Of the token after each path."""


def random_laws(rng: np.random.Generator, depth: int, sparse: bool = True) -> Laws:
    paths = [p for n in range(depth + 1) for p in itertools.product(range(VOCAB), repeat=n)]
    if sparse:
        return {path: random_law(rng) for path in paths}
    return {path: dense(*rng.dirichlet(np.full(VOCAB, 4.0))) for path in paths}


def judged(
    rule: Any, p: Laws, q: Laws, gamma: int, monkeypatch: pytest.MonkeyPatch, stop: Any = None
) -> tuple[NDArray[np.float64], float]:
    """Return the law of the next gamma + 1 tokens, and how many are accepted on average.

    Sums over every draft that q may draw, and every outcome of it; tokens after the round are the
    target's own. `stop` tells where a draft ends before gamma.
    """
    law, mean = np.zeros((VOCAB,) * (gamma + 1)), 0.0

    def spread(path: tuple[int, ...], chance: float) -> None:
        if len(path) == gamma + 1:
            law[path] += chance
            return
        for token, prob in zip(p[path].ids, p[path].probs, strict=True):
            spread((*path, int(token)), chance * prob)

    def draft(path: tuple[int, ...], chance: float) -> None:
        nonlocal mean
        if len(path) < gamma and not (stop and stop(path)):
            for token, prob in zip(q[path].ids, q[path].probs, strict=True):
                draft((*path, int(token)), chance * prob)
            return
        proposal = Proposal(path, [q[path[:i]] for i in range(len(path))])
        found = outcomes(rule, proposal, lambda i: p[path[:i]], monkeypatch)
        for weight, accepted, following in found:
            mean += chance * weight * accepted
            for token, prob in zip(following.ids, following.probs, strict=True):
                if weight * prob > 0.0:
                    spread((*path[:accepted], int(token)), chance * weight * prob)

    draft((), 1.0)
    return law, mean


def product_law(p: Laws, gamma: int) -> NDArray[np.float64]:
    law = np.ones((VOCAB,) * (gamma + 1))
    for path in np.ndindex(law.shape):
        law[path] = np.prod([p[path[:i]].prob(path[i]) for i in range(gamma + 1)])
    return law


def by_token(p: Laws, q: Laws, gamma: int, path: tuple[int, ...] = ()) -> float:
    """Return how many tokens are accepted on average where each is judged by itself."""
    if len(path) == gamma:
        return 0.0
    chances = [min(p[path].prob(x), q[path].prob(x)) for x in range(VOCAB)]
    return sum(
        chance * (1.0 + by_token(p, q, gamma, (*path, x)))
        for x, chance in enumerate(chances) if chance > 0.0
    )  # fmt: skip


@pytest.mark.parametrize(("gamma", "cases"), [(1, 20), (2, 12), (3, 3)])
def test_a_block_has_exactly_the_targets_law(
    gamma: int, cases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = []
    for seed in range(cases):
        rng = np.random.default_rng(seed)
        p, q = (random_laws(rng, gamma, sparse=seed % 2 == 0) for _ in "pq")
        law, mean = judged(rejection, p, q, gamma, monkeypatch)
        np.testing.assert_allclose(law, product_law(p, gamma), atol=1e-12)
        gains.append(mean - by_token(p, q, gamma))
        # Drafts may end where they will, as long as it is known before the next token is drawn.
        short = judged(rejection, p, q, gamma, monkeypatch, stop=lambda path: sum(path) % 3 == 2)
        np.testing.assert_allclose(short[0], product_law(p, gamma), atol=1e-12)
    assert min(gains) > -1e-12
    assert gamma == 1 or max(gains) > 0.01


def test_a_block_accepts_what_the_paper_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of Sun et al. 2024, section 3: 11/9 tokens, and 10/9 where each is judged."""
    paths = [(), (0,), (1,)]
    p, q = dict.fromkeys(paths, dense(1 / 3, 2 / 3)), dict.fromkeys(paths, dense(2 / 3, 1 / 3))
    mean = 0.0
    for path in itertools.product(range(2), repeat=2):
        chance = np.prod([q[()].prob(x) for x in path])
        proposal = Proposal(path, [q[()]] * 2)
        for weight, accepted, _ in outcomes(rejection, proposal, lambda _: p[()], monkeypatch):
            mean += chance * weight * accepted
    assert mean == pytest.approx(11 / 9)
    assert by_token({**p}, {**q}, 2) == pytest.approx(10 / 9)


def test_certain_tokens_have_exactly_the_targets_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both as certain tokens, and as tokens drawn from laws that know no other: one law."""
    for seed in range(30):
        p = random_laws(np.random.default_rng(seed), 3)
        path = tuple(int(x) for x in np.random.default_rng(seed + 99).integers(0, VOCAB, 3))
        found = []
        for drafts in (None, [dense(*np.eye(VOCAB)[x]) for x in path]):
            law = np.zeros((4, VOCAB))
            proposal = Proposal(path, drafts)
            for weight, accepted, following in outcomes(
                rejection,
                proposal,
                lambda i, p=p, path=path: p[path[:i]],
                monkeypatch,  # type: ignore[misc]
            ):
                law[accepted] += weight * law_of(following)
            found.append(law)
        np.testing.assert_allclose(*found, atol=1e-12)
        emitted = np.zeros(VOCAB)  # the first token
        emitted += found[0][0]
        emitted[path[0]] += found[0][1:].sum()
        np.testing.assert_allclose(emitted, law_of(p[()]), atol=1e-12)


def test_a_row_that_says_nothing_ends_the_draft() -> None:
    """It is an error only where the text gets there."""
    raised = Counter[bool]()
    for seed in range(200):
        rng, noise = np.random.default_rng(seed), Noise(seed)
        laws, drafts = [random_law(rng) for _ in range(2)], [random_law(rng) for _ in range(4)]
        drafted = [q.draw(noise, Purpose.DRAFT, i) for i, q in enumerate(drafts)]

        def target(i: int, laws: Any = laws) -> Distribution:
            if i >= 2:
                raise EngineError("the scores are not numbers")
            found: Distribution = laws[i]
            return found

        ends = []
        for count in (2, 4):
            try:
                proposal = Proposal(drafted[:count], drafts[:count])
                ends.append(rejection(proposal, target, noise, 0))
            except EngineError:
                ends.append(None)
        assert ends[0] == ends[1]
        raised[ends[0] is None] += 1
    assert min(raised[True], raised[False]) > 10


class Recorded(Noise):
    """Noise that counts how often numbers are asked for, by purpose and position."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.asked = Counter[tuple[Purpose, int]]()

    def uniform(self, purpose: Purpose, position: int) -> float:
        self.asked[purpose, position] += 1
        return super().uniform(purpose, position)

    def exponential(self, purpose: Purpose, position: int, tokens: NDArray[np.int64]) -> Floats:
        self.asked[purpose, position] += 1
        return super().exponential(purpose, position, tokens)


def test_no_number_of_rejection_is_used_twice() -> None:
    """Those of positions after a round decided about it: with them again rounds would depend."""
    engine, draft = chain()
    params, noise = SamplingParams(verifier="rejection", temperature=1.0), Recorded(4)
    drafter = ModelDrafter(KVCache(draft), params, noise, Whim(2))
    target, tokens = EngineTarget(KVCache(engine), params, noise), [0]
    rounds = [*run_rounds(speculate(target, drafter, tokens, 400))]
    assert sum(r.accepted < r.drafted - 1 for r in rounds) > 10
    assert {purpose for purpose, _ in noise.asked} == {*Purpose} - {Purpose.TOKEN}
    assert max(noise.asked.values()) == 1


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


def written_out(
    *,
    chance: Callable[[float, float], float] = lambda left, weight: left / (left + 1.0 - weight),
    left: Callable[[Floats, Floats, float], Floats] = lambda p, q, weight: weight * p - q,
) -> Callable[[Proposal, Target, Noise, int], Verdict]:
    """Return block verification as the paper has it, over whole vocabularies, with parts to spoil.

    `chance` is h of a prefix by the mass that is left and its weight, `left` is what the next
    token is drawn from where no token is accepted behind.
    """

    def rule(proposal: Proposal, target: Target, noise: Noise, position: int) -> Verdict:
        if proposal.distributions is None:
            return rejection(proposal, target, noise, position)
        count, weight = len(proposal.tokens), 1.0
        accepted, law = 0, law_of(target(0))
        for i in range(count + 1):
            p = law_of(target(i))
            rest, h = p, weight
            if i < count:
                q = law_of(proposal.distributions[i])
                rest = np.maximum(left(p, q, weight), 0.0)
                mass = np.maximum(weight * p - q, 0.0).sum()
                h = chance(mass, weight) if weight < 1.0 else 1.0
            if i == 0 or noise.uniform(Purpose.ACCEPT, position << 16 | i - 1) < h:
                accepted, law = i, rest if rest.any() else p
            if i < count:
                token = proposal.tokens[i]
                weight = min(weight * p[token] / q[token], 1.0)
        return Verdict(accepted, _drawn(dense(*law / law.sum()), noise, position + accepted))

    return rule


def test_the_rule_is_the_papers() -> None:
    lengths = Counter[int]()
    for seed in range(300):
        rng, noise = np.random.default_rng(seed), Noise(seed)
        laws, drafts = [random_law(rng) for _ in range(6)], [random_law(rng) for _ in range(5)]
        drafts = [p if rng.random() < 0.3 else q for p, q in zip(laws[1:], drafts, strict=True)]
        drafted = [q.draw(noise, Purpose.DRAFT, i) for i, q in enumerate(drafts)]
        proposal = Proposal(drafted, drafts)
        found = rejection(proposal, laws.__getitem__, noise, 9)
        assert found == written_out()(proposal, laws.__getitem__, noise, 9)
        lengths[found.accepted] += 1
    assert set(lengths) == set(range(6))


WRONG_BLOCKS: dict[str, Any] = {
    "keeps whatever has something left": written_out(chance=lambda left, weight: float(left > 0.0)),
    "keeps a prefix by its weight": written_out(chance=lambda left, weight: weight),
    "keeps a prefix by what is left": written_out(chance=lambda left, weight: left),
    "draws what is left of one token": written_out(left=lambda p, q, weight: p - q),
}


@pytest.mark.parametrize("name", WRONG_BLOCKS)
def test_a_wrong_block_has_another_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    away = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        p, q = (random_laws(rng, 2, sparse=False) for _ in "pq")
        for rule in (written_out(), WRONG_BLOCKS[name]):
            law = judged(rule, p, q, 2, monkeypatch)[0]
            away.append(float(np.abs(law - product_law(p, 2)).max()))
    assert max(away[::2]) < 1e-12
    assert max(away[1::2]) > 3e-3


WRONG: dict[str, tuple[Any, str]] = {
    "accepts everything": (accepts_everything, "model"),
    "swaps target and draft": (swaps_target_and_draft, "model"),
    "draws the correction from the target, of lookup": (
        draws_the_correction_from_the_target, "ngram",
    ),
}  # fmt: skip


def test_a_rule_that_reads_ahead_accepts_nothing_before_a_row_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reads_ahead(proposal: Proposal, law: Target, noise: Noise, position: int) -> Verdict:
        first, *_ = [law(i) for i in range(len(proposal.tokens) + 1)]
        return Verdict(0, first.draw(noise, Purpose.TOKEN, position))

    monkeypatch.setitem(VERIFIERS, "reads ahead", Verifier(reads_ahead))
    engine = TableEngine(3)
    engine.no_numbers_from = len(PROMPT) + 2
    params = SamplingParams(verifier="reads ahead", temperature=1.0, seed=1)
    target = EngineTarget(KVCache(engine), params, Noise(0))
    with pytest.raises(EngineError):
        run_alone(target.verify(PROMPT, Proposal([1, 2])))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_caught_by_the_same_sample(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, drafter = WRONG[name]
    wrong = VERIFIERS["rejection"]._replace(accept=rule)
    monkeypatch.setitem(VERIFIERS, "rejection", wrong)
    assert likelihood("rejection", drafter, 3, new=2 * SHORT)[0] < ALPHA
