"""Drafters: a draft model, two drafters in turn, and tokens that a grammar forces."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from specrt.engine.protocol import FusedRounds, Output
from specrt.errors import EngineError, RequestError
from specrt.params import Row, SamplingParams
from specrt.sampling.distribution import Distribution, distribution_of, process
from specrt.sampling.noise import Noise, Purpose
from specrt.sampling.processors import LogitsProcessors, likeliest
from specrt.speculation.gamma import DraftDecision, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.round import NOTHING, Drafter, Passes, Proposal, Round

T = TypeVar("T")

UNKNOWN = 1.0
"""The confidence of a drafter that has none to give."""

REACH = 7.0
"""A draft looks at tokens down to exp(-7), a thousandth, of the likeliest: whatever distribution
it draws from is as lossless, and the whole of a large vocabulary costs more than the draft."""

OWN = 2
"""Most tokens that the cache lacks after a round of the model's own: its last one, and one more."""


class NoDrafter:
    """Proposes nothing: plain decoding."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return the empty proposal."""
        yield from ()
        return NOTHING

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Learn nothing."""


class ModelDrafter:
    """A draft model with a cache of its own.

    Under `match` it draws with the noise the target will draw with, so that two similar
    distributions pick the same token (drafter-invariant speculative decoding, arXiv:2408.07978).
    Under `rejection` its draws must be independent of the target's, and of those of rounds before.

    `gamma` says how far to draft, token by token. What it is told of a token, its confidence, is
    the largest probability of the draft's distribution: known before the token is drawn, so that
    leaving tokens out on its word is lossless under both rules.

    With `rounds` a greedy round is one launch where it fits: how far to draft is then decided
    before it, and the target has seen all that was drafted when `propose` returns. The policy is
    told of no confidence then, which it could not act on, and of one time for the whole round.

    Such a launch needs a target that lacks the last token only; `target` tells, where it may be
    otherwise.

    `vocabulary` is how many ids both models know, where padding makes one of them longer. Ids
    beyond it are never proposed, and once one was committed that the draft does not know, it is
    silent.
    """

    SOURCE = "model"

    def __init__(
        self,
        cache: KVCache,
        params: SamplingParams,
        noise: Noise,
        gamma: GammaPolicy,
        vocabulary: int | None = None,
        rounds: FusedRounds | None = None,
        rules: LogitsProcessors | None = None,
        target: KVCache | None = None,
    ) -> None:
        self._rules = rules
        self._target = target
        self._path: list[int] = []
        self._rounds = rounds if params.greedy and rules is None else None
        self._cache = cache
        self._vocabulary = vocabulary or cache.engine.geometry.vocab_size
        self._params = params
        self._noise = noise
        self._gamma = gamma
        self._keeps = params.verifier == "rejection" and not params.greedy
        self._purpose = Purpose.DRAFT if self._keeps else Purpose.TOKEN

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Feed what the cache lacks, then one drafted token at a time.

        After a round in which every token was kept the cache lacks two tokens, else one; after
        rounds without this drafter it lacks theirs too, and one wider pass makes up for them. The
        last drafted token is not fed: whether it stays is not known yet.
        """
        most = min(self._gamma.choose(), room)
        pending: Sequence[int] = tokens[self._cache.length :]
        if most <= 0 or max(pending) >= self._cache.engine.geometry.vocab_size:
            return NOTHING
        if self._rounds is not None:
            whole = self._whole(self._rounds, tokens, pending, most)
            if whole is not None:
                return whole
        behind = len(pending) > OWN
        choose = self._likeliest if self._params.greedy else self._draw
        if self._rules is not None:
            self._rules.learn(tokens)
        decide = self._gamma.decide
        drafted = self._path = list[int]()
        confidences: list[float] = []
        distributions: list[Distribution] = []
        while True:
            output = yield from self._cache.feed(pending, 1)
            chosen = choose(output, len(tokens) + len(drafted), distributions)
            if chosen is None:
                break
            token, confidence = chosen
            weight = decide(len(drafted) + 1, confidence if self._rounds is None else UNKNOWN)
            if weight is DraftDecision.DISCARD:
                break
            drafted.append(token)
            confidences.append(confidence)
            if weight is DraftDecision.STOP or len(drafted) == most:
                break
            pending = (token,)
        if not drafted:
            return NOTHING
        kept = distributions[: len(drafted)] if self._keeps else None
        return Proposal(drafted, kept, self.SOURCE, confidences, behind)

    def _whole(
        self, rounds: FusedRounds, tokens: Sequence[int], pending: Sequence[int], most: int
    ) -> Proposal | None:
        """Draft and verify in one launch; None where that cannot be."""
        start, committed = self._cache.length, len(tokens) - 1
        behind = self._target is not None and self._target.length < committed
        if behind or not rounds.fits(most, len(pending), start, committed):
            return None
        drafted, confidences = rounds.run(pending, start, tokens[-1], committed, most)
        self._cache.length = start + len(pending) + most - 1
        if min(drafted) < 0:  # no number to choose by: the target has not seen what came after
            kept = next(i for i, token in enumerate(drafted) if token < 0)
            if not kept:
                return NOTHING
            return Proposal(drafted[:kept], None, self.SOURCE, confidences[:kept])
        return Proposal(drafted, None, self.SOURCE, confidences, scored=True)

    def _read(self, output: Output, rules: LogitsProcessors, take: Callable[[Row], T]) -> T | None:
        """Read the scores as the request's processors leave them; None for no numbers."""
        if output.argmax.item() < 0:
            return None
        return rules.read(output.logits[0, 0, : self._vocabulary], self._path, take)

    def _likeliest(
        self, output: Output, position: int, distributions: list[Distribution]
    ) -> tuple[int, float] | None:
        if self._rules is not None:
            try:
                best = self._read(output, self._rules, likeliest)
                return None if best is None else (best, _certainty(output))
            except RequestError:  # nothing left; the target will say so where it comes to that
                return None
        best = output.argmax.item()
        if best < 0:  # the scores are no numbers
            return None
        if best >= self._vocabulary:
            best = int(output.logits[0, 0, : self._vocabulary].argmax())
        return best, _certainty(output)

    def _draw(
        self, output: Output, position: int, distributions: list[Distribution]
    ) -> tuple[int, float] | None:
        distribution = self._distribution(output)
        if distribution is None:
            return None
        if self._keeps:
            # A token drafted behind a rejection was never judged, and is drawn again in the next
            # round: with other noise, or whoever saw the first draw would know the second. No two
            # rounds begin at the same length.
            place = len(distributions)
            position = (position - place) << 16 | place
            distributions.append(distribution)
        token = distribution.draw(self._noise, self._purpose, position)
        return token, float(distribution.probs.max())

    def _distribution(self, output: Output) -> Distribution | None:
        """Return what to draw from; None where there is nothing, which ends no completion."""
        try:
            if self._rules is None:
                return distribution_of(output, 0, self._params, REACH, self._vocabulary)
            return self._read(output, self._rules, lambda row: process(row, self._params, REACH))
        except (EngineError, RequestError):
            return None

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Forget drafted tokens that were not committed, and let the policy learn."""
        self._cache.length = min(self._cache.length, len(tokens) - 1)
        self._gamma.observe(round_ if self._rounds is None else _undivided(round_))


def _certainty(output: Output) -> float:
    """Return the share of the draft's likeliest token, before any rules."""
    known = output.confidence
    return UNKNOWN if known is None else float(known.item())


def _undivided(round_: Round) -> Round:
    """Return a round with its time in one, as a launch of all of it has.

    It is that of verifying, or of drafting where that first caught up: it tells about no other.
    """
    if not round_.draft_ns or not round_.drafted:
        return round_
    spent = round_.draft_ns + round_.verify_ns
    if round_.caught_up:
        return round_._replace(draft_ns=spent, verify_ns=0)
    return round_._replace(draft_ns=0, verify_ns=spent)


class CascadeDrafter:
    """Asks one drafter, and another where the first proposes nothing.

    Meant for lookup before the draft model: a copy costs next to nothing and runs further, and
    where there is nothing to copy, or its policy chose a plain step or dropped the first token,
    the model drafts.

    While lookup drafts, the draft model's cache falls behind the committed tokens, and stays as it
    is. When its turn comes the model feeds all that it lacks in the one pass that drafts its first
    token, `tokens[length:]` wide (in chunks where that is wider than any pass it was built for),
    and drafts on from there one token at a time. Passes that nobody would have used are never run.

    Who was asked hears what came of it. To the first drafter a round that the second drafted was a
    plain step, of one token: its policy learns acceptance from tokens of its own only, and one that
    has given up still counts the rounds until it tries again, whoever drafts meanwhile. The times
    are those of the whole round. The second hears nothing of rounds that the first drafted.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second
        self._both = False
        """Whether the second drafter was asked in this round."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return what the first drafter proposes, else what the second does."""
        proposal = yield from self._first.propose(tokens, room)
        self._both = not proposal.tokens
        return (yield from self._second.propose(tokens, room)) if self._both else proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Tell the drafters that were asked what came of the round for each."""
        if not self._both:
            self._first.observe(tokens, round_)
            return
        plain = Round(round_.tokens[:1], 0, 0, round_.draft_ns, round_.verify_ns)
        self._first.observe(tokens, plain)
        self._second.observe(tokens, round_)


class ForcedDrafter:
    """Proposes what must follow, and asks another drafter where nothing must.

    `forced(tokens)` names the tokens; they cost nothing to draft and are nearly certain: a target
    may still spell the same text in other tokens, so they are verified as all drafts are. As many
    are proposed as the widest pass of `gammas` holds, whatever gamma a policy would choose.

    The other drafter hears nothing of rounds that it was not asked in, as the second of a cascade.
    """

    SOURCE = "forced"

    def __init__(
        self,
        inner: Drafter,
        forced: Callable[[Sequence[int]], Sequence[int]],
        gammas: Collection[int],
    ) -> None:
        self._inner = inner
        self._forced = forced
        self._gammas = sorted(gammas)
        self._asked = False
        """Whether the other drafter was asked in this round."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return what must follow, in a number that passes were built for, or the other's."""
        must = self._forced(tokens)
        most = min(len(must), room)
        kept = max((gamma for gamma in self._gammas if gamma <= most), default=0)
        self._asked = kept == 0
        if self._asked:
            return (yield from self._inner.propose(tokens, room))
        return Proposal(must[:kept], None, self.SOURCE)

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Tell the other drafter of the rounds that it was asked in."""
        if self._asked:
            self._inner.observe(tokens, round_)
