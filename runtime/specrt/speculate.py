"""The round: draft, verify, accept, commit. The whole algorithm is the one loop below."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from time import perf_counter_ns

from specrt.draft import Drafter
from specrt.engine import Output
from specrt.passes import Pass
from specrt.round import Round
from specrt.target import Target
from specrt.verify import NOTHING

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


def played(rounds: Rounds) -> Generator[Round, None, None]:
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
