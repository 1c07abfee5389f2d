"""The round: draft, verify, accept, commit. The whole algorithm is the one loop below."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import NamedTuple, Protocol, TypeVar

from specrt.engine.protocol import Engine, Output
from specrt.sampling.distribution import (
    Distribution,
    Ranked,
)


class Proposal(NamedTuple):
    """What a drafter proposes.

    `distributions` are those the tokens were drawn from, one each; None where every token was
    certain (an n-gram) or where the rule does not ask. `source` names the drafter, `confidences`
    are what it thought of each token, where it was asked; `caught_up` says that it first fed
    tokens of rounds that it had no part in, which takes longer. `scored` says that the target has
    seen the tokens already, in the launch that drafted them.
    """

    tokens: Sequence[int]
    distributions: Sequence[Distribution] | None = None
    source: str = ""
    confidences: Sequence[float] = ()
    caught_up: bool = False
    scored: bool = False


NOTHING = Proposal(())


class Verdict(NamedTuple):
    """How many drafted tokens were kept, and the target's own token after them.

    `next` is the correction after a rejection, the bonus after none. `logprobs` are of the kept
    tokens and the next one, `prompt_logprobs` of all tokens of the prompt but the first; None
    where nobody asked, or not in this round.
    """

    accepted: int
    next: int
    logprobs: Ranked | None = None
    prompt_logprobs: Ranked | None = None


class Target(Protocol):
    """Whoever owns the output. Logits never cross this seam, so it may sit anywhere."""

    def verify(self, tokens: Sequence[int], proposal: Proposal) -> Passes[Verdict]:
        """Judge what was proposed to follow the committed tokens, asking for passes."""


class Drafter(Protocol):
    """A source of proposals. It may be wrong; it may not be slow."""

    def propose(self, tokens: Sequence[int], room: int) -> Passes[Proposal]:
        """Propose at most `room` tokens to follow the committed ones, asking for passes."""

    def observe(self, tokens: Sequence[int], round_: Round) -> None:
        """Learn what was committed, all of it, after a round, and what the round came to."""


T = TypeVar("T")


class Pass(NamedTuple):
    """One forward pass of one row of text; see `Engine.forward`."""

    engine: Engine
    tokens: Sequence[int]
    start: int
    rows: int
    """How many of the last positions are scored."""

    def run(self) -> Output:
        """Run it on an engine of one row."""
        return self.engine.forward((self.tokens,), self.start, self.rows)


Passes = Generator[Pass, Output, T]
"""Asks for passes, is sent what each left behind, and returns a T.

A completion says what it needs and never runs a pass itself. So its rounds can be run alone, or
with the rows of other completions in the same passes, and are the same rounds.
"""


def run_alone(asking: Passes[T]) -> T:
    """Run what asks for passes to its end, one pass after the other, on engines of one row."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(asked.run())
    except StopIteration as end:
        result: T = end.value
        return result


class Round(NamedTuple):
    """What one round did. The prefill is the round that drafts nothing and emits first."""

    tokens: list[int]
    """Committed: the accepted ones and the target's own."""
    drafted: int
    accepted: int
    draft_ns: int
    verify_ns: int
    source: str = ""
    """Which drafter proposed: `model`, `ngram`; empty where nothing was proposed."""
    confidences: Sequence[float] = ()
    """What the drafter thought of each token it drafted, in (0, 1]; empty where nobody asked."""
    caught_up: bool = False
    """Whether the drafter first fed tokens of rounds that it had no part in."""
    logprobs: Ranked | None = None
    """What the target thought of each token, where the request asks for it."""
    prompt_logprobs: Ranked | None = None
    """What it thought of the prompt's, told with the first round, where the request asks for it."""

    @property
    def evaluated(self) -> int:
        """Drafted tokens the target examined, up to and including the first rejection."""
        return self.accepted + (self.accepted < self.drafted)


Rounds = Generator[Pass | Round, Output | None, None]
"""Asks for passes, and is sent what each left behind; tells of rounds, and is sent nothing."""


def speculate(target: Target, drafter: Drafter, tokens: list[int], limit: int) -> Rounds:
    """Extend `tokens` to at most `limit`, yielding the passes it needs and what rounds commit.

    `tokens` holds the prompt and is the only truth: each model's cache is a prefix of it that
    never includes the last token. The drafter decides how many tokens to draft; near the limit
    it has less room, so that no committed token is thrown away. The first round is the prefill's
    token: nothing is drafted for it, and no drafter learns from it.
    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """
    prefilled = False
    while len(tokens) < limit:
        began = perf_counter_ns()
        room = limit - len(tokens) - 1
        proposal = (yield from drafter.propose(tokens, room)) if prefilled else NOTHING
        # A launch that drafts and verifies cannot be told apart: all of it counts as verifying.
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


def run_rounds(rounds: Rounds) -> Generator[Round, None, None]:
    """Run rounds on engines of one row, each pass as it is asked for."""
    sent: Output | None = None
    with closing(rounds):
        while True:
            try:
                asked = rounds.send(sent)
            except StopIteration:
                return
            if isinstance(asked, Round):
                sent = None
                yield asked
            else:
                sent = asked.run()
