"""Whatever proposes tokens: the protocol, and the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrt.engine import Engine, Output
from specrt.noise import Noise, Purpose
from specrt.params import SamplingParams
from specrt.sampling import Distribution, process
from specrt.target import CachedTokens
from specrt.verify import NOTHING, Proposal


class Drafter(Protocol):
    """A source of proposals. It may be wrong; it may not be slow."""

    def propose(self, tokens: Sequence[int], gamma: int) -> Proposal:
        """Propose at most gamma tokens to follow the committed ones."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn what was committed after a round."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, tokens: Sequence[int], gamma: int) -> Proposal:
        """Return the empty proposal."""
        return NOTHING

    def observe(self, tokens: Sequence[int]) -> None:
        """Learn nothing."""


class ModelDrafter:
    """A draft model with a cache of its own.

    Under `match` it draws with the noise the target will draw with, so that two similar
    distributions pick the same token (drafter-invariant speculative decoding, arXiv:2408.07978).
    Under `rejection` its draws must be independent of the target's.

    `vocabulary` is how many ids both models know, where padding makes one of them longer. Ids
    beyond it are never proposed, and once one was committed that the draft does not know, it is
    silent.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        noise: Noise,
        vocabulary: int | None = None,
    ) -> None:
        self._cache = CachedTokens(engine)
        self._vocabulary = vocabulary or engine.geometry.vocab_size
        self._params = params
        self._noise = noise
        self._keeps = params.verifier == "rejection" and not params.greedy
        self._purpose = Purpose.DRAFT if self._keeps else Purpose.TOKEN

    def propose(self, tokens: Sequence[int], gamma: int) -> Proposal:
        """Feed what the cache lacks, then one drafted token at a time.

        After a round in which every token was kept the cache lacks two tokens, else one. The last
        drafted token is not fed: whether it stays is not known yet.
        """
        pending = tokens[self._cache.length :]
        if gamma == 0 or max(pending) >= self._cache.engine.geometry.vocab_size:
            return NOTHING
        drafted: list[int] = []
        distributions: list[Distribution] = []
        while True:
            output = self._cache.feed(pending, 1)
            drafted.append(self._choose(output, len(tokens) + len(drafted), distributions))
            if len(drafted) == gamma:
                return Proposal(drafted, distributions if self._keeps else None)
            pending = drafted[-1:]

    def _choose(self, output: Output, position: int, distributions: list[Distribution]) -> int:
        if self._params.greedy:
            best = int(output.argmax.item())
            if 0 <= best < self._vocabulary:
                return best
            return int(output.logits[0, 0, : self._vocabulary].argmax())
        distribution = process(output.logits[0, 0, : self._vocabulary], self._params)
        if self._keeps:
            distributions.append(distribution)
        return distribution.draw(self._noise, self._purpose, position)

    def observe(self, tokens: Sequence[int]) -> None:
        """Forget drafted tokens that were not committed."""
        self._cache.length = min(self._cache.length, len(tokens) - 1)
