"""The engines of a bundle, and the drafters with their gamma policies that outlive a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specrt.engine.protocol import Engine, FusedRounds
from specrt.errors import RequestError, did_you_mean
from specrt.params import AUTO, DRAFTERS, Gamma, SamplingParams
from specrt.sampling.grammar import GrammarRules
from specrt.sampling.noise import Noise
from specrt.sampling.processors import LogitsProcessors
from specrt.speculation.costs import Costs
from specrt.speculation.drafters import CascadeDrafter, ForcedDrafter, ModelDrafter, NoDrafter
from specrt.speculation.gamma import AutoGamma, BuiltGamma, FixedGamma, GammaPolicy, LoadAwareGamma
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.round import Drafter


@dataclass(frozen=True)
class Models:
    """The engines of a bundle, its defaults, and what a pass costs here."""

    target: Engine
    draft: Engine | None
    gammas: tuple[int, ...]
    """Every gamma a verify pass was built for, 0 included."""
    gamma: Gamma = AUTO
    """Used when none is asked for."""
    drafter: str = ""
    """Used when none is asked for; the draft model, or lookup without one, when empty."""
    measure: Callable[[Models], Costs] | None = None
    """Gives the costs on this machine; called once, when gamma is first left to be chosen."""
    absent: str | None = None
    """Why a draft that the bundle has was not opened."""
    rounds: FusedRounds | None = None
    """Runs greedy rounds in one launch, where one device has both engines."""

    def timed(self, target: Engine, draft: Engine | None, rounds: FusedRounds | None) -> Models:
        """Return the same with other engines in place, as a benchmark wraps them."""
        return replace(self, target=target, draft=draft, rounds=rounds)


class DecodingMode(NamedTuple):
    """How a request chooses tokens: what is accepted differs, and what a round costs."""

    greedy: bool
    ruled: bool
    """Whether the request's own processors edit scores."""

    @classmethod
    def of(cls, params: SamplingParams, rules: LogitsProcessors | None) -> DecodingMode:
        """Return the manner of a request."""
        return cls(params.greedy, rules is not None)

    @property
    def whole(self) -> bool:
        """Whether its rounds can be one launch."""
        return self.greedy and not self.ruled


class DrafterPool:
    """Makes the drafter of each completion.

    What the policies behind gamma `auto` learned is kept from one completion to the next, apart
    for each manner of choosing tokens. `costs` tells what passes cost, `load` how many rows share
    them, where there may be several.
    """

    def __init__(
        self,
        models: Models,
        costs: Callable[[], Costs] | None = None,
        load: Callable[[], int] | None = None,
    ) -> None:
        self._models = models
        self._measured = costs
        self._load = load
        self._policies: dict[tuple[str, DecodingMode], AutoGamma] = {}

    def check_gamma(self, gamma: Gamma | None) -> Gamma:
        """Return the gamma to use: the one asked for, or the bundle's default.

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
        """Return the drafter to use: the one asked for, or the bundle's default.

        Raises: RequestError for one that is unknown, or needs a draft model that is not there.
        """
        models = self._models
        if drafter is None:
            if models.absent is not None:
                return "none"
            return models.drafter or ("model" if models.draft else "ngram")
        if drafter not in DRAFTERS:
            raise RequestError(
                f"drafter {drafter!r} is unknown{did_you_mean(drafter, DRAFTERS)}; known: "
                f"{', '.join(DRAFTERS)}"
            )
        if drafter in ("model", "cascade") and models.draft is None:
            why = models.absent or "this bundle has no draft model"
            raise RequestError(
                f"drafter {drafter!r} needs a draft model: {why}; use 'ngram' or 'none'"
            )
        return drafter

    def make(
        self, drafter: str, gamma: Gamma, params: SamplingParams, noise: Noise,
        rules: LogitsProcessors | None = None, caches: Sequence[KVCache] = (),
    ) -> Drafter:  # fmt: skip
        """Return a drafter for one completion; `caches` are its row's, the target's first."""
        if gamma == 0 or drafter == "none" or len(self._models.gammas) < 2:
            return NoDrafter()
        asked = self._asked(drafter, gamma, params, noise, rules, caches)
        if isinstance(rules, GrammarRules):
            return ForcedDrafter(asked, rules.forced, self._models.gammas)
        return asked

    def _asked(
        self, drafter: str, gamma: Gamma, params: SamplingParams, noise: Noise,
        rules: LogitsProcessors | None, caches: Sequence[KVCache],
    ) -> Drafter:  # fmt: skip
        if drafter == "model":
            return self._model(gamma, params, noise, rules, caches)
        if drafter == "ngram":
            return NgramDrafter(self._policy("ngram", gamma, DecodingMode.of(params, rules)))
        model = self._model(gamma, params, noise, rules, caches)
        manner = DecodingMode.of(params, rules)
        return CascadeDrafter(NgramDrafter(self._policy("lookup", gamma, manner)), model)

    @staticmethod
    def weighs(drafter: str, gamma: Gamma) -> bool:
        """Tell whether a policy will ask what passes cost."""
        return gamma == AUTO and drafter != "none"

    def fallback(self, drafter: str, gamma: Gamma, manner: DecodingMode) -> str | None:
        """Say why speculation is off, where a limit was crossed that `auto` keeps to."""
        if gamma != AUTO:
            return None
        sources = {"cascade": ("lookup", "model")}.get(drafter, (drafter,))
        policies = [self._policies.get((source, manner)) for source in sources]
        reasons = [p.fallback if p is not None else None for p in policies]
        return "; ".join(r for r in reasons if r) if all(reasons) else None

    def _model(
        self, gamma: Gamma, params: SamplingParams, noise: Noise, rules: LogitsProcessors | None,
        caches: Sequence[KVCache],
    ) -> ModelDrafter:  # fmt: skip
        draft = self._models.draft
        assert draft is not None, "check_drafter refuses a model drafter without a draft"
        both = min(self._models.target.geometry.vocab_size, draft.geometry.vocab_size)
        manner = DecodingMode.of(params, rules)
        policy, rounds = self._policy("model", gamma, manner), self._models.rounds
        target, cache = caches if caches else (None, KVCache(draft))
        return ModelDrafter(cache, params, noise, policy, both, rounds, rules, target)

    def _policy(self, source: str, gamma: Gamma, manner: DecodingMode) -> GammaPolicy:
        if gamma != AUTO:
            return FixedGamma(gamma)
        adaptive, gammas = self._adaptive(source, manner), self._models.gammas
        policy: GammaPolicy = adaptive
        if self._load is not None:
            policy = LoadAwareGamma(adaptive, self._load)
        whole = len(gammas) == max(gammas) + 1
        return policy if whole else BuiltGamma(policy, gammas)

    def _adaptive(self, source: str, manner: DecodingMode) -> AutoGamma:
        """Return the policy of a source: the model, an n-gram, or lookup before the model."""
        key = (source, manner)
        if key not in self._policies:
            assert self._measured is not None, "nothing was given to tell costs"
            costs, most = self._measured(), max(self._models.gammas)
            rival = None
            if source == "model" and manner.whole and self._models.rounds is not None:
                costs = undivided(costs)
            if source != "model":
                costs = replace(costs, draft_ns=(0.0,) * len(costs.draft_ns))
            if source == "lookup":
                rival = self._adaptive("model", manner)
            self._policies[key] = AutoGamma(costs, most, rival)
        return self._policies[key]


def undivided(costs: Costs) -> Costs:
    """Return the costs of rounds that draft and verify in one launch: all of it is verifying."""
    both = zip(costs.verify_ns, costs.draft_ns, strict=True)
    free = (0.0,) * len(costs.draft_ns)
    return replace(costs, verify_ns=tuple(map(sum, both)), draft_ns=free)
