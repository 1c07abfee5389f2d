"""The round: draft, verify, accept, commit. The whole algorithm is the one loop below."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns

from specrt.draft import Drafter
from specrt.round import Round
from specrt.target import Target
from specrt.verify import NOTHING


def speculate(
    target: Target, drafter: Drafter, tokens: list[int], limit: int
) -> Iterator[Round]:  # fmt: skip
    """Extend `tokens` to at most `limit`, yielding the tokens each round commits.

    `tokens` holds the prompt and is the only truth: each model's cache is a prefix of it that
    never includes the last token. The drafter decides how many tokens to draft; near the limit
    it has less room, so that no committed token is thrown away. The first yield is the prefill's
    token: nothing is drafted for it, and no drafter learns from it.
    Source: Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
    """
    prefilled = False
    while len(tokens) < limit:
        began = perf_counter_ns()
        room = limit - len(tokens) - 1
        proposal = drafter.propose(tokens, room) if prefilled else NOTHING
        # A launch that drafts and verifies cannot be told apart: all of it counts as verifying.
        drafted = began if proposal.scored else perf_counter_ns()
        accepted, following = target.verify(tokens, proposal)
        verified = perf_counter_ns()
        committed = [*proposal.tokens[:accepted], following]
        tokens += committed
        round_ = Round(
            tokens=committed,
            drafted=len(proposal.tokens),
            accepted=accepted,
            draft_ns=drafted - began,
            verify_ns=verified - drafted,
            source=proposal.source,
            confidences=proposal.confidences,
            caught_up=proposal.caught_up,
        )
        if prefilled:
            drafter.observe(tokens, round_)
        prefilled = True
        yield round_
