"""The target: it scores what was drafted, and a verifier says what to keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from specrt.engine.protocol import Output
from specrt.errors import EngineError
from specrt.params import Row, SamplingParams
from specrt.sampling.distribution import (
    Distribution,
    Ranked,
    distribution_of,
    joined,
    not_a_number,
    process,
    ranked,
    residual,
)
from specrt.sampling.noise import Noise, Purpose
from specrt.sampling.processors import LogitsProcessors, likeliest
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import Passes, Proposal, Verdict


def match_greedy(drafted: Sequence[int], best: Sequence[int]) -> Verdict:
    """Accept drafted tokens while they are the target's likeliest: `match` at temperature 0.

    `best[i]` is the target's argmax after i drafted tokens.
    Source: Stern et al. 2018, arXiv:1811.03115.
    """
    for i, token in enumerate(drafted):
        if best[i] != token:
            return Verdict(i, best[i])
    return Verdict(len(drafted), best[len(drafted)])


def match(drafted: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """Accept drafted tokens while they are what the target itself chooses.

    `choose(i)` is the target's choice after i drafted tokens: its draw, with noise keyed by
    position. The output is therefore the plain output, token for token.
    """
    for i, token in enumerate(drafted):
        chosen = choose(i)
        if chosen != token:
            return Verdict(i, chosen)
    return Verdict(len(drafted), choose(len(drafted)))


def rejection(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    """Accept x with probability min(1, p(x)/q(x)), else draw from norm(max(0, p - q)).

    `target(i)` is the target's distribution after i drafted tokens; `position` is the index of
    the first drafted token. The output is distributed as the target's own.
    Source: Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1; Chen et al. 2023,
        arXiv:2302.01318.
    """
    for i, token in enumerate(proposal.tokens):
        p = target(i)
        q = proposal.distributions[i] if proposal.distributions is not None else None
        allowance = p.prob(token) / (q.prob(token) if q is not None else 1.0)
        if noise.uniform(Purpose.ACCEPT, position + i) >= allowance:
            rest = residual(p, q, token)
            return Verdict(i, rest.draw(noise, Purpose.CORRECTION, position + i))
    last = len(proposal.tokens)
    return Verdict(last, target(last).draw(noise, Purpose.CORRECTION, position + last))


T = TypeVar("T")


class EngineTarget:
    """A target in this process."""

    def __init__(
        self,
        cache: KVCache,
        params: SamplingParams,
        noise: Noise,
        rules: LogitsProcessors | None = None,
    ) -> None:
        self._rules = rules
        self._cache = cache
        self._params = params
        self._noise = noise
        self._reads = params.prompt_logprobs is not None
        """Whether the prompt is still to be scored."""

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Passes[Verdict]:
        """Feed what the cache lacks plus the drafted tokens in one pass, and apply the rule."""
        drafted = proposal.tokens
        cache = self._cache
        if self._rules is not None:
            self._rules.learn(tokens)
        prompt = (yield from self._scored(tokens)) if self._reads else None
        output = yield from cache.feed([*tokens[cache.length :], *drafted], len(drafted) + 1)
        verdict = self._verify(proposal, output, len(tokens))
        if self._params.logprobs is not None:
            kept = [*drafted[: verdict.accepted], verdict.next]
            found = ranked(output.logits[0, : len(kept)], kept, self._params.logprobs)
            verdict = verdict._replace(logprobs=found)
        cache.length = len(tokens) + verdict.accepted
        return verdict if prompt is None else verdict._replace(prompt_logprobs=prompt)

    def _scored(self, prompt: Sequence[int]) -> Passes[Ranked]:
        """Read a prompt up to its last token, and rank all of its tokens but the first."""
        parts: list[Ranked] = []
        k = self._params.prompt_logprobs or 0

        def look(output: Output, first: int, seen: int) -> None:
            rows = output.logits[0, seen:]
            following = first + seen + 1
            parts.append(ranked(rows, prompt[following : following + len(rows)], k))

        yield from self._cache.read(prompt[:-1], look)
        self._reads = False
        return joined(parts)

    def _verify(self, proposal: Proposal, output: Output, position: int) -> Verdict:
        params, noise, drafted = self._params, self._noise, proposal.tokens
        if params.greedy and self._rules is None:  # the argmax says it all: logits stay in place
            best = output.argmax[0].tolist()
            verdict = match_greedy(drafted, best)
            if min(best[: verdict.accepted + 1]) < 0:
                raise not_a_number()
            return verdict
        if params.greedy:
            return match(drafted, lambda i: self._read(output, drafted, i, likeliest))

        def distribution(i: int) -> Distribution:
            return self._distribution(output, drafted, i)

        if params.verifier == "rejection":
            return rejection(proposal, distribution, noise, position)
        return match(drafted, lambda i: distribution(i).draw(noise, Purpose.TOKEN, position + i))

    def _read(self, output: Output, drafted: Sequence[int], i: int, take: Callable[[Row], T]) -> T:
        """Read a row as the request's processors leave it, behind the tokens drafted before."""
        assert self._rules is not None
        if output.argmax[0, i] < 0:
            raise not_a_number()
        return self._rules.read(output.logits[0, i], drafted[:i], take)

    def _distribution(self, output: Output, drafted: Sequence[int], i: int) -> Distribution:
        if self._rules is None:
            return distribution_of(output, i, self._params)
        return self._read(output, drafted, i, self._processed)

    def _processed(self, scores: Row) -> Distribution:
        try:
            return process(scores, self._params)
        except EngineError:
            likeliest(scores)  # says that nothing is left, where that is the reason
            raise
