"""Drafters: a draft model, two drafters in turn, and tokens that a grammar forces.

`DRAFTERS`, at the end, is the table of them: a new drafter is one entry there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol, TypeVar

from specrt.bundle import BLOCK_HEAD, CHAIN_HEAD, KINDS, KV_HEAD
from specrt.engine.protocol import BlockShape, FusedRounds, Output, RowOutput
from specrt.errors import EngineError, RequestError
from specrt.params import Row, SamplingParams
from specrt.sampling.distribution import Distribution, distribution_of, process
from specrt.sampling.noise import Noise, Purpose
from specrt.sampling.processors import LogitsProcessors, likeliest
from specrt.speculation.gamma import DraftDecision, GammaPolicy
from specrt.speculation.kv_cache import KVCache
from specrt.speculation.ngram import NgramDrafter
from specrt.speculation.round import NOTHING, Drafter, Pass, Passes, Proposal, Round
from specrt.speculation.target import VERIFIERS
from specrt.speculation.text_memory import KeyMemory, MemoryDrafter

T = TypeVar("T")

UNKNOWN = 1.0
"""The confidence of a drafter that estimates none."""

REACH = 7.0
"""A draft considers tokens down to exp(-7), a thousandth, of the likeliest: any distribution that
it draws from is lossless, and the whole of a large vocabulary costs more than the draft."""

PENDING = 2
"""Most tokens that the cache lacks after a round that the model drafted: the target's own one, and
the last drafted one if it was accepted. With more the model first catches up."""


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

    `gamma` decides how far to draft, token by token. The confidence of a token is the largest
    probability of the draft's distribution: known before the token is drawn, so that leaving
    tokens out because of it is lossless under every verifier.

    With `rounds` a greedy round runs as one launch where it fits: the policy decides before it how
    far to draft, and the target has scored the draft when `propose` returns. The policy therefore
    gets no confidences, and one time for the whole round. A launch needs a target whose cache,
    `target`, lacks only the last token.

    `vocabulary` is how many ids both models know, where padding makes one of them longer. Ids
    beyond it are never proposed, and once one is committed that the draft does not know, the draft
    proposes nothing.
    """

    SOURCE = "model"
    _lacks_rounds = False
    """Whether the cache lacks all tokens of a round of its own, accepted ones too."""

    def __init__(
        self,
        cache: KVCache,
        params: SamplingParams,
        noise: Noise,
        gamma: GammaPolicy,
        vocabulary: int | None = None,
        rounds: FusedRounds | None = None,
        processors: LogitsProcessors | None = None,
        target: KVCache | None = None,
        max_gamma: int = PENDING,
    ) -> None:
        self._processors = processors
        self._target = target
        self._path: list[int] = []
        self._rounds = rounds if params.greedy and processors is None else None
        self._cache = cache
        self._vocabulary = vocabulary or cache.engine.geometry.vocab_size
        self._params = params
        self._greedy = params.greedy
        self._noise = noise
        self._gamma = gamma
        verifier = VERIFIERS[params.verifier]
        self._needs_distributions = verifier.needs_distributions and not params.greedy
        self._purpose = verifier.draft_noise
        self._usual = max_gamma + 1 if self._lacks_rounds else PENDING
        """Most tokens that the cache lacks after a round of its own."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Feed what the cache lacks, then one drafted token at a time.

        After a round in which every token was accepted the cache lacks two tokens, else one; after
        rounds without this drafter it lacks theirs too, and one wider pass feeds them. The last
        drafted token is not fed: whether it is accepted is not known yet.
        """
        most = self._most(tokens, room)
        self._cache.length = len(tokens) - self._cache.lacks(len(tokens))
        pending: Sequence[int] = tokens[self._cache.length :]
        if most <= 0 or max(pending) >= self._cache.engine.geometry.vocab_size:
            return NOTHING
        if self._rounds is not None:
            fused = self._fused(self._rounds, tokens, pending, most)
            if fused is not None:
                return fused
        behind = len(pending) > self._usual
        choose = self._likeliest if self._greedy else self._draw
        if self._processors is not None:
            self._processors.learn(tokens)
        decide = self._gamma.decide
        drafted = self._path = list[int]()
        confidences: list[float] = []
        distributions: list[Distribution] = []
        while True:
            output = yield from self._feed(pending, len(tokens), len(drafted))
            chosen = choose(output, len(tokens) + len(drafted), distributions)
            if chosen is None:
                break
            token, confidence = chosen
            decision = decide(len(drafted) + 1, confidence if self._rounds is None else UNKNOWN)
            if decision is DraftDecision.DISCARD:
                break
            drafted.append(token)
            confidences.append(confidence)
            if decision is DraftDecision.STOP or len(drafted) == most:
                break
            pending = (token,)
        if not drafted:
            return NOTHING
        drawn_from = distributions[: len(drafted)] if self._needs_distributions else None
        return Proposal(drafted, drawn_from, self.SOURCE, confidences, behind)

    def _most(self, tokens: Sequence[int], room: int) -> int:
        """Return the most tokens to draft in this round."""
        return min(self._gamma.choose(), room)

    def _feed(self, pending: Sequence[int], committed: int, drafted: int) -> Passes[Output]:
        """Feed what the cache lacks, `drafted` tokens after the committed ones."""
        return (yield from self._cache.feed(pending, 1))

    def _fused(
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
            valid = next(i for i, token in enumerate(drafted) if token < 0)
            if not valid:
                return NOTHING
            return Proposal(drafted[:valid], None, self.SOURCE, confidences[:valid])
        return Proposal(drafted, None, self.SOURCE, confidences, scored=True)

    def _read(
        self, output: Output, processors: LogitsProcessors, take: Callable[[Row], T]
    ) -> T | None:
        """Read the scores as the request's processors leave them; None for no numbers."""
        if output.argmax.item() < 0:
            return None
        return processors.read(output.logits[0, 0, : self._vocabulary], self._path, take)

    def _likeliest(
        self, output: Output, position: int, distributions: list[Distribution]
    ) -> tuple[int, float] | None:
        if self._processors is not None:
            try:
                best = self._read(output, self._processors, likeliest)
                return None if best is None else (best, _certainty(output))
            except RequestError:  # nothing left: the target raises if the text gets there
                return None
        best = output.argmax.item()
        if best < 0:  # the scores are not numbers
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
        if self._purpose is not Purpose.TOKEN:
            # A token drafted after a rejection was never verified, and is drawn again in the next
            # round: with other noise, or the draws would depend on the rejection. No two rounds
            # begin at the same length.
            place = len(distributions)
            position = (position - place) << 16 | place
        distributions.append(distribution)
        token = distribution.draw(self._noise, self._purpose, position)
        return token, float(distribution.probs.max())

    def _distribution(self, output: Output) -> Distribution | None:
        """Return what to draw from; None where there is nothing, which only ends the draft."""
        try:
            if self._processors is None:
                return distribution_of(output, 0, self._params, REACH, self._vocabulary)
            return self._read(
                output, self._processors, lambda row: process(row, self._params, REACH)
            )
        except (EngineError, RequestError):
            return None

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Drop drafted tokens that were not committed, and let the policy learn."""
        self._cache.length = min(self._cache.length, len(tokens) - 1)
        self._gamma.observe(round_ if self._rounds is None else _as_one_launch(round_))


class HeadDrafter(ModelDrafter):
    """A head, drafted as a chain: it goes on from its own state while the target's is not known.

    Its cache never counts a token it drafted: what stood there was computed from its own state, and
    is computed again from the target's features once they are known. So it lacks all tokens of the
    round before, the accepted ones and the target's own, and feeds them in one pass.
    Source: EAGLE-3, Li et al. 2025, arXiv:2503.01840.
    """

    _lacks_rounds = True

    def _feed(self, pending: Sequence[int], committed: int, drafted: int) -> Passes[Output]:
        if not drafted:
            return (yield from self._cache.feed(pending, 1))
        return (yield Pass(self._cache.engine, pending, committed + drafted - 1, 1, recursive=True))


class KVDrafter(HeadDrafter):
    """A head that reads its target's keys and values, and is fed the last token alone.

    What it drafts has no keys: each token is drafted from the position of the last committed one,
    and from what the head made of the one before.
    """

    def _feed(self, pending: Sequence[int], committed: int, drafted: int) -> Passes[Output]:
        if not drafted:
            return (yield from self._cache.feed(pending, 1))
        return (yield Pass(self._cache.engine, pending, committed - 1, 1, recursive=True))


class BlockDrafter(ModelDrafter):
    """A head that drafts all tokens of a round in one pass, which costs the same for any number.

    The pass is fed what the cache lacks; a position of its cache holds what the target left there,
    so it never counts the last token, whose position a block begins at. Where a block does not fit
    after the text any more nothing is drafted. The confidence of a token is the head's own. Where
    a Markov head adds to the scores of a token what the one before it says, the engine is asked for
    each once that is drawn, which is one small product.
    Source: DFlash, Chen et al. 2026, arXiv:2602.06036; DSpark, arXiv:2606.19348.
    """

    _lacks_rounds = True
    _rows = 0
    _output: Output

    @property
    def _block(self) -> BlockShape:
        block = self._cache.engine.traits.block
        assert block is not None, "the engine of a head that drafts blocks says what they are"
        return block

    def _most(self, tokens: Sequence[int], room: int) -> int:
        fits = len(tokens) - 1 + self._block.block_size <= self._cache.engine.max_length
        self._rows = min(super()._most(tokens, room), self._block.drafts) if fits else 0
        return self._rows

    def _feed(self, pending: Sequence[int], committed: int, drafted: int) -> Passes[Output]:
        if drafted and self._block.chained:
            place = committed + drafted - 1
            return (yield Pass(self._cache.engine, pending, place, 1, recursive=True))
        if not drafted:
            self._output = yield from self._run(pending)
        return RowOutput(self._output, 0, drafted, 1)

    def _run(self, pending: Sequence[int]) -> Passes[Output]:
        """Feed what the cache lacks, in chunks where that is wider than any pass."""
        cache = self._cache
        engine = cache.engine
        while len(pending) > engine.max_width:
            yield Pass(engine, pending[: engine.max_width], cache.length, 1)
            cache.length += engine.max_width - 1
            pending = pending[engine.max_width - 1 :]
        output = yield Pass(engine, pending, cache.length, self._rows)
        cache.length += len(pending) - 1
        return output

    def _draw(
        self, output: Output, position: int, distributions: list[Distribution]
    ) -> tuple[int, float] | None:
        drawn = super()._draw(output, position, distributions)
        if drawn is None or output.confidence is None:
            return drawn
        return drawn[0], _certainty(output)


DRAFT_KINDS = dict.fromkeys(KINDS, ModelDrafter)
DRAFT_KINDS |= {CHAIN_HEAD: HeadDrafter, BLOCK_HEAD: BlockDrafter, KV_HEAD: KVDrafter}
"""What drafts with a draft, by the kind of its engine."""


def _certainty(output: Output) -> float:
    """Return the probability of the draft's likeliest token, before any processors."""
    confidence = output.confidence
    return UNKNOWN if confidence is None else float(confidence.item())


def _as_one_launch(round_: Round) -> Round:
    """Return a round with all of its time as verifying, as a launch of all of it has.

    Where the draft first caught up, which does not measure other rounds, all counts as drafting.
    """
    if not round_.draft_ns or not round_.drafted:
        return round_
    spent = round_.draft_ns + round_.verify_ns
    if round_.caught_up:
        return round_._replace(draft_ns=spent, verify_ns=0)
    return round_._replace(draft_ns=0, verify_ns=spent)


class CascadeDrafter:
    """Uses one drafter, and another where the first proposes nothing.

    Meant for lookup before the draft model: a copy costs next to nothing and runs further, and
    where there is nothing to copy, or its policy chose a plain step or dropped the first token,
    the model drafts.

    While lookup drafts, the draft model's cache falls behind the committed tokens, and stays as it
    is. When the model drafts next it feeds all that it lacks in the one pass that drafts its first
    token, `tokens[length:]` wide (in chunks where that is wider than any pass it was built for),
    and drafts on from there one token at a time. No pass runs without need.

    To the first drafter a round that the second drafted is a plain step, of one token: its policy
    learns acceptance from tokens of its own only, and one that has given up still counts the rounds
    until it tries again. The times are those of the whole round. The second drafter observes only
    rounds of its own.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second
        self._fell_back = False
        """Whether this round was left to the second drafter."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return what the first drafter proposes, else what the second does."""
        proposal = yield from self._first.propose(tokens, room)
        self._fell_back = not proposal.tokens
        return (yield from self._second.propose(tokens, room)) if self._fell_back else proposal

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Let each drafter learn from its part in the round."""
        if not self._fell_back:
            self._first.observe(tokens, round_)
            return
        plain = Round(round_.tokens[:1], 0, 0, round_.draft_ns, round_.verify_ns)
        self._first.observe(tokens, plain)
        self._second.observe(tokens, round_)


class ForcedDrafter:
    """Proposes the tokens that must follow, and uses another drafter where there are none.

    `forced(tokens)` returns those tokens; they cost nothing to draft and are nearly certain: a
    target may still spell the same text in other tokens, so they are verified as all drafts are. As
    many are proposed as the widest pass of `gammas` holds, whatever gamma a policy would choose.

    The other drafter observes only rounds of its own, as the second of a cascade does.
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
        self._fell_back = False
        """Whether this round was left to the other drafter."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Return forced tokens, in a number that passes were built for, or the other's."""
        forced = self._forced(tokens)
        most = min(len(forced), room)
        count = max((gamma for gamma in self._gammas if gamma <= most), default=0)
        self._fell_back = count == 0
        if self._fell_back:
            return (yield from self._inner.propose(tokens, room))
        return Proposal(forced[:count], None, self.SOURCE)

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Let the other drafter learn from its rounds."""
        if self._fell_back:
            self._inner.observe(tokens, round_)


class DraftContext(Protocol):
    """The parts that a drafter of one completion needs."""

    @property
    def params(self) -> SamplingParams:
        """The options of the completion."""

    @property
    def noise(self) -> Noise:
        """The noise of the completion."""

    @property
    def processors(self) -> LogitsProcessors | None:
        """The processors of the completion."""

    @property
    def memory(self) -> KeyMemory | None:
        """The finished texts that the completion may be drafted from."""

    @property
    def source(self) -> Sequence[int]:
        """The token ids of what the completion is a text of; empty without a source of tokens."""

    def model(self) -> ModelDrafter:
        """Return the draft model with the cache of this completion's row."""

    def policy(self, source: str) -> GammaPolicy:
        """Return the gamma policy of a source, which outlives the completion."""


class DrafterSpec(NamedTuple):
    """A drafter that a request may name."""

    make: Callable[[DraftContext], Drafter]
    policies: tuple[str, ...] = ()
    """Names of its gamma policies, in the order they are tried; each has the next one as its
    rival. Empty for plain decoding."""
    free: frozenset[str] = frozenset()
    """Policies whose drafts run no pass."""
    needs_model: bool = False
    """Whether it runs the draft model."""
    beside_memory: str = ""
    """The policy next to which memory across requests has one, with the same rival and as free."""


def _cascade(context: DraftContext) -> Drafter:
    return CascadeDrafter(_lookup(context, "lookup"), context.model())


def _lookup(context: DraftContext, policy: str) -> Drafter:
    """Return lookup in source and text at hand, and in memory if the completion has one."""
    lookup = NgramDrafter(context.policy(policy), source=context.source)
    if context.memory is None:
        return lookup
    return MemoryDrafter(lookup, context.memory, context.policy(MemoryDrafter.SOURCE))


DRAFTERS: dict[str, DrafterSpec] = {
    "model": DrafterSpec(lambda context: context.model(), ("model",), needs_model=True),
    "ngram": DrafterSpec(
        lambda context: _lookup(context, "ngram"),
        ("ngram",),
        frozenset({"ngram"}),
        beside_memory="ngram",
    ),
    "cascade": DrafterSpec(
        _cascade,
        ("lookup", "model"),
        frozenset({"lookup"}),
        needs_model=True,
        beside_memory="lookup",
    ),
    "none": DrafterSpec(lambda context: NoDrafter()),
}
"""By the name that requests, recipes and the command line use; the first that a bundle can run is
its default."""

NO_DRAFTER = "none"
"""The entry that drafts nothing."""


def available_drafters(*, has_model: bool) -> tuple[str, ...]:
    """Return the names of the drafters that propose something on a bundle."""
    return tuple(
        name
        for name, spec in DRAFTERS.items()
        if spec.policies and (has_model or not spec.needs_model)
    )
