"""Drafters by their names, and policies for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from specrt.params import SamplingParams
from specrt.sampling.noise import Noise
from specrt.speculation.drafters import DRAFTERS, ModelDrafter
from specrt.speculation.gamma import DraftDecision, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Drafter, Round, run_rounds, speculate
from specrt.speculation.target import EngineTarget
from specrt.speculation.text_memory import KeyMemory
from support.toy import Run, TableEngine

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams()


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

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.seen: list[Round] = []

    def choose(self) -> int:
        return int(self._rng.integers(0, 9))

    def decide(self, drafted: int, confidence: float) -> DraftDecision:
        assert 0.0 < confidence <= 1.0
        return tuple(DraftDecision)[int(self._rng.integers(len(DraftDecision)))]

    def observe(self, round_: Round) -> None:
        assert min(round_.draft_ns, round_.verify_ns) >= 0
        self.seen.append(round_)


def drafter_named(
    name: str,
    draft: TableEngine,
    gamma: int | GammaPolicy | Callable[[str], GammaPolicy],
    params: SamplingParams = GREEDY,
    seed: int = 0,
    memory: KeyMemory | None = None,
    source: Sequence[int] = (),
) -> Drafter:
    """Return a drafter of the table; `gamma` is a number, a policy, or a policy by source."""
    policy = FixedGamma(gamma) if isinstance(gamma, int) else gamma
    policies: Any = policy if callable(policy) else lambda _: policy
    noise = Noise(seed)
    context: Any = SimpleNamespace(
        policy=policies,
        memory=memory,
        source=source,
        model=lambda: ModelDrafter(KVCache(draft), params, noise, policies("model")),
    )
    return DRAFTERS[name].make(context)


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
