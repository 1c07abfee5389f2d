"""What requests need to run: drafters, which they borrow and give back, and what passes cost."""

from __future__ import annotations

from collections.abc import Callable

from specrt.speculation.costs import Costs
from specrt.drafters import Drafters, Manner
from specrt.engine import PackedEngine
from specrt.models import Models
from specrt.request import Request
from specrt.speculate import Rounds, speculate
from specrt.target import EngineTarget


class Prices:
    """What passes cost here, measured when first asked for.

    Knows no drafter: they know it, and a circle would keep engines that nobody refers to open.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._costs: Costs | None = None

    @property
    def known(self) -> bool:
        """Whether they were measured."""
        return self._costs is not None

    def costs(self) -> Costs:
        """Return the costs of passes; measuring them overwrites all buffers."""
        if self._costs is None:
            assert self._models.measure is not None, "nothing was given to measure costs with"
            self._costs = self._models.measure(self._models)
        return self._costs


class Supplies:
    """Lends drafters to requests: what the policies of one learned serves the next.

    `rows` is how many may run at once, `load` tells how many do.
    """

    def __init__(self, models: Models, rows: int, load: Callable[[], int]) -> None:
        self._models = models
        self._rows = rows
        self._load = load
        self._prices = Prices(models)
        self._drafters: list[Drafters] = []
        """Those that no request uses, with what their policies learned."""

    def rounds(self, request: Request) -> Rounds:
        """Return the rounds of a request, drafted with what the policies of others learned."""
        drafters = self._drafters.pop() if self._drafters else self._new_drafters()
        request.drafters = drafters
        counts, params, rules = request.completion.speculation, request.params, request.rules
        drafter = drafters.make(
            counts.drafter, counts.gamma, params, request.noise, rules, request.caches
        )
        judge = EngineTarget(request.caches[0], params, request.noise, rules)
        return speculate(judge, drafter, request.tokens, request.limit)

    def take_back(self, request: Request) -> None:
        """Let go of what a request that is over has used."""
        if request.rounds is not None:
            request.rounds.close()
        drafters, request.drafters = request.drafters, None
        if drafters is not None:
            counts = request.completion.speculation
            manner = Manner.of(request.params, request.rules)
            found = drafters.fallback(counts.drafter, counts.gamma, manner)
            counts.fallback = found or counts.fallback
            if len(self._drafters) < self._rows:
                self._drafters.append(drafters)
        request.rounds = request.rules = None

    def unpriced(self, request: Request) -> bool:
        """Tell whether what passes cost must be known for it, and is not."""
        counts = request.completion.speculation
        return not self._prices.known and Drafters.weighs(counts.drafter, counts.gamma)

    def measure(self) -> None:
        """Measure what passes cost, which overwrites all buffers."""
        self._prices.costs()

    def clear(self) -> None:
        """Let go of all drafters, which refer to the engines."""
        self._drafters.clear()

    def _new_drafters(self) -> Drafters:
        several = isinstance(self._models.target, PackedEngine)
        return Drafters(self._models, self._prices.costs, self._load if several else None)
