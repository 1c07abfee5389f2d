"""The target scores drafted tokens; a verifier, one of `VERIFIERS`, accepts a prefix of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from specrt.engine.protocol import Output
from specrt.errors import EngineError, RequestError
from specrt.params import Row, SamplingParams
from specrt.sampling.distribution import (
    Distribution,
    Ranked,
    distribution_of,
    joined,
    not_a_number,
    overlap,
    process,
    ranked,
    residual,
)
from specrt.sampling.noise import Noise, Purpose
from specrt.sampling.processors import LogitsProcessors, likeliest
from specrt.speculation.kv_cache import KVCache, scorable_rows
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
    """Accept drafted tokens while they equal the target's own choice.

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
    """Accept the longest prefix that block verification allows, then draw from what is left.

    `target(i)` is the target's distribution after i drafted tokens; `position` is the index of
    the first drafted token. The output is distributed as the target's own, and no fewer tokens
    are accepted on average than where each is judged by itself; docs/drafting.md has the proof.

    Certain tokens are each kept with the target's probability of them: that has the same law, and
    reads no row after the first refusal.

    The numbers are keyed by the round as well: those of positions that are not committed decided
    about this round, and the next one needs others for the same positions.
    Source: Sun et al. 2024, arXiv:2403.10444, Algorithm 2; for certain tokens Leviathan et al.
        2023, arXiv:2211.17192, Algorithm 1.
    """
    drafted, drafts = proposal.tokens, proposal.distributions

    def keeps(i: int, chance: float) -> bool:
        return noise.uniform(Purpose.ACCEPT, position << 16 | i) < chance

    def verdict(accepted: int, law: Distribution) -> Verdict:
        return Verdict(accepted, law.draw(noise, Purpose.CORRECTION, position + accepted))

    if drafts is None:
        for i, token in enumerate(drafted):
            law = target(i)
            if not keeps(i, law.prob(token)):
                return verdict(i, residual(law, None, token))
        return verdict(len(drafted), target(len(drafted)))
    laws, weights = _weigh(drafted, drafts, target)
    last = len(laws)
    if last == 0 or keeps(last - 1, weights[last]):
        return verdict(last, target(last))
    for i in range(last - 1, -1, -1):
        weight = weights[i]
        if weight == 1.0:  # at the latest that of the empty prefix
            break
        left = max(weight - overlap(laws[i], drafts[i], weight), 0.0)
        if keeps(i - 1, left / (left + 1.0 - weight)):
            break
    return verdict(i, residual(laws[i], drafts[i], drafted[i], weights[i]))


def _weigh(
    drafted: Sequence[int], drafts: Sequence[Distribution], target: Callable[[int], Distribution]
) -> tuple[list[Distribution], list[float]]:
    """Return the target's distributions, and the weight of each prefix, the empty one first.

    The weight is the chance that at least so much of this draft is accepted. A prefix that the
    target rules out ends the draft, and one that it can say nothing about: that is an error only
    if the text gets there.
    """
    laws: list[Distribution] = []
    weights = [1.0]
    for i, token in enumerate(drafted):
        try:
            law = target(i)
        except (EngineError, RequestError):
            break
        laws.append(law)
        weights.append(min(weights[i] * law.prob(token) / drafts[i].prob(token), 1.0))
        if weights[-1] == 0.0:
            break
    return laws, weights


def match_draws(
    proposal: Proposal, target: Callable[[int], Distribution], noise: Noise, position: int
) -> Verdict:
    """Accept drafted tokens while they equal the target's own draws: `match` when sampling."""
    drafted = proposal.tokens
    return match(drafted, lambda i: target(i).draw(noise, Purpose.TOKEN, position + i))


Accept = Callable[[Proposal, Callable[[int], Distribution], Noise, int], Verdict]
"""A rule: called with the proposal, the target's distribution after i drafted tokens, the noise of
the request, and the index of the first drafted token."""


class Verifier(NamedTuple):
    """A lossless rule for sampled tokens. Greedy decoding is `match` under every verifier."""

    accept: Accept
    needs_distributions: bool = False
    """Whether it reads what the draft drew each token from."""
    draft_noise: Purpose = Purpose.TOKEN
    """The noise a draft draws with: TOKEN is the target's own, DRAFT is independent of it."""
    in_order: bool = False
    """Whether it accepts all tokens before a row whose error it lets pass."""


VERIFIERS: dict[str, Verifier] = {
    "match": Verifier(match_draws, in_order=True),
    "rejection": Verifier(
        rejection, needs_distributions=True, draft_noise=Purpose.DRAFT, in_order=True
    ),
}
"""By the name that `SamplingParams.verifier` has; a new verifier is one entry."""


def check_verifier(name: str) -> Verifier:
    """Return a verifier by its name.

    Raises: RequestError for one that is unknown.
    """
    if name not in VERIFIERS:
        raise RequestError(f"verifier is {name!r}; expected {' or '.join(map(repr, VERIFIERS))}")
    return VERIFIERS[name]


T = TypeVar("T")


class EngineTarget:
    """A target in this process."""

    def __init__(
        self,
        cache: KVCache,
        params: SamplingParams,
        noise: Noise,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self._processors = processors
        self._cache = cache
        self.max_gamma = scorable_rows(cache.engine) - 1
        self._params = params
        self._greedy = params.greedy
        self._noise = noise
        verifier = VERIFIERS[params.verifier]
        self._accept = verifier.accept
        self._in_order = params.greedy or verifier.in_order
        self._prompt_pending = params.prompt_logprobs is not None
        """Whether the prompt is still to be scored."""
        self._row = 0
        """The latest row that was looked at in a round."""

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Passes[Verdict]:
        """Feed what the cache lacks plus the drafted tokens in one pass, and apply the rule."""
        drafted = proposal.tokens
        cache = self._cache
        if self._processors is not None:
            self._processors.learn(tokens)
        prompt = (yield from self._score(tokens)) if self._prompt_pending else None
        output = yield from cache.feed([*tokens[cache.length :], *drafted], len(drafted) + 1)
        self._row = 0
        try:
            verdict = self._verify(proposal, output, len(tokens))
        except (EngineError, RequestError):
            if self._row == 0 or not self._in_order:
                raise
            # An error only if the text gets there: an accepted token may have ended it.
            verdict = Verdict(self._row - 1, drafted[self._row - 1])
        if self._params.logprobs is not None:
            committed = [*drafted[: verdict.accepted], verdict.next]
            logprobs = ranked(output.logits[0, : len(committed)], committed, self._params.logprobs)
            verdict = verdict._replace(logprobs=logprobs)
        cache.length = len(tokens) + verdict.accepted
        return verdict if prompt is None else verdict._replace(prompt_logprobs=prompt)

    def _score(self, prompt: Sequence[int]) -> Passes[Ranked]:
        """Read a prompt up to its last token, and rank all of its tokens but the first."""
        parts: list[Ranked] = []
        k = self._params.prompt_logprobs or 0

        def take(output: Output, first: int, known: int) -> None:
            rows = output.logits[0, known:]
            following = first + known + 1
            parts.append(ranked(rows, prompt[following : following + len(rows)], k))

        yield from self._cache.read(prompt[:-1], take)
        self._prompt_pending = False
        return joined(parts)

    def _verify(self, proposal: Proposal, output: Output, position: int) -> Verdict:
        greedy, noise, drafted = self._greedy, self._noise, proposal.tokens
        if greedy and self._processors is None:  # the argmax is enough: no logits are read
            best = output.argmax[0].tolist()
            verdict = match_greedy(drafted, best)
            self._row = verdict.accepted
            if min(best[: verdict.accepted + 1]) < 0:
                raise not_a_number()
            return verdict
        if greedy:
            return match(drafted, lambda i: self._read(output, drafted, i, likeliest))

        def distribution(i: int) -> Distribution:
            return self._distribution(output, drafted, i)

        return self._accept(proposal, distribution, noise, position)

    def _read(self, output: Output, drafted: Sequence[int], i: int, take: Callable[[Row], T]) -> T:
        """Read a row as the request's processors leave it, after the tokens drafted before."""
        assert self._processors is not None
        self._row = i
        if output.argmax[0, i] < 0:
            raise not_a_number()
        return self._processors.read(output.logits[0, i], drafted[:i], take)

    def _distribution(self, output: Output, drafted: Sequence[int], i: int) -> Distribution:
        self._row = i
        if self._processors is None:
            return distribution_of(output, i, self._params)
        return self._read(output, drafted, i, self._processed)

    def _processed(self, scores: Row) -> Distribution:
        try:
            return process(scores, self._params)
        except EngineError:
            likeliest(scores)  # raises where the processors ruled out every token
            raise
