"""The round: draft, verify, accept, commit. The whole algorithm is the loop in `speculate`.

A drafter proposes tokens, the target scores all of them in one pass and accepts the longest prefix
that its rule allows, and one token of its own follows. Drafter and target are generators of passes:
they yield each `Pass` they need and receive its `Output`. So the same rounds run alone
(`run_rounds`) or together with the rounds of other requests (`scheduler.executor`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import NamedTuple, Protocol, TypeVar, cast

from specrt.engine.protocol import Engine, Feed, Output, RowsEngine
from specrt.errors import RequestError
from specrt.sampling.distribution import Distribution, Ranked

T = TypeVar("T")


class Pass(NamedTuple):
    """One forward pass of one row of text; see `Engine.forward`."""

    engine: Engine
    tokens: Sequence[int]
    start: int
    rows: int
    """How many of the last positions are scored."""
    recursive: bool = False
    """See `Feed.recursive`."""

    def feed(self, row: int) -> Feed:
        """Return what the row is fed."""
        return Feed(row, self.tokens, self.start, self.rows, self.recursive)

    def run(self) -> Output:
        """Run the pass on an engine of one row."""
        if self.recursive:  # only heads are fed so, and they run some rows of several
            return cast(RowsEngine, self.engine).forward_rows((self.feed(0),))[0]
        return self.engine.forward((self.tokens,), self.start, self.rows)


Passes = Generator[Pass, Output, T]
"""Yields passes, receives what each left, and returns a T."""


class Proposal(NamedTuple):
    """The tokens of one draft."""

    tokens: Sequence[int]
    distributions: Sequence[Distribution] | None = None
    """What each token was drawn from; None for certain tokens and for rules that read none."""
    source: str = ""
    """Whose tokens they are, as `Completion.speculation.sources` names them: `model`, `ngram`, …"""
    confidences: Sequence[float] = ()
    """The drafter's estimate for each token, in (0, 1]; empty without one."""
    caught_up: bool = False
    """Whether the drafter first fed tokens of earlier rounds, so its time is not drafting alone."""
    scored: bool = False
    """Whether the target has seen the tokens already, in the launch that drafted them."""


NOTHING = Proposal(())


class Verdict(NamedTuple):
    """How many drafted tokens the target accepts, and its own token after them."""

    accepted: int
    next: int
    """The correction after a rejection, the bonus after none."""
    logprobs: Ranked | None = None
    """Of the accepted tokens and the next one, for requests with `logprobs`."""
    prompt_logprobs: Ranked | None = None
    """Of the prompt's tokens but the first, once, for requests with `prompt_logprobs`."""


class Round(NamedTuple):
    """What one round did. The prefill is the first round; it drafts nothing."""

    tokens: list[int]
    """Committed: the accepted ones and the target's own."""
    drafted: int
    accepted: int
    draft_ns: int
    verify_ns: int
    source: str = ""
    confidences: Sequence[float] = ()
    caught_up: bool = False
    logprobs: Ranked | None = None
    prompt_logprobs: Ranked | None = None

    @property
    def evaluated(self) -> int:
        """Drafted tokens the target examined, up to and including the first rejection."""
        return self.accepted + (self.accepted < self.drafted)


class Drafter(Protocol):
    """A source of proposals. A wrong proposal costs time, never correctness."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Propose at most `room` tokens to follow the committed ones."""

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Learn from a round; `tokens` are all that are committed."""


class Target(Protocol):
    """The model whose output this is. Logits never cross this seam, so it may be anywhere."""

    max_gamma: int
    """Most drafted tokens that it verifies at once."""

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Passes[Verdict]:
        """Score what was proposed to follow the committed tokens, and apply the rule."""


Rounds = Generator[Pass | Round, Output | None, None]
"""Yields passes, each answered by its output, and rounds, each answered by None."""


def speculate(target: Target, drafter: Drafter, tokens: list[int], limit: int) -> Rounds:
    """Extend `tokens` to at most `limit`, yielding the passes it needs and the rounds it commits.

    `tokens` holds the prompt and is the only truth: each model's cache is a prefix of it that
    never includes the last token. Near the limit the drafter has less room, so that no committed
    token is discarded. The first round is the prefill's token: nothing is drafted for it, and no
    drafter learns from it.
    Raises: RequestError for a proposal of more tokens than there is room for.
    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """
    prefilled = False
    while len(tokens) < limit:
        began = perf_counter_ns()
        room = min(limit - len(tokens) - 1, target.max_gamma)
        proposal = (yield from drafter.propose(tokens, room)) if prefilled else NOTHING
        if len(proposal.tokens) > room:
            raise _too_many(proposal, room)
        # A launch that drafts and verifies is one time: all of it counts as verifying.
        drafted = began if proposal.scored else perf_counter_ns()
        verdict = yield from target.verify(tokens, proposal)
        verified = perf_counter_ns()
        committed = [*proposal.tokens[: verdict.accepted], verdict.next]
        tokens += committed
        round_ = Round(
            tokens=committed,
            drafted=len(proposal.tokens),
            accepted=verdict.accepted,
            draft_ns=drafted - began,
            verify_ns=verified - drafted,
            source=proposal.source,
            confidences=proposal.confidences,
            caught_up=proposal.caught_up,
            logprobs=verdict.logprobs,
            prompt_logprobs=verdict.prompt_logprobs,
        )
        if prefilled:
            drafter.observe(tokens, round_)
        prefilled = True
        yield round_


def _too_many(proposal: Proposal, room: int) -> RequestError:
    return RequestError(
        f"the drafter {proposal.source!r} proposed {len(proposal.tokens)} tokens; expected up to "
        f"{room}, the `room` that it was called with"
    )


def run_alone(passes: Passes[T]) -> T:
    """Run passes one after the other, on engines of one row, and return their result."""
    try:
        pass_ = next(passes)
        while True:
            pass_ = passes.send(pass_.run())
    except StopIteration as end:
        result: T = end.value
        return result


def run_rounds(rounds: Rounds) -> Generator[Round, None, None]:
    """Run rounds on engines of one row, and yield each."""
    output: Output | None = None
    with closing(rounds):
        while True:
            try:
                step = rounds.send(output)
            except StopIteration:
                return
            if isinstance(step, Round):
                output = None
                yield step
            else:
                output = step.run()
