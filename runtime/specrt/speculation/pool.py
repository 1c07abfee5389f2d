"""The engines of a bundle, and the drafters with their gamma policies that outlive a completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from specrt.engine.protocol import (
    ConditionedEngine,
    CudaGraphs,
    Engine,
    FusedRounds,
    Source,
    cuda_graphs,
)
from specrt.errors import RequestError, did_you_mean
from specrt.params import AUTO, Gamma, SamplingParams
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors
from specrt.speculation.auto_gamma import FALLBACK_AFTER
from specrt.speculation.compiled_gamma import AdaptiveGamma, AutoFactory, StepPlan, auto_factory
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import (
    DRAFT_KINDS,
    DRAFTERS,
    NO_DRAFTER,
    ForcedDrafter,
    ModelDrafter,
    NoDrafter,
    available_drafters,
)
from specrt.speculation.gamma import BuiltGamma, FixedGamma, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Drafter
from specrt.speculation.target import VERIFIERS
from specrt.speculation.text_memory import KeyMemory, MemoryDrafter, TextMemory


@dataclass(frozen=True)
class Models:
    """The engines of a bundle, its defaults, and what a pass costs here."""

    target: Engine
    draft: Engine | None
    gammas: tuple[int, ...]
    """Every gamma a verify pass was built for, 0 included."""
    gamma: Gamma = AUTO
    """The default of requests."""
    drafter: str = ""
    """The default of requests; the first of `DRAFTERS` that can run, when empty."""
    costs: Costs | None = None
    """What passes cost on this machine; assumed when None."""
    absent: str | None = None
    """Why a draft that the bundle has was not opened."""
    rounds: FusedRounds | None = None
    """Runs greedy rounds in one launch, where one device has both engines."""
    draft_kind: str = "decoder"
    """A key of `DRAFT_KINDS`."""
    decoder_start: tuple[int, ...] = ()
    """Tokens that a text of an encoder-decoder begins with; its prompt is the source."""
    features: tuple[int, int] | None = None
    """Channels and frames of a source of features; None where a source is token ids."""
    options: Mapping[str, object] = field(default_factory=dict)
    """What requests that leave them out have for some of `BUNDLE_OPTIONS`."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """How the model is meant to be sampled, for commands that are told nothing else."""
    snapshot_bytes: int = 0
    """Most bytes of snapshots of rows whose layers have recurrent states."""
    auto: AutoFactory = field(default_factory=auto_factory)
    """What the policies of gamma `auto` are made by."""

    @cached_property
    def conditioned(self) -> ConditionedEngine | None:
        """The target where its texts are of sources."""
        return self.target if isinstance(self.target, ConditionedEngine) else None

    def readers(self, drafter: str, gamma: Gamma) -> int:
        """Return how many of the engines read the source of a request, the target first."""
        drafts = gamma != 0 and len(self.gammas) > 1 and DRAFTERS[drafter].needs_model
        return 1 + (drafts and self.draft is not None)

    @property
    def one_pass(self) -> bool:
        """Whether a draft of any length is one pass of the head."""
        block = None if self.draft is None else self.draft.traits.block
        return block is not None and not block.chained

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """What passes and rounds were captured into so far; None where nothing captures."""
        return cuda_graphs(self.target, self.draft, self.rounds)


class DecodingMode(NamedTuple):
    """How a request chooses tokens: acceptance and the cost of a round depend on it."""

    greedy: bool
    processed: bool
    """Whether the request's own processors edit scores."""

    @classmethod
    def of(cls, params: SamplingParams, processors: LogitsProcessors | None) -> DecodingMode:
        """Return the mode of a request."""
        return cls(params.greedy, processors is not None)

    @property
    def fused(self) -> bool:
        """Whether its rounds can be one launch."""
        return self.greedy and not self.processed


class GammaPolicies:
    """The gamma policies of one request at a time, one for each source and mode.

    What they learned stays from one request to the next. `step` has what rows that share passes
    share.
    """

    def __init__(self, models: Models, step: StepPlan | None = None) -> None:
        self._models = models
        self._step = step
        self.adapts = False
        """Whether the request drafts as far as pays."""
        self.drafting: AdaptiveGamma | None = None
        """The policy of its drafts that take passes."""
        self._adaptive: dict[tuple[tuple[str, ...], bool, DecodingMode], AdaptiveGamma] = {}
        """By the names of a policy and of its rivals, whether its drafts are free, and the mode."""

    def policy(self, drafter: str, source: str, gamma: Gamma, mode: DecodingMode) -> GammaPolicy:
        """Return the policy of one source of a drafter."""
        if gamma != AUTO:
            return FixedGamma(gamma)
        adaptive, gammas = self.adaptive(drafter, source, mode), self._models.gammas
        self.adapts = True
        if source == ModelDrafter.SOURCE:
            self.drafting = adaptive
        complete = len(gammas) == max(gammas) + 1
        return adaptive if complete else BuiltGamma(adaptive, gammas)

    def adaptive(self, drafter: str, source: str, mode: DecodingMode) -> AdaptiveGamma:
        """Return the policy of gamma `auto`.

        The rival of a source is the one that the same drafter falls back to.
        """
        key = chain, free, _ = self._key(drafter, source, mode)
        if key not in self._adaptive:
            most = max(self._models.gammas)
            costs = self._models.costs or Costs.assume(most)
            fused = mode.fused and self._models.rounds is not None
            if free:
                costs = replace(costs, draft_ns=(0.0,) * len(costs.draft_ns))
            elif fused and source == ModelDrafter.SOURCE:
                costs = as_one_launch(costs)
            elif self._models.one_pass and source == ModelDrafter.SOURCE:
                costs = costs.of_one_pass()
            rival = self.adaptive(drafter, chain[1], mode) if len(chain) > 1 else None
            self._adaptive[key] = self._models.auto.policy(costs, most, rival, self._step)
        return self._adaptive[key]

    @staticmethod
    def _key(
        drafter: str, source: str, mode: DecodingMode
    ) -> tuple[tuple[str, ...], bool, DecodingMode]:
        spec = DRAFTERS[drafter]
        if source == MemoryDrafter.SOURCE and spec.beside_memory:
            place = spec.beside_memory
            rivals = spec.policies[spec.policies.index(place) + 1 :]
            return (source, *rivals), place in spec.free, mode
        if source not in spec.policies:
            raise RequestError(
                f"drafter {drafter!r} asked for the gamma policy {source!r}; its entry of DRAFTERS "
                f"names {', '.join(map(repr, spec.policies))}"
            )
        return spec.policies[spec.policies.index(source) :], source in spec.free, mode

    def fallback(
        self, drafter: str, gamma: Gamma, mode: DecodingMode, *, drafted: bool
    ) -> str | None:
        """Return why `auto` stopped drafting, or never began; None where it drafts."""
        if gamma != AUTO:
            return None
        after = FALLBACK_AFTER if drafted else 1
        names = DRAFTERS[drafter].policies
        remembers = DRAFTERS[drafter].beside_memory and MemoryDrafter.SOURCE
        if remembers and self._key(drafter, remembers, mode) in self._adaptive:
            names = (remembers, *names)
        policies = [self._adaptive.get(self._key(drafter, name, mode)) for name in names]
        reasons = [policy.fallback(after) if policy is not None else None for policy in policies]
        return "; ".join(dict.fromkeys(map(str, reasons))) if reasons and all(reasons) else None


@dataclass(frozen=True)
class _Context:
    """See `DraftContext`."""

    models: Models
    policies: GammaPolicies
    drafter: str
    gamma: Gamma
    params: SamplingParams
    noise: Noise
    processors: LogitsProcessors | None
    caches: Sequence[KVCache]
    memory: KeyMemory | None
    source: Sequence[int]

    def policy(self, source: str) -> GammaPolicy:
        mode = DecodingMode.of(self.params, self.processors)
        return self.policies.policy(self.drafter, source, self.gamma, mode)

    def model(self) -> ModelDrafter:
        models, draft = self.models, self.models.draft
        assert draft is not None, "check_drafter refuses a drafter that needs a model without one"
        shared = min(models.target.geometry.vocab_size, draft.geometry.vocab_size)
        target, cache = self.caches if self.caches else (None, KVCache(draft))
        policy = self.policy(ModelDrafter.SOURCE)
        return DRAFT_KINDS[models.draft_kind](
            cache, self.params, self.noise, policy, shared, models.rounds, self.processors, target,
            max(models.gammas),
        )  # fmt: skip


class DrafterPool:
    """Makes the drafters of requests, and lends each the policies of one that is over."""

    def __init__(
        self, models: Models, step: StepPlan | None = None, rows: int = 1,
        memory: TextMemory | None = None,
    ) -> None:  # fmt: skip
        self._models = models
        self._step = step
        self._rows = rows
        self._memory = memory
        self._unused: list[GammaPolicies] = []

    def check_gamma(self, gamma: Gamma | None) -> Gamma:
        """Return the gamma to use: the request's, or the bundle's default.

        Raises: RequestError for one that no verify pass was built for.
        """
        models = self._models
        if gamma is None:
            return models.gamma
        if gamma == AUTO or (type(gamma) is int and gamma in models.gammas):
            return gamma
        built = ", ".join(map(str, models.gammas))
        raise RequestError(
            f"gamma {gamma!r} is not among those this bundle was built for: {built}; choose one "
            "of them or 'auto', or add it to `gammas` in the recipe and build again"
        )

    def check_drafter(self, drafter: str | None) -> str:
        """Return the drafter to use: the request's, or the bundle's default.

        Raises: RequestError for one that is unknown, or needs a draft model that is not there.
        """
        models = self._models
        if drafter is None:
            if models.absent is not None:
                return NO_DRAFTER
            return models.drafter or available_drafters(has_model=models.draft is not None)[0]
        if drafter not in DRAFTERS:
            raise RequestError(f"drafter {drafter!r} is unknown{did_you_mean(drafter, DRAFTERS)}")
        if DRAFTERS[drafter].needs_model and models.draft is None:
            reason = models.absent or "this bundle has no draft model"
            others = [name for name, spec in DRAFTERS.items() if not spec.needs_model]
            raise RequestError(
                f"drafter {drafter!r} needs a draft model: {reason}; use "
                f"{' or '.join(map(repr, others))}"
            )
        return drafter

    def borrow(self) -> GammaPolicies:
        """Return policies that no other request uses, with what they learned."""
        policies = self._unused.pop() if self._unused else None
        policies = policies or GammaPolicies(self._models, self._step)
        policies.adapts, policies.drafting = False, None
        return policies

    def give_back(self, policies: GammaPolicies) -> None:
        """Keep the policies of a request that is over, for as many as run at once."""
        if len(self._unused) < self._rows:
            self._unused.append(policies)

    def clear(self) -> None:
        """Drop all policies, which refer to the engines."""
        self._unused.clear()

    def make(
        self, policies: GammaPolicies, drafter: str, gamma: Gamma, params: SamplingParams,
        noise: Noise, processors: LogitsProcessors | None = None, caches: Sequence[KVCache] = (),
        memory_key: str | None = None, source: Source | None = None,
    ) -> Drafter:  # fmt: skip
        """Return a drafter for one completion; `caches` are its row's, the target's first.

        It drafts from finished texts of `memory_key`, and from none when that is None; and from a
        `source` of token ids.
        """
        if gamma == 0 or len(self._models.gammas) < 2:
            return NoDrafter()
        memory = None
        if self._memory is not None and memory_key is not None and may_recall(params):
            memory = KeyMemory(self._memory, memory_key)
        ids: list[int] = []
        if source is not None and np.issubdtype(source.dtype, np.integer):
            ids = source.tolist()
        inner = DRAFTERS[drafter].make(
            _Context(
                self._models, policies, drafter, gamma, params, noise, processors, caches, memory,
                ids,
            )
        )  # fmt: skip
        if isinstance(inner, NoDrafter) or processors is None or not processors.forces:
            return inner
        return ForcedDrafter(inner, processors.forced, self._models.gammas)


def may_recall(params: SamplingParams) -> bool:
    """Tell whether finished texts may be drafted from.

    Not where drafts change what is drawn and the seed was given: its text would no longer repeat,
    and a text of the same seed was drawn with the very noise that would judge it.
    """
    changes = VERIFIERS[params.verifier].needs_distributions and not params.greedy
    return params.seed is None or not changes


def as_one_launch(costs: Costs) -> Costs:
    """Return the costs of rounds that draft and verify in one launch: all of it is verifying."""
    both = zip(costs.verify_ns, costs.draft_ns, strict=True)
    free = (0.0,) * len(costs.draft_ns)
    return replace(costs, verify_ns=tuple(map(sum, both)), draft_ns=free)
