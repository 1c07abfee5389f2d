"""Drafters by their names, policies for them, and the law that a sample must follow."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specrt.params import SamplingParams
from specrt.sampling.distribution import Distribution, process, residual
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors
from specrt.speculation.drafters import DRAFTERS, ModelDrafter
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import (
    Drafter,
    Passes,
    Proposal,
    Round,
    Verdict,
    run_rounds,
    speculate,
)
from specrt.speculation.target import EngineTarget, rejection
from support.toy import Run, TableEngine, near

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0)
Floats = NDArray[np.float64]


class Script:
    """A policy that decides as it was told to, and remembers what it was asked and told."""

    def __init__(self, gamma: int, *decisions: DraftDecision) -> None:
        self.gamma = gamma
        self.decisions = decisions
        self.weighed: list[tuple[int, float]] = []
        self.seen: list[Round] = []

    def choose(self) -> int:
        return self.gamma

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        self.weighed.append((drafted, confidence))
        known = drafted <= len(self.decisions)
        return self.decisions[drafted - 1] if known else DraftDecision.CONTINUE

    def observe(self, round_: Round) -> None:
        self.seen.append(round_)


class Whim:
    """A policy without reason: any gamma up to 8, and any decision about any token."""

    def __init__(
        self, seed: int, decisions: Sequence[DraftDecision] = tuple(DraftDecision)
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._decisions = decisions
        self.seen: list[Round] = []

    def choose(self) -> int:
        return int(self._rng.integers(0, 9))

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        assert 0.0 < confidence <= 1.0
        return self._decisions[int(self._rng.integers(len(self._decisions)))]

    def observe(self, round_: Round) -> None:
        assert round_.draft_ns >= 0
        assert round_.verify_ns >= 0
        self.seen.append(round_)


@dataclass
class Context:
    """What a drafter of the table is made from."""

    draft: TableEngine
    params: SamplingParams
    noise: Noise
    policies: Callable[[str], GammaPolicy]
    processors: LogitsProcessors | None = None

    def model(self) -> ModelDrafter:
        return ModelDrafter(KVCache(self.draft), self.params, self.noise, self.policy("model"))

    def policy(self, source: str) -> GammaPolicy:
        return self.policies(source)


def drafter_named(
    name: str,
    draft: TableEngine,
    gamma: int | GammaPolicy | Callable[[str], GammaPolicy],
    params: SamplingParams = GREEDY,
    seed: int = 0,
) -> Drafter:
    """Return a drafter of the table; `gamma` is a number, a policy, or a policy by source."""
    if isinstance(gamma, int):
        gamma = FixedGamma(gamma)
    policies = gamma if callable(gamma) else lambda _, policy=gamma: policy
    return DRAFTERS[name].make(Context(draft, params, Noise(seed), policies))


def loop(
    target: TableEngine,
    drafter: Drafter,
    prompt: Sequence[int],
    new: int,
    params: SamplingParams = GREEDY,
    seed: int = 0,
) -> Run:
    """Run the loop itself with any drafter."""
    tokens = list(prompt)
    limit = min(len(prompt) + new, target.max_length + 1)
    judge = EngineTarget(KVCache(target), params, Noise(seed))
    rounds = list(run_rounds(speculate(judge, drafter, tokens, limit)))
    return Run(tokens[len(prompt) :], rounds)


class Watched:
    """Holds another drafter's proposals to the protocol, and notes them."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.proposals: list[tuple[list[int], int, Proposal]] = []
        """The text, the room and what was proposed."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        before = list(tokens)
        proposal = yield from self._inner.propose(tokens, room)
        assert tokens == before, "a drafter writes nothing to the text"
        count = len(proposal.tokens)
        assert count <= max(room, 0)
        assert len(proposal.confidences) in (0, count)
        assert bool(proposal.source) is bool(count)
        for token, drawn_from in zip(proposal.tokens, proposal.distributions or (), strict=False):
            assert drawn_from.prob(token) > 0
        assert proposal.distributions is None or len(proposal.distributions) == count
        self.proposals.append((before, room, proposal))
        return proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        self._inner.observe(tokens, round_)


# The law of a sample. Seeds are fixed, so a test always passes or always fails; a correct verifier
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


def chain(scale: float = 1.0) -> tuple[TableEngine, TableEngine]:
    """Return a target and a different draft whose next token depends on the last one only."""
    target = TableEngine(21, vocab=VOCAB, scale=scale, memory=1, max_length=16384)
    return target, near(target, 22, 0.5, scale=1.5 * scale)


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


def pairs(tokens: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Count (context, x1, x2), blocks apart, so that blocks are independent given contexts."""
    return Counter(tuple(tokens[i : i + 3]) for i in range(0, len(tokens) - 2, 2))


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
    return surprise(pairs([0, *done.tokens]), laws(target, params)), counts


# Wrong rules, each of which the sample must show


def accepts_everything(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    last = len(proposal.tokens)
    return Verdict(last, _drawn(target(last), noise, position + last))


def draws_the_correction_from_the_target(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    i = rejection(proposal, target, noise, position).accepted
    return Verdict(i, _drawn(target(i), noise, position + i))


def swaps_target_and_draft(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
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
